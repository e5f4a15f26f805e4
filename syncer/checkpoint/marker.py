"""`<path>.final`: says that a checkpoint is the end of a finished run. Must not judge the run."""

from __future__ import annotations

import os
from contextlib import suppress

from syncer.checkpoint.atomic import AtomicFile, WriteError
from syncer.checkpoint.files import FILES, Files


def marker_path(path: str | os.PathLike[str]) -> str:
    """Where the marker of a checkpoint lies."""
    return f"{os.fspath(path)}.final"


def write_marker(path: str | os.PathLike[str], step: int, files: Files = FILES) -> int:
    """Mark the checkpoint at `path` as final at `step`; returns the bytes written. Raises
    `WriteError`."""
    with AtomicFile(marker_path(path), files=files) as file:
        file.append(f"YETO_FINAL_V1\nglobal_step={step}\n".encode())
        file.commit()
        return file.size


def remove_marker(path: str | os.PathLike[str], files: Files = FILES) -> None:
    """A run will do more steps: its checkpoint is not final any more. Raises `WriteError`."""
    name = marker_path(path)
    try:
        if files.exists(name):
            with suppress(FileNotFoundError):
                files.unlink(name)
            files.sync_directory(os.path.dirname(name) or ".")
    except OSError as error:
        raise WriteError(f"{name} could not be removed: {error.strerror}", error.errno,
                         "unlink") from None
