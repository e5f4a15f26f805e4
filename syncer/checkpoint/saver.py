"""The saves of a run, one after the other; must not know rounds, threads or the clock.

A save is a job on a `Lane`, so there is never more than one writer, and whatever is asked for later
lands later. The caller hears of each one exactly once.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from syncer.checkpoint.atomic import clear_leftovers, written_anew
from syncer.checkpoint.facts import SAFETENSORS, Cut
from syncer.checkpoint.files import FILES, Files, Patient
from syncer.checkpoint.history import Aside, History
from syncer.checkpoint.lane import Lane, Work
from syncer.checkpoint.marker import remove_marker, write_marker
from syncer.checkpoint.pace import UNHELD, GivingWay
from syncer.checkpoint.trouble import RETRY_PAUSE_S
from syncer.checkpoint.writer import write_checkpoint
from syncer.errors import CheckpointError


class Outcome(NamedTuple):
    """How a save ended: `error` is one sentence, `defect` an exception nobody can cause."""

    kind: str
    step: int
    bytes: int
    seconds: float
    error: str | None = None
    defect: BaseException | None = None

    @property
    def problem(self) -> str | None:
        """Why there is no file, in one sentence: whoever waits for it is answered in any case."""
        if self.defect is None:
            return self.error
        return f"internal error: {type(self.defect).__name__}: {self.defect}"


class _Job(NamedTuple):
    kind: str
    cut: Cut
    done: Callable[[Outcome], None]
    mark: bool
    let_go: bool


class Saver:
    """Writes the checkpoints of one run to `path`, or to where that leads as a symbolic link.

    keep: so many of those before it stay as `<path>.step-<t>` (history.py). A marker lies beside
    the name as it was given. retries: passing errors of one save that are tried again. rate: bytes
    that a save which gives way writes in a second, None: what the disk takes. threads: so many take
    the digests of a save that somebody waits for, one of any other. warn: told,
    on the lane, of what did not go well but is no failure.
    lane: where it writes; by default a thread that it starts. first: called once, with the
    contract of the run, behind the first file and as a part of its save.

    Large: one attribute for each thing that a save obeys.
    """

    def __init__(self, path: str | os.PathLike[str], *, form: str = SAFETENSORS, keep: int = 0,
                 retries: int = 1, direct: bool = False, rate: int | None = None,
                 threads: int = 1, files: Files = FILES, lane: Lane | None = None,
                 pause_s: float = RETRY_PAUSE_S,
                 warn: Callable[[str, dict[str, Any]], None] = lambda text, fields: None,
                 first: Callable[[bytes, Files], None] | None = None):
        self.shown = os.fspath(path)
        self.path = files.real_path(self.shown)
        self.form, self.keep, self.retries, self.direct = form, keep, retries, direct
        self.threads = threads
        self.files, self.pause_s, self.warn = files, pause_s, warn
        self.first = first
        self.lane = lane or Lane()
        self.giving_way = GivingWay(self.lane, rate)
        self.history = History(self.path, keep, files, warn)
        self.standing: int | None = None
        """Step of the file that stands there, if it is of this run."""
        self.jobs: deque[_Job] = deque()
        self.freed: Work = lambda: None
        """Waits until the space of the file that was replaced is free."""

    def begin(self, step: int | None) -> list[Aside]:
        """The run goes on from the file of `step`, or begins anew (None): what other processes
        have left is put in order. Returns what was set aside. Raises OSError."""
        files = Patient(self.files, self.retries, self.pause_s, self._retried, self.lane.pause)
        history, self.keep = History(self.path, self.keep, files, self.warn), 0
        aside = history.settle(step, f"{self.path}.old.tmp")
        self.keep, self.standing = history.keep, step  # nothing is counted that is of no one run
        clear_leftovers(self.path, files)
        return aside

    def save(self, kind: str, cut: Cut, done: Callable[[Outcome], None], *, mark: bool = False,
             let_go: bool = False) -> None:
        """Write the cut behind whatever is being written; then `done(outcome)` on the lane.

        mark: it is the final one of a marked run. let_go: the save gives way to the rounds until
        `hasten`, and once it could not begin anew in any case (no retry left) each version is given
        back as soon as it is written.
        """
        if let_go:
            self.giving_way.begin()
        self.jobs.append(_Job(kind, cut, done, mark, let_go))
        self.lane.submit(self._next)

    def hasten(self) -> None:
        """Somebody waits for the save that gives way: it does no longer, and has no rate."""
        self.giving_way.hasten()

    def write_now(self, cut: Cut) -> None:
        """Write the cut before anything else, on the caller's thread. Raises `CheckpointError`."""
        self._write(_Job("", cut, lambda outcome: None, False, False))

    def close(self) -> None:
        """Wait for everything that was asked for, which gives way no longer, then end the lane."""
        self.hasten()
        self.lane.close()
        self.freed()

    def _next(self) -> None:
        job = self.jobs.popleft()
        outcome = self._run(job)
        done = job.done
        del job  # whoever hears of it may count on the cut's memory
        done(outcome)

    def _run(self, job: _Job) -> Outcome:
        begun = self.lane.now_s()
        step, written, error, defect = job.cut.facts.step, 0, None, None
        try:
            written = self._write(job)
        except CheckpointError as problem:
            error = str(problem)
        except BaseException as problem:
            defect = problem
        return Outcome(job.kind, step, written, self.lane.now_s() - begun, error, defect)

    def _beside(self, work: Work, name: str) -> Work:
        """The last thing that a save begins there is what nobody waits for: to free the space."""
        self.freed = self.lane.beside(work, name)
        return self.freed

    def _write(self, job: _Job) -> int:
        self.freed()  # it counts when the space of the next one is checked
        files = Patient(self.files, self.retries, self.pause_s, self._retried, self.lane.pause)
        step, old = job.cut.facts.step, self.standing
        pace, threads = (self.giving_way, 1) if job.let_go else (UNHELD, self.threads)
        retire = partial(self._retire, old, step) if (
            self.keep and old is not None and old < step) else None
        written = written_anew(
            lambda patient: write_checkpoint(
                self.shown, job.cut, self.form, files=patient, direct=self.direct, retire=retire,
                let_go=job.let_go and not files.left, beside=self._beside,
                threads=threads, pace=pace), files)
        self.standing = step
        if self.first is not None:
            self.first(job.cut.facts.contract, files)
            self.first = None
        if job.mark:
            written_anew(lambda patient: write_marker(self.shown, step, patient), files)
        return written

    def _retire(self, old_step: int, step: int, old: str | None) -> None:
        self.history.take(old, old_step, step)

    def _retried(self, call: str, error: OSError) -> None:
        self.warn("checkpoint write tried again", {"path": self.shown, "call": call,
                                                   "error": error.strerror})

    def unmark(self) -> None:
        """The run will do more steps: no marker may say otherwise. Raises `WriteError`."""
        for name in dict.fromkeys((self.shown, self.path)):
            remove_marker(name, self.files)
