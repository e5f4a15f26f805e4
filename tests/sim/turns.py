"""Catch-ups in simulated runs: sizes as small as the tensors, and what must hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from syncer.server import catchups
from syncer.tls import TlsSocket

SIZES = ("SHARE_BYTES", "BEGIN_BYTES", "FLOOR_BYTES", "LEAST_SHARE_BYTES", "TAIL_BYTES")
WAITED_FOR: dict[Any, int] = {}
"""Group -> what was on its way when a round had just asked it, until the turn has ended."""

SMALL_BYTES = 1024
"""Of who has introduced himself: WELCOME, notices, and a reader's LAYOUT and manifests, which are
small beside any real model and wait for no turn. And of who has just been caught up: his pull."""
SEALING_BYTES = 8 * 22
"""What TLS adds to the few records of one that is throttled; a limit is for what they carry."""


@contextmanager
def small(size: int) -> Iterator[None]:
    """So many bytes of catch-ups may be on their way, unless it is as many as ever."""
    before, pulled = {name: getattr(catchups, name) for name in SIZES}, catchups.CatchUps.pulled

    def look(line: Any, group: Any) -> None:
        pulled(line, group)
        WAITED_FOR[group] = group.in_flight()

    catchups.CatchUps.pulled = look               # all of it may be gone before the turn ends
    if size < catchups.BEGIN_BYTES:
        vars(catchups).update(dict.fromkeys(SIZES, size), TAIL_BYTES=0)
    try:
        yield
    finally:
        vars(catchups).update(before)
        catchups.CatchUps.pulled = pulled
        WAITED_FOR.clear()


class LineCheck:
    """Looks at the line of one server after every turn of its loop."""

    def __init__(self) -> None:
        self.most = 0
        """Bytes that were allowed to be on their way at any time since the line began."""
        self.others: dict[Any, int] = {}
        """Group -> what was on its way before it caught up, or because a round waited for it."""
        self.served = 0
        """How many shared those bytes."""
        self.held: dict[Any, set[tuple[int, int]]] = {}
        """Group that waits -> what was queued before, for an older connection that was current."""

    def look(self, session: Any) -> None:
        """Who waits for a turn has nothing queued, and catch-ups never stand in front of the next
        broadcast with more bytes than may be on their way."""
        waited_for = dict(WAITED_FOR)
        WAITED_FOR.clear()
        turns = None if session is None else session.outgoing.catchups
        if turns is None or not turns.line:
            self.most = self.served = 0
            self.others.clear()
            self.held.clear()
            return
        self.held = {group: held for group, held in self.held.items() if group in turns.line}
        self.most = max(self.most, turns.headroom.bytes, turns.at_once * catchups.LEAST_SHARE_BYTES)
        fewer, self.served = self.served, min(turns.at_once, len(turns.line))
        if self.served > fewer:                   # who shared with fewer may still have that
            self.others |= {group: max(self.others[group], group.in_flight())
                            for group in turns.line
                            if group in self.others and group.throttled and not group.ended}
        on_the_way = 0
        for group, turn in turns.line.items():
            if group.ended:                       # what it had begun goes out with the refusal
                continue
            if not turn.begun:
                held = set(group.outbox.held_versions)
                before = self.held.setdefault(group, held if group.sent else set())
                assert held <= before, f"{group.learner} waits, but is sent to"
            elif group.throttled and group in self.others:
                self.others[group] = max(self.others[group], waited_for.get(group, 0))
                on_the_way += group.in_flight()
                continue
            self.others[group] = group.in_flight()
        bound = self.most + sum(self.others.values()) + SMALL_BYTES * sum(
            turn.reads or group.extended or (turn.begun and not group.outbox.catching_up)
            for group, turn in turns.line.items()) + SEALING_BYTES * sum(
            isinstance(group.control.sock, TlsSocket) for group in turns.line)
        assert on_the_way <= bound, f"{on_the_way} bytes of catch-ups are on their way, not {bound}"
