"""`python -m tests.mutation [number…]`: breaks the rules one line at a time and runs its tests.

Works on copies of the tree, builds the module with the mistake, and says which scenario or test of
the rule noticed it. What nothing notices is a rule that is not tested; exit status 1 if there is
any. It takes minutes and is not part of the test suite; docs/testing.md has the mistakes by number.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.mutation.catalogue import MUTATIONS
from tests.mutation.workbench import Workbench

ROOT = Path(__file__).resolve().parents[2]


BENCH: list[Workbench] = []
"""The one of this process: Cython compiles one module at a time."""


def prepare(scratch: str) -> None:
    BENCH.append(Workbench(ROOT, Path(scratch) / str(os.getpid())))


def judge(number: int) -> str | None:
    noticed = BENCH[0].judge(mutation := MUTATIONS[number - 1])
    print(f"| {number} | {mutation.rules} | {mutation.file} | {mutation.mistake} | "
          f"{noticed or 'NOTHING'} |", flush=True)
    return noticed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("numbers", nargs="*", type=int, help="only these mutations")
    parser.add_argument("--rule", action="append", help="only those that break this rule")
    parser.add_argument("--jobs", type=int, default=1, help="so many at a time")
    options = parser.parse_args()
    chosen = [number for number, mutation in enumerate(MUTATIONS, 1)
              if (not options.numbers or number in options.numbers)
              and (not options.rule or set(options.rule) & set(mutation.rules.split()))]
    begun = time.monotonic()
    with (tempfile.TemporaryDirectory(prefix="mutation-") as scratch,
          ProcessPoolExecutor(options.jobs, initializer=prepare, initargs=(scratch,)) as pool):
        verdicts = dict(zip(chosen, pool.map(judge, chosen), strict=True))
    missed = [number for number, noticed in verdicts.items() if noticed is None]
    played = sum(noticed is not None and "::" not in noticed for noticed in verdicts.values())
    minutes = (time.monotonic() - begun) / 60
    print(f"{len(chosen)} mistakes, {len(chosen) - len(missed)} noticed, {played} of them by a "
          f"scenario, in {minutes:.0f} min; not noticed: {missed or 'none'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
