"""The event tape: one JSON object per line and one write per record, appended to a file.

It must not reorder keys (readers rely on the order of the first ones), never leaves half a record
behind, and knows nothing of what the records mean.
"""

from __future__ import annotations

import json
import os
from typing import Any

from syncer.errors import SyncerError


class TapeError(SyncerError):
    """A record could not be written as a whole."""


class Tape:
    """Appends records to `path`; readers may follow it by byte offset while it grows.

    Raises OSError when the file cannot be opened for appending.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        self.descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
                                  0o644)

    def write(self, record: dict[str, Any]) -> None:
        """Append one record. Raises `TapeError`, with the file as it was, when it does not fit."""
        line = json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        start = os.fstat(self.descriptor).st_size
        try:
            written = os.write(self.descriptor, line)
        except OSError as error:
            raise TapeError(f"event tape {self.path}: {error.strerror}") from None
        if written != len(line):
            os.ftruncate(self.descriptor, start)
            raise TapeError(f"event tape {self.path}: only {written} of {len(line)} bytes of a "
                            "record could be written; is the disk full?")

    def close(self) -> None:
        os.close(self.descriptor)
