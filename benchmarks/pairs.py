"""Timing in interleaved pairs: a ratio to a reference run in the same process, minute and cache.

Must not know what is measured. A machine's speed drifts by tens of percent within seconds; both
sides of a pair see the same drift, so the median of many pairs is steady where two separate
timings are not.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple


class Ratio(NamedTuple):
    """Median times in nanoseconds of one call each, and how many times faster ours is."""

    reference_ns: float
    ours_ns: float
    ratio: float


Clock = Callable[[], int]
"""Nanoseconds: `time.perf_counter_ns` for wall time, `time.process_time_ns` for work that waits for
nothing and runs on one thread: then other programs on the machine do not count."""


def time_ns(call: Callable[[], object], repeats: int, clock: Clock = time.perf_counter_ns) -> float:
    """Mean time of one call, in nanoseconds, over `repeats` calls in a row."""
    start = clock()
    for _ in range(repeats):
        call()
    return (clock() - start) / repeats


def repeats_for(call: Callable[[], object], sample_ns: float) -> int:
    """How many calls fill about `sample_ns`."""
    return max(1, int(sample_ns / max(1.0, time_ns(call, 1))))


def ratio(
    reference: Callable[[], object],
    ours: Callable[[], object],
    rounds: int = 15,
    sample_ms: float = 5.0,
    clock: Clock = time.perf_counter_ns,
) -> Ratio:
    """Times both in `rounds` interleaved pairs, each side first in every other pair.

    Returns the medians of both and the median of the pairs' own ratios (reference / ours: above 1
    means that ours is faster). Each sample lasts at least about `sample_ms`."""
    calls = (reference, ours)
    for call in calls:
        call()  # warm caches, pages and thread pools
    repeats = [repeats_for(call, sample_ms * 1e6) for call in calls]
    samples: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        for side in (0, 1) if turn % 2 == 0 else (1, 0):
            samples[side].append(time_ns(calls[side], repeats[side], clock))
    ratios = [ref / max(our, 1.0) for ref, our in zip(*samples, strict=True)]
    return Ratio(statistics.median(samples[0]), statistics.median(samples[1]),
                 statistics.median(ratios))
