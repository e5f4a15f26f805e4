"""What a row of the limits is and how one is measured. Must not know what is measured.

A figure is a ratio of one run: ours and its bound in turns, in the same minute on the same cores.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Figure(NamedTuple):
    """How much of the bound is reached, above 1 more than it; and what that is made of, where the
    row has it: both rates in `unit`, and CPU seconds for a GB beside each."""

    ratio: float
    ours: float | None = None
    bound: float | None = None
    unit: str = "GB/s"
    ours_cpu: float | None = None
    bound_cpu: float | None = None


class NotHere(Exception):
    """This machine cannot have the row; one sentence says what it lacks."""


class Row(NamedTuple):
    """A path of the table: its key, its text of at most 29 characters, the ratio that it is to
    reach, and what measures it; told whether to be short, for a test that it works."""

    name: str
    path: str
    at_least: float
    measure: Callable[[bool], Figure]


def sides() -> tuple[set[int], set[int]]:
    """Cores for who is measured and cores for the other ends; the same where there is one core."""
    cores = sorted(os.sched_getaffinity(0))
    kept = max(1, len(cores) // 2)
    return set(cores[:kept]), set(cores[kept:] or cores)


@contextmanager
def on(cores: set[int]) -> Iterator[None]:
    """This thread, and threads and processes that it starts meanwhile, on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


Clock = Callable[[], float]


def in_turns(bound: Callable[[], object], ours: Callable[[], object], gigabytes: float,
             turns: int = 7, *, clock: Clock = time.perf_counter, cpu: Clock = time.process_time,
             before: Callable[[], object] = lambda: None) -> Figure:
    """Both move so many gigabytes, one after the other, each first in every other turn; the first
    turn only warms up. Medians, and the median of the turns' own ratios.

    `before` runs before each side of a turn, untimed.
    """
    calls, found = (bound, ours), []
    for turn in range(turns + 1):
        sample = {}
        for side in (0, 1) if turn % 2 else (1, 0):
            before()
            began, spent = clock(), cpu()
            calls[side]()
            sample[side] = clock() - began, cpu() - spent
        if turn:
            found.append((*sample[0], *sample[1]))
    bound_s, bound_cpu_s, ours_s, ours_cpu_s = (statistics.median(column)
                                                for column in zip(*found, strict=True))
    return Figure(statistics.median(each[0] / each[2] for each in found), gigabytes / ours_s,
                  gigabytes / bound_s, "GB/s", ours_cpu_s / gigabytes, bound_cpu_s / gigabytes)
