"""Reading forward through a file with every length checked first; must not know a format."""

from __future__ import annotations

import struct
from typing import Any, NoReturn

from syncer.checkpoint.files import FILES, Files
from syncer.errors import CheckpointFormatError


def read_all(files: Files, descriptor: int, target: bytearray, offset: int) -> int:
    """Bytes read into `target` from `offset`: all of it, or up to the end of the file. A read may
    give fewer than asked for, on file systems over a network for one. Raises OSError."""
    view, found = memoryview(target), 0
    while found < len(target):
        count = files.read(descriptor, [view[found:]], offset + found)
        if count == 0:
            break
        found += count
    return found


class Window:
    """A position in an open file of `size` bytes; errors name file, field and offset."""

    def __init__(self, path: str, descriptor: int, size: int, files: Files = FILES):
        self.path, self.descriptor, self.size, self.files = path, descriptor, size, files
        self.at = 0

    @property
    def left(self) -> int:
        """Bytes behind the position."""
        return self.size - self.at

    def take(self, field: str, count: int) -> bytes:
        """The next `count` bytes. Raises `CheckpointFormatError` when they are not there."""
        if count > self.left:
            raise CheckpointFormatError(
                f"{self.path}: {field} at offset {self.at}: expected {count} bytes, found "
                f"{self.left}; the file is cut short or no checkpoint")
        data = bytearray(count)
        found = read_all(self.files, self.descriptor, data, self.at)
        if found != count:
            raise CheckpointFormatError(
                f"{self.path}: {field} at offset {self.at}: expected {count} bytes, read "
                f"{found}; the file shrank while it was read")
        self.at += count
        return bytes(data)

    def unpack(self, field: str, form: struct.Struct) -> tuple[Any, ...]:
        return form.unpack(self.take(field, form.size))

    def skip(self, count: int) -> None:
        self.at += count

    def refuse(self, field: str, at: int, expected: object, found: object) -> NoReturn:
        raise CheckpointFormatError(
            f"{self.path}: {field} at offset {at}: expected {expected}, found {found}")
