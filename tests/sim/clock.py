"""Simulated time: callbacks in order of their moment, one random source for everything."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

MS = 1_000_000
SECOND = 1_000_000_000
CALLBACKS_MAX = 1_000_000


class World:
    """The clock and the dice of one run. Times are ns."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.births = random.Random(f"births of {seed}")
        """What tells a process from the others; drawn apart, since nothing may depend on it."""
        self.now_ns = 0
        self.done = 0
        self._heap: list[tuple[int, int, Callable[..., Any], tuple[Any, ...]]] = []
        self._count = 0

    def after(self, delay_ns: float, call: Callable[..., Any], *arguments: Any) -> None:
        """Call later; at equal times in the order of asking."""
        self._count += 1
        moment = self.now_ns + max(0, int(delay_ns))
        heapq.heappush(self._heap, (moment, self._count, call, arguments))

    def step(self) -> bool:
        """Run the next callback; False if there is none. May be called by a callback that has to
        wait: the world goes on meanwhile."""
        if not self._heap:
            return False
        moment, _, call, arguments = heapq.heappop(self._heap)
        self.now_ns = max(self.now_ns, moment)
        self.done += 1
        assert self.done < CALLBACKS_MAX, f"no end in sight after {self.now_ns / SECOND:.0f} s"
        call(*arguments)
        return True

    def wait(self, reached: Callable[[], bool]) -> None:
        """Let the world go on until something holds; whoever asks does nothing else meanwhile."""
        while not reached():
            assert self.step(), "nothing is left to happen"

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.rng.random() < probability

    def between(self, low: float, high: float) -> float:
        """A number whose logarithm is uniform: as often small as large."""
        return low * (high / low) ** self.rng.random()
