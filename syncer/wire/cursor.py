"""Reads bytes forward, and records, and refuses to read past the end.

Must not know what they mean.
"""

from __future__ import annotations

from struct import Struct

from syncer.errors import RemoteProtocolError

RECORD_HEAD = Struct("<HI")
"""tag, length."""


class Cursor:
    """A place in `data`; what: how a refusal calls it."""

    def __init__(self, data: memoryview, what: str = "payload"):
        self.data, self.what, self.at = data, what, 0

    @property
    def remaining(self) -> int:
        """Bytes that are left."""
        return len(self.data) - self.at

    def take(self, size: int) -> memoryview:
        """The next `size` bytes. Raises RemoteProtocolError when there are fewer."""
        if size > self.remaining:
            raise RemoteProtocolError(
                f"{self.what} truncated: {size} bytes expected at offset {self.at}, "
                f"{self.remaining} are left"
            )
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, size: int) -> int:
        """An unsigned little-endian number of `size` bytes."""
        return int.from_bytes(self.take(size), "little")


def read_records(cursor: Cursor) -> dict[int, memoryview]:
    """What is left, as records by their tags. Raises RemoteProtocolError."""
    found: dict[int, memoryview] = {}
    while cursor.remaining:
        if cursor.remaining < RECORD_HEAD.size:
            raise RemoteProtocolError(f"{cursor.remaining} bytes are left where a record begins, "
                                      f"expected at least {RECORD_HEAD.size}")
        tag, size = RECORD_HEAD.unpack(cursor.take(RECORD_HEAD.size))
        if size > cursor.remaining:
            raise RemoteProtocolError(f"record {tag} has {size} bytes, {cursor.remaining} are left")
        if tag in found:
            raise RemoteProtocolError(f"record {tag} is there twice")
        found[tag] = cursor.take(size)
    return found
