"""The event tape: one JSON object per line and one write per record, appended to a file.

It must not reorder keys (readers rely on the order of the first ones), never leaves half a record
behind, and knows nothing of what the records mean.
"""

from __future__ import annotations

import json
import os
from typing import Any, Protocol

from syncer.errors import SyncerError
from syncer.server.log import Log


class TapeError(SyncerError):
    """A record could not be written as a whole."""


class Appended(Protocol):
    """The port: a file that only grows; each method raises OSError."""

    def size(self) -> int: ...

    def append(self, data: bytes) -> int: ...

    def cut(self, size: int) -> None: ...

    def close(self) -> None: ...


class Tape:
    """Appends records to `file`; readers may follow it by byte offset while it grows.

    path: for messages.
    """

    def __init__(self, path: str | os.PathLike[str], file: Appended):
        self.path = os.fspath(path)
        self.file = file

    def write(self, record: dict[str, Any]) -> None:
        """Append one record. Raises `TapeError`, with the file as it was, when it does not fit."""
        line = json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        try:
            start = self.file.size()
            written = self.file.append(line)
            if written != len(line):
                self.file.cut(start)
        except OSError as error:
            raise TapeError(f"event tape {self.path}: {error.strerror}") from None
        if written != len(line):
            raise TapeError(f"event tape {self.path}: only {written} of {len(line)} bytes of a "
                            "record could be written; is the disk full?")

    def close(self) -> None:
        self.file.close()


class Recorder:
    """Puts records on the tape, if the run has one. A lost record is no reason to lose a run, but
    it must be seen."""

    def __init__(self, tape: Tape | None, log: Log):
        self.tape, self.log = tape, log

    def write(self, fields: dict[str, Any]) -> None:
        if self.tape is None:
            return
        try:
            self.tape.write(fields)
        except TapeError as error:
            self.log.error("event tape record lost", error=str(error))

    def close(self) -> None:
        if self.tape is not None:
            self.tape.close()
