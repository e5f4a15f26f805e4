"""Simulated time: callbacks in order of their moment, one random source for everything."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

MS = 1_000_000
SECOND = 1_000_000_000


class World:
    """The clock and the dice of one run. Times are ns."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.now_ns = 0
        self.done = 0
        self._heap: list[tuple[int, int, Callable[..., Any], tuple]] = []
        self._count = 0

    def after(self, delay_ns: float, call: Callable[..., Any], *arguments: Any) -> None:
        """Call later; at equal times in the order of asking."""
        self._count += 1
        moment = self.now_ns + max(0, int(delay_ns))
        heapq.heappush(self._heap, (moment, self._count, call, arguments))

    def step(self) -> bool:
        """Run the next callback; False if there is none."""
        if not self._heap:
            return False
        moment, _, call, arguments = heapq.heappop(self._heap)
        self.now_ns = max(self.now_ns, moment)
        self.done += 1
        call(*arguments)
        return True

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def between(self, low: float, high: float) -> float:
        """A number whose logarithm is uniform: as often small as large."""
        return low * (high / low) ** self.rng.random()
