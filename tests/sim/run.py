"""`python -m tests.sim.run --seed N [--count K] [--steps T]`: simulated runs, one line per failure.

A failing seed gives the same failure every time, on every machine.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections import Counter

from tests.sim.fleet import Fleet


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.run", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=1, help="how many seeds")
    parser.add_argument("--steps", type=int, help="outer steps of every run")
    parser.add_argument("--traceback", action="store_true", help="show where a run failed")
    options = parser.parse_args()
    marks: Counter[str] = Counter()
    failed = 0
    for seed in range(options.seed, options.seed + options.count):
        try:
            fleet = Fleet(seed, options.steps)
            fleet.play()
            fleet.check()
        except Exception as error:
            failed += 1
            print(f"seed {seed}: {type(error).__name__}: {error}")
            if options.traceback:
                traceback.print_exc()
        else:
            marks.update(fleet.marks)
    for mark, runs in sorted(marks.items()):
        print(f"{runs:8} {mark}")
    print(f"{options.count} runs, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
