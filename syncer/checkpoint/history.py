"""Earlier checkpoints of a run beside the newest one: named, counted, dropped, or set aside.

    run.ckpt                      the newest one, a file of its own: writing over it harms no other
    run.ckpt.step-<t>             the ones before it, as many as `--checkpoint-keep` says
    run.ckpt.abandoned-<n>.step-<t>    of a future that was given up: never counted, never dropped

Must not write a checkpoint. Whoever uses it is alone with the path.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from syncer.checkpoint.files import FILES, Files
from syncer.checkpoint.reader import Checkpoint
from syncer.errors import CheckpointError

STEP = re.compile(r"\.step-(0|[1-9][0-9]{0,19})", re.ASCII)
ABANDONED = re.compile(r"\.abandoned-([1-9][0-9]{0,8})\..+", re.ASCII)
Warn = Callable[[str, dict[str, Any]], None]


class Aside(NamedTuple):
    """A checkpoint that was set aside: its step, None if it cannot be read, and its new name."""

    step: int | None
    path: str


def step_of(path: str, files: Files = FILES) -> int | None:
    """The step of a checkpoint as its header says it; None: it is not there, or none."""
    with suppress(CheckpointError), Checkpoint(path, files) as checkpoint:
        return checkpoint.facts.step
    return None


class History:
    """Of the checkpoint at `path`, where symbolic links lead to nothing else any more.

    keep: so many earlier ones stay. warn: told of what did not go well, which is never a failure:
    the newest checkpoint is safe already.
    """

    def __init__(self, path: str, keep: int, files: Files = FILES,
                 warn: Warn = lambda text, fields: None):
        self.path, self.keep, self.files, self.warn = path, keep, files, warn
        self.directory, self.base = os.path.split(path)

    def name(self, step: int) -> str:
        return f"{self.path}.step-{step}"

    def kept(self) -> list[int]:
        """Steps of the earlier checkpoints that are there, newest first."""
        return sorted((int(match[1]) for end in self._ends() if (match := STEP.fullmatch(end))),
                      reverse=True)

    def _ends(self) -> list[str]:
        """What the names begin with the checkpoint's have behind it."""
        return [name[len(self.base) :] for name in self.files.names(self.directory or ".")
                if name.startswith(self.base)]

    def take(self, old: str | None, old_step: int, step: int) -> None:
        """The checkpoint of `step` stands; `old`, the second name of the one before, becomes that
        of its step, and what is too old goes. None: the file system has no second names."""
        name = self.name(old_step)
        try:
            if old is None:
                raise OSError(errno.EOPNOTSUPP, "the file system has no hard links")
            self.files.rename(old, name)
            for earlier in [t for t in self.kept() if t < step][self.keep :]:
                self.files.unlink(self.name(earlier))
        except OSError as error:
            if old is not None:
                with suppress(OSError):
                    self.files.unlink(old)
            self.warn("an earlier checkpoint could not be kept or dropped",
                      {"path": name, "error": error.strerror})

    # ------------------------------------------------------------------------------- at the start
    def settle(self, step: int | None, old: str) -> list[Aside]:
        """A run goes on from `step`, or begins anew (None): what lies here is brought in order, and
        what is no past of it is set aside. old: the second name that a killed server may have left
        of the file before. Raises OSError."""
        self._part(step)
        aside = self.set_aside([t for t in self.kept() if step is None or t > step])
        left = self.left_behind(old) if step is not None else None
        if left is not None and step is not None and left < step and self.keep:
            self.files.rename(old, self.name(left))
        elif left is not None and step is not None and left > step:  # killed while it went back
            aside.append(self.put_aside(old, left, self.next_group()))
        return aside

    def left_behind(self, old: str) -> int | None:
        """Step of the file before, if a killed process left it under its second name alone."""
        if not (self.files.exists(old) and self.files.exists(self.path)):
            return None
        there, newest = self.files.status(old), self.files.status(self.path)
        if (there.st_dev, there.st_ino) == (newest.st_dev, newest.st_ino):
            return None
        return step_of(old, self.files)

    def _part(self, step: int | None) -> None:
        """A name that leads to the newest file itself keeps nothing, and lies if it names another
        step. Left by earlier versions, and by hand."""
        with suppress(FileNotFoundError):
            newest = self.files.status(self.path)
            for t in self.kept():
                there = self.files.status(self.name(t))
                if (there.st_dev, there.st_ino) == (newest.st_dev, newest.st_ino) and (
                        self.keep or t != step):
                    self.files.unlink(self.name(t))

    def set_aside(self, steps: list[int]) -> list[Aside]:
        """Give these earlier checkpoints names under which nobody counts them. Raises OSError."""
        group = self.next_group()
        return [self.put_aside(self.name(step), step, group) for step in steps]

    def put_aside(self, name: str, step: int | None, group: int) -> Aside:
        """One file, under whatever name it has. Raises OSError."""
        what = "unreadable" if step is None else f"step-{step}"
        # the same step of two histories stays twice
        while self.files.exists(f"{self.path}.abandoned-{group}.{what}"):
            group += 1
        found = Aside(step, f"{self.path}.abandoned-{group}.{what}")
        self.files.rename(name, found.path)
        return found

    def next_group(self) -> int:
        """The number of the next future that is given up."""
        return 1 + max((int(match[1]) for end in self._ends()
                        if (match := ABANDONED.fullmatch(end))), default=0)
