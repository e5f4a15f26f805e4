"""How fast one save goes on: at once, or giving way to the rounds that go on meanwhile, until
somebody waits for it. Must not know what is written.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from syncer.checkpoint.lane import Lane

TURN_BYTES = 2 * 1024 * 1024
"""After so many bytes, a millisecond of one core, it is asked whether others need it. Hashing asks
before each of its pieces, which are larger."""
RESTS_S = 0.05
"""A pause for the rate is taken in pieces of so much, so that it ends when somebody waits."""


class Tempo:
    """Of a save that somebody waits for. `write` and `hash` are called before so many bytes are
    written or hashed, and return when they may be."""

    def write(self, size_bytes: int) -> None:
        """On the thread of the save."""

    def hash(self, size_bytes: int) -> None:
        """On one of the threads beside it."""


UNHELD = Tempo()


class GivingWay(Tempo):
    """Of the saves in the background, one after the other: each until somebody waits for it.

    Only the disk has a rate (bytes a second, None: any). Its threads are like all others, as one
    that were nicer would be kept waiting while it holds the interpreter's lock, and, once somebody
    waits for it, with nobody to hurry it.
    """

    def __init__(self, lane: Lane, rate: int | None):
        self.lane, self.rate = lane, rate
        self.hastened = threading.Event()
        self.since: dict[str, int] = {}
        self.due_s = 0.0
        self.begin()

    def begin(self) -> None:
        """Another save will give way."""
        self.since = {"write": TURN_BYTES, "hash": TURN_BYTES}
        self.due_s = self.lane.now_s()
        self.hastened.clear()

    def hasten(self) -> None:
        """Somebody waits for it: it gives way no longer, and has no rate."""
        self.hastened.set()

    def write(self, size_bytes: int) -> None:
        self._turn("write", size_bytes)
        if self.rate is None:
            return
        while not self.hastened.is_set() and (left := self.due_s - self.lane.now_s()) > 0:
            self.lane.pause(min(left, RESTS_S))
        self.due_s = max(self.due_s, self.lane.now_s()) + size_bytes / self.rate

    def hash(self, size_bytes: int) -> None:
        self._turn("hash", size_bytes)

    def _turn(self, which: str, size_bytes: int) -> None:
        self.since[which] += size_bytes
        if self.since[which] >= TURN_BYTES:
            self.since[which] = 0
            self.lane.give_way(self.hastened.is_set)
