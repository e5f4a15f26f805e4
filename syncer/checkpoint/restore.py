"""Going back: an earlier checkpoint becomes the newest one again, and nothing is lost by it.

Must not know the command line, nor take the lock. The checkpoint is copied, so that it stays; what
was the newest until then, and every earlier one that is no past of the restored, is set aside under
a name that nobody counts. A crash at any instant leaves the old file or the restored one under the
name, and every other one under some name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from syncer.checkpoint.atomic import AtomicFile, clear_leftovers, written_anew
from syncer.checkpoint.files import FILES, Files
from syncer.checkpoint.history import ABANDONED, STEP, Aside, History, step_of
from syncer.checkpoint.marker import marker_path, remove_marker
from syncer.checkpoint.reader import CHUNK_BYTES, Checkpoint
from syncer.checkpoint.window import read_all
from syncer.errors import CheckpointError

Progress = Callable[[int, int], None]
SUFFIX = re.compile(rf"{STEP.pattern}|{ABANDONED.pattern}", re.ASCII)


class Restored(NamedTuple):
    """What was done. unmarked: there was a marker of a finished run, and it is gone."""

    bytes: int
    aside: list[Aside]
    unmarked: bool


def owner_of(path: str) -> str | None:
    """The checkpoint that an earlier one was kept of, by its name; None if it has no such name."""
    directory, base = os.path.split(path)
    for match in SUFFIX.finditer(base):
        if match.start() and match.end() == len(base):
            return os.path.join(directory, base[: match.start()])
    return None


def restore(source: Checkpoint, path: str, files: Files = FILES,
            progress: Progress | None = None) -> Restored:
    """Make `path` the checkpoint `source`, which was verified. Raises `CheckpointError`; then the
    file at `path` is as it was."""
    real = files.real_path(path)
    history = History(real, 0, files)
    aside: list[Aside] = []
    try:
        left = history.left_behind(f"{real}.old.tmp")
        if left is not None:  # of a restore that was killed
            aside.append(history.put_aside(f"{real}.old.tmp", left, history.next_group()))
        clear_leftovers(real, files)
        there = files.exists(real)
        if there:
            _check_links(real, files)
        group = history.next_group()
        own = files.real_path(source.path) == history.name(source.facts.step)
        aside += history.set_aside([t for t in history.kept()
                                    if not own or t > source.facts.step])
        unmarked = any(files.exists(marker_path(name)) for name in (path, real))
        now = step_of(real, files) if there else None
    except OSError as error:
        raise CheckpointError(f"{path} could not be restored: {error.strerror}; it is as it "
                              "was") from None
    for name in dict.fromkeys((path, real)):
        remove_marker(name, files)

    def retire(old: str | None) -> None:
        if old is not None:
            with suppress(OSError):  # it stays under its second name then
                aside.insert(0, history.put_aside(old, now, group))

    def copied(files: Files) -> int:
        with AtomicFile(path, size_bytes=source.size, files=files, retire=retire) as file:
            for at in range(0, source.size, CHUNK_BYTES):
                piece = bytearray(min(CHUNK_BYTES, source.size - at))
                _read(source, piece, at, files)
                file.append(piece)
                file.flush()
                if progress is not None:
                    progress(file.size, source.size)
            file.commit()
        return source.size

    return Restored(written_anew(copied, files), aside, unmarked)


def _read(source: Checkpoint, piece: bytearray, at: int, files: Files) -> None:
    try:
        found = read_all(files, source.descriptor, piece, at)
    except OSError as error:
        raise CheckpointError(f"{source.path} cannot be read: {error.strerror}") from None
    if found != len(piece):
        raise CheckpointError(f"{source.path} shrank while it was read")


def _check_links(real: str, files: Files) -> None:
    """The file that is there is set aside by a second name. Raises OSError, or `CheckpointError`
    where a file has only one."""
    probe = f"{real}.step.tmp"
    try:
        files.link(real, probe)
    except OSError as error:
        raise CheckpointError(
            f"{real} cannot be set aside, its file system gives no second names "
            f"({error.strerror}): move it away yourself, then restore again") from None
    files.unlink(probe)
