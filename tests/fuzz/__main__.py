"""Seeded fuzzing of everything that reads foreign bytes.

    python -m tests.fuzz --seconds 30 --seed 1
    python -m tests.fuzz --inputs 10000000 --jobs 0
    python -m tests.fuzz --target yeto --input "b'...'"

Prints inputs, inputs per second and accepted inputs of each target. The first finding of a target
ends it: the input is printed, made smaller, as a line for tests/fuzz/corpus and as a command. What
kills the process (a sanitizer, a signal) or never ends is found as well: an input is in shared
memory before it is judged. Status 1 when anything was found.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import faulthandler
import itertools
import multiprocessing
import shlex
import signal
import sys
import time
import traceback
from multiprocessing.sharedctypes import RawArray, RawValue
from typing import Any

from syncer.config import available_cores
from tests.fuzz.loop import finding, inputs, smaller
from tests.fuzz.targets import TARGETS

INPUT_BYTES_MAX = 1 << 20
HANG_S = 120.0
"""An input that takes so long is a finding."""
POLL_S = 0.05


class Ledger:
    """What a worker shares with who watches it: its counts, and the input in hand."""

    def __init__(self) -> None:
        self.size = RawValue("q", 0)
        self.data = RawArray("c", INPUT_BYTES_MAX)
        self.count, self.accepted = RawValue("q", 0), RawValue("q", 0)
        self.found, self.batch = RawValue("b", 0), RawValue("q", 0)

    def hold(self, data: bytes) -> None:
        data = data[:INPUT_BYTES_MAX]
        self.data[: len(data)] = data
        self.size.value = len(data)

    @property
    def held(self) -> bytes:
        return bytes(self.data[: self.size.value])


def work(course: Course, job: int, ledger: Ledger, until: float) -> None:
    """The batches of one of its jobs until a time, or a finding."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: who watches ends us
    name = course.name
    target = TARGETS[name]
    for batch in itertools.count(course.next_batch + job, course.jobs):
        for data in inputs(name, target, course.seed, batch):
            ledger.hold(data)
            try:
                ledger.accepted.value += target.check(data)
            except Exception:
                small = smaller(target.check, data)
                ledger.hold(small)
                ledger.found.value = 1
                try:
                    target.check(small)
                except Exception as error:
                    print(f"{name}: finding in batch {batch}",
                          *traceback.format_exception(error, chain=False), sep="\n", flush=True)
                return
            ledger.count.value += 1
        ledger.batch.value = batch
        if time.monotonic() >= until:
            return


def reproducer(name: str, data: bytes) -> str:
    """How to see it again, and how to keep it."""
    return (f"{name}: keep it in tests/fuzz/corpus/{name}.txt:\n{data!r}\n"
            f"again with: python -m tests.fuzz --target {name} --input {shlex.quote(repr(data))}")


def watch(name: str, process: Any, ledger: Ledger) -> str | None:
    """Waits for a worker; what it found that it could not say itself."""
    seen, since = -1, time.monotonic()
    while process.is_alive():
        process.join(POLL_S)
        if ledger.count.value != seen or ledger.found.value:
            seen, since = ledger.count.value, time.monotonic()
        elif time.monotonic() - since > HANG_S:
            process.kill()
            process.join()
            return f"{name}: one input took more than {HANG_S:.0f} s"
    if process.exitcode and not ledger.found.value:
        return f"{name}: the process ended with status {process.exitcode}"
    return None


class Course:
    """One target, over all jobs: how far it is, and whether it has found something."""

    def __init__(self, name: str, seed: int, jobs: int):
        self.name, self.seed, self.jobs = name, seed, jobs
        self.next_batch = self.done = self.accepted = 0
        self.took_s = 0.0
        self.clean = True

    def run(self, seconds: float) -> None:
        """Goes on for so long, from the batch where it stopped."""
        context = multiprocessing.get_context("fork")
        began = time.monotonic()
        ledgers = [Ledger() for _ in range(self.jobs)]
        workers = [context.Process(target=work, args=(self, job, ledger, began + seconds))
                   for job, ledger in enumerate(ledgers)]
        for worker in workers:
            worker.start()
        try:
            for worker, ledger in zip(workers, ledgers, strict=True):
                trouble = watch(self.name, worker, ledger)
                if trouble is not None or ledger.found.value:
                    self.clean = False
                    print(*[line for line in (trouble, reproducer(self.name, ledger.held)) if line],
                          sep="\n", flush=True)
        finally:
            for worker in workers:
                worker.kill()
                worker.join()
            self._count(ledgers, time.monotonic() - began)

    def _count(self, ledgers: list[Ledger], took_s: float) -> None:
        self.took_s += took_s
        self.done += sum(ledger.count.value for ledger in ledgers)
        self.accepted += sum(ledger.accepted.value for ledger in ledgers)
        self.next_batch = 1 + max(ledger.batch.value for ledger in ledgers)

    def __str__(self) -> str:
        return (f"{self.name:12} {self.done:11,} inputs "
                f"{self.done / max(self.took_s, 1e-9):8,.0f}/s "
                f"{100 * self.accepted / max(1, self.done):5.1f} % accepted")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=sorted(TARGETS), action="append",
                        help="only this one; may be repeated")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=30.0,
                        help="for all targets together, each the same share (default 30)")
    parser.add_argument("--inputs", type=int,
                        help="again and again so many seconds, until there were so many inputs")
    parser.add_argument("--jobs", type=int, default=1, help="processes; 0 is one per core")
    parser.add_argument("--input", help="judge one input, a Python bytes literal")
    options = parser.parse_args(arguments)
    names = options.target or list(TARGETS)
    if options.input is not None:
        found = {name: finding(TARGETS[name].check, ast.literal_eval(options.input))
                 for name in names}
        print(*[f"{name}: {what or 'nothing found'}" for name, what in found.items()], sep="\n")
        return int(any(found.values()))
    courses = [Course(name, options.seed, options.jobs or available_cores()) for name in names]
    began, failed = time.monotonic(), 0
    with contextlib.suppress(KeyboardInterrupt):  # what was done until then is told
        while True:
            for course in courses:
                course.run(options.seconds / len(courses))
            failed = sum(not course.clean for course in courses)
            if failed or sum(course.done for course in courses) >= (options.inputs or 0):
                break
    took, done = time.monotonic() - began, sum(course.done for course in courses)
    print(*courses, sep="\n")
    print(f"seed {options.seed}: {done:,} inputs in {took:.0f} s, {done / took:,.0f}/s, "
          f"{failed or 'no'} finding{'s' if failed > 1 else ''}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
