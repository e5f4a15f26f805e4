"""The saves of a run, one after the other; must not know rounds, threads or the clock.

A save is a job on a `Lane`, so there is never more than one writer, and whatever is asked for later
lands later. The caller hears of each one exactly once.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from syncer.checkpoint.atomic import WriteError
from syncer.checkpoint.facts import SAFETENSORS, Cut
from syncer.checkpoint.files import FILES, RETRY_PAUSE_S, Files, Patient
from syncer.checkpoint.lane import Lane
from syncer.checkpoint.marker import remove_marker, write_marker
from syncer.checkpoint.writer import write_checkpoint
from syncer.errors import CheckpointError


def written_anew(write: Callable[[Files], int], files: Patient) -> int:
    """What `write` returns, begun again from nothing where a call failed that may not be repeated
    alone (an fsync, a check of the space), as often as `files` has retries left."""
    while True:
        try:
            return write(files)
        except WriteError as error:
            if error.number is None:
                raise
            problem = OSError(error.number, os.strerror(error.number))
            if not files.take_retry(error.call, problem):
                raise


class Outcome(NamedTuple):
    """How a save ended: `error` is one sentence, `defect` an exception nobody can cause."""

    kind: str
    step: int
    bytes: int
    seconds: float
    error: str | None = None
    defect: BaseException | None = None


class _Job(NamedTuple):
    kind: str
    cut: Cut
    done: Callable[[Outcome], None]
    mark: bool
    let_go: bool


class Saver:
    """Writes the checkpoints of one run to `path`, or to where that leads as a symbolic link.

    keep: the newest so many stay as hard links `<path>.step-<t>` beside the file itself. A marker
    lies beside the name as it was given. retries: passing errors of one
    save that are tried again. warn: told, on the lane, of what did not go well but is no failure.
    lane: where it writes; by default a thread that it starts.
    """

    def __init__(self, path: str | os.PathLike[str], *, form: str = SAFETENSORS, keep: int = 0,
                 retries: int = 1, direct: bool = False, files: Files = FILES,
                 lane: Lane | None = None, pause_s: float = RETRY_PAUSE_S,
                 warn: Callable[[str, dict[str, Any]], None] = lambda text, fields: None):
        self.shown = os.fspath(path)
        self.path = files.real_path(self.shown)
        self.form, self.keep, self.retries, self.direct = form, keep, retries, direct
        self.files, self.pause_s, self.warn = files, pause_s, warn
        self.lane = lane or Lane()
        self.jobs: deque[_Job] = deque()

    def save(self, kind: str, cut: Cut, done: Callable[[Outcome], None], *, mark: bool = False,
             let_go: bool = False) -> None:
        """Write the cut behind whatever is being written; then `done(outcome)` on the lane.

        mark: it is the final one of a marked run. let_go: the save gives way to the rounds, and
        once it could not begin anew in any case (no retry left) each version is given back as soon
        as it is written.
        """
        self.jobs.append(_Job(kind, cut, done, mark, let_go))
        self.lane.submit(self._next, gives_way=let_go)

    def close(self) -> None:
        """Wait for everything that was asked for, then end the lane."""
        self.lane.close()

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

    def _write(self, job: _Job) -> int:
        files = Patient(self.files, self.retries, self.pause_s, self._retried, self.lane.pause)
        written = written_anew(
            lambda patient: write_checkpoint(
                self.shown, job.cut, self.form, files=patient, direct=self.direct,
                let_go=job.let_go and not files.left, beside=self.lane.beside), files)
        if job.mark:
            written_anew(lambda patient: write_marker(self.shown, job.cut.facts.step, patient),
                         files)
        if self.keep:
            self._keep(job.cut.facts.step)
        return written

    def _retried(self, call: str, error: OSError) -> None:
        self.warn("checkpoint write tried again", {"path": self.shown, "call": call,
                                                   "error": error.strerror})

    def unmark(self) -> None:
        """The run will do more steps: no marker may say otherwise. Raises `WriteError`."""
        for name in dict.fromkeys((self.shown, self.path)):
            remove_marker(name, self.files)

    # ---------------------------------------------------------------------- earlier checkpoints
    def _keep(self, step: int) -> None:
        """Name this checkpoint by its step and drop the oldest names. The checkpoint itself is
        safe already, so trouble here is a warning."""
        name = f"{self.path}.step-{step}"
        # One temporary name for all steps: what a killed process leaves goes at the next save.
        temporary = f"{self.path}.step.tmp"
        try:
            with suppress(FileNotFoundError):
                self.files.unlink(temporary)
            self.files.link(self.path, temporary)
            self.files.rename(temporary, name)
            for old in self.kept(step)[self.keep :]:
                self.files.unlink(f"{self.path}.step-{old}")
        except OSError as error:
            with suppress(OSError):
                self.files.unlink(temporary)
            self.warn("an earlier checkpoint could not be kept or dropped",
                      {"path": name, "error": error.strerror})

    def kept(self, step: int) -> list[int]:
        """Steps up to `step` that are kept, newest first. Later ones belong to another history of
        the run, before a resume from an older cut, and are left alone."""
        directory, base = os.path.split(self.path)
        form = re.compile(re.escape(base) + r"\.step-(\d+)")
        found = [int(match[1]) for name in self.files.names(directory or ".")
                 if (match := form.fullmatch(name))]
        return sorted((t for t in found if t <= step), reverse=True)
