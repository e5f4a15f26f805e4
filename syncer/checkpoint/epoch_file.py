"""`<path>.epoch`: what a run remembers beside its checkpoint, so that no number is given twice.

It tells the process that served the run last, by how much steps were raised, how far the file may
be behind what was broadcast (`every`), and, once that process has ended in order, the step of the
file that holds all of it (`clean`). Must not judge the checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from syncer.checkpoint.atomic import AtomicFile
from syncer.checkpoint.fields import Malformed, decimal, digest_of, instance_of, shown
from syncer.checkpoint.files import FILES, Files
from syncer.checkpoint.lineage import EPOCH_MAX
from syncer.checkpoint.window import read_all
from syncer.errors import CheckpointError, CheckpointFormatError

HEADING = "SYNCER_EPOCH_V1"
EPOCH_FILE_BYTES_MAX = 4096


class EpochFile(NamedTuple):
    """What stands in it; its lines in their order."""

    contract: bytes
    epoch: int
    instance: int
    renumbered: int
    """The sum by which steps were raised: no step of the run at or below it is the file's alone."""
    every: int
    """The file holds what was broadcast but for so many steps; 1: all of it."""
    clean: int | None = None
    """The file of this step holds all that was broadcast."""

    def text(self) -> str:
        clean = "" if self.clean is None else f"clean={self.clean}\n"
        return (f"{HEADING}\ncontract={self.contract.hex()}\nepoch={self.epoch}\n"
                f"instance={self.instance:016x}\nrenumbered={self.renumbered}\n"
                f"every={self.every}\n{clean}")


def epoch_path(path: str) -> str:
    """Where it lies: beside the file itself, whatever symbolic links lead there."""
    return f"{path}.epoch"


def write_epoch(path: str, beside: EpochFile, files: Files = FILES) -> int:
    """Replace the one of the checkpoint at `path`, whole and durable; returns the bytes written.
    Raises `WriteError`."""
    with AtomicFile(epoch_path(path), files=files) as file:
        file.append(beside.text().encode())
        file.commit()
        return file.size


def read_epoch(path: str, files: Files = FILES) -> EpochFile | None:
    """The one of the checkpoint at `path`, None if there is none.

    Raises `CheckpointError` when it cannot be read, `CheckpointFormatError` when it is none: it
    names the line, what is expected there, and what can be done.
    """
    name = epoch_path(path)
    try:
        if not files.exists(name):
            return None
        descriptor = files.open(name)
        try:
            data = bytearray(EPOCH_FILE_BYTES_MAX + 1)
            found = read_all(files, descriptor, data, 0)
        finally:
            files.close(descriptor)
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {error.strerror}") from None
    try:
        return parsed(bytes(data[:found]))
    except Malformed as problem:
        raise CheckpointFormatError(
            f"{name}: {problem}; bring back the one that was written with {os.path.basename(path)}"
            ", or remove it and start all learners anew") from None


def parsed(data: bytes) -> EpochFile:
    """What these bytes say, as `EpochFile.text` makes them. Raises `Malformed`."""
    lines = data.decode("ascii", "replace").split("\n")
    if lines[0] != HEADING or lines.pop() or not len(LINES) <= len(lines) <= 1 + len(LINES):
        raise Malformed(f"expected {HEADING} and {len(LINES) - 1} or {len(LINES)} lines behind it")
    values: list[Any] = []
    for number, (line, (key, read)) in enumerate(zip(lines[1:], LINES.items(), strict=False), 2):
        found, _, value = line.partition("=")
        if found != key:
            raise Malformed(f"line {number}: expected {key}=, found {shown(line)}")
        values.append(read(f"line {number}, {key}", value))
    return EpochFile(*values)


def _counted(field: str, text: str) -> int:
    """A number that is counted from 1."""
    number = decimal(field, text)
    if not 1 <= number <= EPOCH_MAX:
        raise Malformed(f"{field}: expected 1 to {EPOCH_MAX}, found {number}")
    return number


LINES: dict[str, Callable[[str, str], Any]] = {
    "contract": digest_of, "epoch": _counted, "instance": instance_of, "renumbered": decimal,
    "every": _counted, "clean": decimal}
"""Behind the first one, in this order; the last one may be absent."""
