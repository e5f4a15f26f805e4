"""`python -m tests.sim.run --seed N [--count K] [--jobs J]`: simulated runs, one line per failure.

A failing seed gives the same failure every time, on every machine. With --require-marks it is a
failure, too, when no run took one of the rare paths of tests.sim.marks.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import traceback
from collections import Counter
from collections.abc import Iterable

from syncer.config import available_cores
from tests.sim.fleet import Fleet
from tests.sim.history import Broken
from tests.sim.marks import REQUIRED
from tests.sim.tls import certificates

SEEDS_PER_TASK = 20


def play(task: tuple[int, int | None, bool]) -> tuple[int, set[str], str | None]:
    """One seed: the paths it took, and how it failed."""
    seed, steps, trace = task
    try:
        fleet = Fleet(seed, steps)
        fleet.play()
        fleet.check()
    except (Exception, Broken) as error:
        text = f"{type(error).__name__}: {error}"
        return seed, set(), f"{text}\n{traceback.format_exc()}" if trace else text
    return seed, fleet.marks, None


def outcomes(tasks: list, jobs: int) -> Iterable[tuple[int, set[str], str | None]]:
    if jobs == 1:
        yield from map(play, tasks)
        return
    certificates()                                # one set of files for all processes
    with multiprocessing.Pool(jobs) as pool:
        yield from pool.imap_unordered(play, tasks, SEEDS_PER_TASK)


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.run", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=1, help="how many seeds")
    parser.add_argument("--steps", type=int, help="outer steps of every run")
    parser.add_argument("--jobs", type=int, default=1, help="processes; 0 is one per core")
    parser.add_argument("--require-marks", action="store_true",
                        help="fail when a rare path was never taken")
    parser.add_argument("--traceback", action="store_true", help="show where a run failed")
    options = parser.parse_args()
    marks: Counter[str] = Counter()
    failed = 0
    tasks = [(seed, options.steps, options.traceback)
             for seed in range(options.seed, options.seed + options.count)]
    for seed, found, error in outcomes(tasks, options.jobs or available_cores()):
        marks.update(found)
        if error is not None:
            failed += 1
            print(f"seed {seed}: {error}\n  again with: python -m tests.sim.run --traceback "
                  f"--seed {seed}", flush=True)
    for mark, runs in sorted(marks.items()):
        print(f"{runs:8} {mark}")
    missing = sorted(REQUIRED - marks.keys()) if options.require_marks else []
    for mark in missing:
        print(f"never happened: {mark}")
    print(f"{options.count} runs, {failed} failed, {cpu_seconds():.0f} s of CPU")
    return 1 if failed or missing else 0


if __name__ == "__main__":
    sys.exit(main())
