"""SIGINT and SIGTERM as a request that a training loop looks at between two steps.

Must not end the process by itself: the loop stops where its parameters are whole.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from syncer.exits import Exit, after_signal


class Stopped(Exception):
    """Raised out of a wait, or at the second signal, wherever the program is."""


class StopRequest:
    """Installed in the main thread until `restore`. `asked` is the signal number, or 0."""

    def __init__(self, *signals: int):
        self.asked = 0
        self._waiting = False
        self._before = {number: signal.signal(number, self._received)
                        for number in signals or (signal.SIGINT, signal.SIGTERM)}

    def restore(self) -> None:
        """Signals do again what they did before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def exit_status(self) -> int:
        """128 + signal after a signal, else 0."""
        return after_signal(self.asked) if self.asked else Exit.DONE

    @contextmanager
    def ends_wait(self) -> Iterator[None]:
        """Inside, a signal raises `Stopped`: for a wait that may be long and changes nothing."""
        if self.asked:
            raise Stopped
        self._waiting = True
        try:
            yield
        finally:
            self._waiting = False

    def _received(self, number: int, _frame: FrameType | None) -> None:
        again = self.asked != 0
        self.asked = self.asked or number
        if again or self._waiting:
            raise Stopped
