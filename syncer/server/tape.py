"""The event tape: one JSON object per line and one write per record, appended to a file.

It must not reorder keys (readers rely on the order of the first ones), never leaves half a record
behind, makes nobody wait for the disk, and knows nothing of what the records mean.
"""

from __future__ import annotations

import json
import os
from typing import Any, Protocol

from syncer.errors import SyncerError
from syncer.server import shortened
from syncer.server.log import Log, MakeWriter
from syncer.streams import Backlog

TAPE_BYTES_MAX = 16 << 20
"""Records that wait to be written: some 50,000 steps of a tape that takes nothing."""

TAPE_STUCK_S = 5.0
"""How long an end waits for a tape that takes nothing: a disk may pause."""


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

    def append(self, line: bytes) -> None:
        """Append one record. Raises `TapeError`, with the file as it was, when it does not fit."""
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


def record_line(fields: dict[str, Any]) -> bytes:
    """A record as it stands on the tape."""
    return json.dumps(fields, ensure_ascii=False, allow_nan=False).encode() + b"\n"


class Recorder:
    """Puts records on the tape, if the run has one, behind the back of whoever tells them. A lost
    record is no reason to lose a run, but it must be seen."""

    def __init__(self, tape: Tape | None, log: Log, make_aside: MakeWriter):
        self.tape, self.log = tape, log
        self.full = False
        self.aside = None
        if tape is not None:
            try:
                self.aside = make_aside("syncer-tape", Backlog(TAPE_BYTES_MAX, self._gap),
                                        self._append)
            except BaseException:
                tape.close()
                raise

    def write(self, fields: dict[str, Any]) -> None:
        if self.aside is None:
            return
        if self.aside.put(record_line(shortened.in_record(fields))) or self.full:
            return
        self.full = True
        self.log.warning("event tape takes nothing: records are lost until it does",
                         path=self._path, waiting_bytes=TAPE_BYTES_MAX)

    @property
    def _path(self) -> str:
        assert self.tape is not None  # nothing is told without one
        return self.tape.path

    def _append(self, line: bytes) -> None:
        assert self.tape is not None  # nothing is told without one
        try:
            if line:
                self.tape.append(line)
        except TapeError as error:
            self.log.error("event tape record lost", error=str(error))

    def _gap(self, count: int) -> bytes:
        """The tape takes records again: nothing stands on it for those that are missing."""
        self.full = False
        self.log.error("event tape records lost", path=self._path, records=count)
        return b""

    def close(self) -> None:
        """Write what waits, if the tape takes it."""
        if self.aside is None or self.tape is None:
            return
        left = self.aside.close(TAPE_STUCK_S)
        if left:  # the descriptor stays with the thread that waits for it
            self.log.error("event tape records lost", path=self._path, records=left)
        else:
            self.tape.close()
