"""What keeps a log short: of lines with one text a few, then one now and then with their number.

Whoever can cause a line can cause a million of them, and so can a full disk. Must not write lines.
It belongs to the loop's thread; other threads have no timers, so that what is held back of their
lines is told with the next one that is due, or at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from syncer.server.loop import Loop, Timer

BURST = 50
"""Lines of one text at once."""
BURSTS = {"outer step": 1000, "checkpoint committed": 1000, "checkpoint written": 1000}
"""Of texts that a run of moderate length writes anyway: whoever counts steps finds each of them."""
REFILL_NS = 5 * 10**9
"""One more after so long, and how often those that are too many are told."""

Write = Callable[[str, str, dict[str, Any]], None]


class Kind:
    """One text: how many lines it has left, and those that were held back since the last one."""

    __slots__ = ("burst", "held", "last", "left", "timer", "when_ns")

    def __init__(self, text: str, now_ns: int):
        self.burst = self.left = BURSTS.get(text, BURST)
        self.when_ns = now_ns
        self.held = 0
        self.last: tuple[str, dict[str, Any]] = ("", {})
        self.timer: Timer | None = None


class Restraint:
    """`admits` a line, or holds it back until `write` is given the last of its kind with the number
    of those it stands for, `times`."""

    def __init__(self, loop: Loop, write: Write):
        self.loop, self.write = loop, write
        self.thread = threading.get_ident()
        self.kinds: dict[str, Kind] = {}
        self.aside: dict[str, Kind] = {}
        """Of the lines of other threads, with"""
        self.lock = threading.Lock()
        self.over = False

    def admits(self, level: str, text: str, fields: dict[str, Any]) -> bool:
        if threading.get_ident() != self.thread:
            with self.lock:
                return self._admits_aside(self.loop.now_ns(), level, text, fields)
        kind = self.kinds.get(text)
        if kind is None or kind.timer is None:  # else nothing is due before the timer
            now_ns = self.loop.now_ns()
            kind = _kind(self.kinds, text, now_ns)
            if kind.left:
                kind.left -= 1
                return True
            kind.timer = self.loop.call_at(now_ns + REFILL_NS, lambda: self._tell(text, kind))
        kind.held += 1
        kind.last = level, fields
        return False

    def _admits_aside(self, now_ns: int, level: str, text: str, fields: dict[str, Any]) -> bool:
        if self.over:
            return True
        kind = _kind(self.aside, text, now_ns)
        kind.held += 1
        kind.last = level, fields
        if kind.left:
            kind.left -= 1
            self._tell(text, kind)
        return False

    def _tell(self, text: str, kind: Kind) -> None:
        (level, fields), times = kind.last, kind.held
        kind.timer, kind.held, kind.last = None, 0, ("", {})
        self.write(level, text, fields if times == 1 else {**fields, "times": times})

    def close(self) -> None:
        """Tell what was held back."""
        for text, kind in self.kinds.items():
            if kind.timer is not None:
                kind.timer.cancel()
                self._tell(text, kind)
        with self.lock:
            self.over = True
            for text, kind in self.aside.items():
                if kind.held:
                    self._tell(text, kind)


def _kind(kinds: dict[str, Kind], text: str, now_ns: int) -> Kind:
    """What this text has left now."""
    kind = kinds.get(text)
    if kind is None:
        kind = kinds[text] = Kind(text, now_ns)
    fresh = (now_ns - kind.when_ns) // REFILL_NS
    kind.when_ns += fresh * REFILL_NS
    kind.left = min(kind.burst, kind.left + fresh)
    return kind
