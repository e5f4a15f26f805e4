"""Bytes go into one open file in aligned pieces, through the page cache or past it.

It must not know names, nor what the bytes mean. Every method raises OSError. What was measured is
in docs/performance.md.
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from syncer.checkpoint.files import Files
from syncer.checkpoint.lane import Work, beside
from syncer.checkpoint.pace import UNHELD, Tempo
from syncer.gather import advance, gather

PIECE_BYTES = 8 * 1024 * 1024
"""One direct write, and what the kernel is asked to begin to write back at once. Pieces begin at
multiples of it, whatever the sizes of the parts."""
CALL_BYTES = 1024 * 1024
"""One write call into the page cache. From 2 MiB on the kernel looks for huge pages for it, which
has cost up to eight times the CPU seconds."""
BUFFERS_MAX = 512
"""Parts of one write call; the system's own limit is 1024."""
BLOCK_BYTES = 4096
"""Alignment of offset and length that every device accepts for direct writes, and of memory."""
MEMORY_BLOCK_BYTES = 512
"""Alignment of memory that most devices accept; what they say of it is obeyed."""


class Pieces:
    """The bytes of one new file, from front to back.

    direct: past the page cache. Memory that is aligned as the file is goes to the disk as it is; of
    other memory the next piece is copied while the last one is written. beside: runs work at the
    same time. pace: asked before every piece.
    """

    def __init__(self, files: Files, *, direct: bool = False,
                 beside: Callable[[Work, str], Work] = beside, pace: Tempo = UNHELD):
        self.files = files
        self.descriptor = -1
        """Whoever has created the file says so before the first byte."""
        self.direct, self.beside, self.pace = direct, beside, pace
        self.piece_bytes = PIECE_BYTES if direct else CALL_BYTES
        self.parts: list[memoryview] = []
        self.waiting = 0
        self.written = 0
        self.copies = [mmap.mmap(-1, PIECE_BYTES) for _ in range(2)] if direct else []
        self.as_it_is = True
        """Memory is not copied where its alignment allows that."""
        self.under_way: Work | None = None
        self.error: BaseException | None = None

    @property
    def size(self) -> int:
        """Bytes appended so far."""
        return self.written + self.waiting

    def append(self, data: Any) -> None:
        """A C-contiguous buffer goes behind what is there; it must not change before `flush`."""
        view = memoryview(data).cast("B") if not isinstance(data, bytes) else memoryview(data)
        at = 0
        while at < len(view):
            room = self.piece_bytes - self.size % self.piece_bytes
            part = view[at : at + room]
            self.parts.append(part)
            self.waiting += len(part)
            at += len(part)
            if self.size % self.piece_bytes == 0 or (
                len(self.parts) >= BUFFERS_MAX and not self.direct
            ):
                self._write_waiting()

    def flush(self) -> None:
        """Hand everything appended to the kernel."""
        self._write_waiting()
        self._settle()

    def rewrite(self, data: bytes, offset: int) -> None:
        """Replace bytes that are written already. With `direct`: whole blocks at block offsets."""
        for at in range(0, len(data), self.piece_bytes):
            self._write([memoryview(data)[at : at + self.piece_bytes]], offset + at)
        self._settle()

    def drop(self) -> None:
        """Let go of everything; nothing is under way afterwards."""
        self.parts, self.waiting = [], 0
        with suppress(BaseException):
            self._settle()

    def _write_waiting(self) -> None:
        if not self.waiting:
            return
        parts, total, self.parts, self.waiting = self.parts, self.waiting, [], 0
        self.pace.write(total)
        self._write(parts, self.written)
        self.written += total
        if not self.direct and self.written % PIECE_BYTES == 0:
            with suppress(OSError):  # advice: without it everything waits for the fsync
                self.files.begin_writeback(self.descriptor, self.written - PIECE_BYTES, PIECE_BYTES)

    def _write(self, parts: list[memoryview], offset: int) -> None:
        if not self.direct:
            self._store(parts, offset)
        elif not (self.as_it_is and self._written_as_it_is(parts, offset)):
            self._write_copy(parts, offset)

    def _written_as_it_is(self, parts: list[memoryview], offset: int) -> bool:
        """Whether the memory itself could be written; if the device says no, it is not asked
        again."""
        if len(parts) > BUFFERS_MAX or sum(map(len, parts)) % BLOCK_BYTES or any(
                (address(part) | len(part)) % MEMORY_BLOCK_BYTES for part in parts):
            return False
        self._settle()
        try:
            self._store(parts, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.as_it_is = False
        return self.as_it_is

    def _write_copy(self, parts: list[memoryview], offset: int) -> None:
        """Copies the parts and begins to write them; the copy before last is not needed any more,
        as only one is being written."""
        target = self.copies[0]
        self.copies.reverse()
        total = gather(parts, target)
        self._settle()
        if total % BLOCK_BYTES:
            self.files.end_direct(self.descriptor)
        self.under_way = self.beside(
            partial(self._store_aside, [memoryview(target)[:total]], offset),
            "syncer-checkpoint-write")

    def _store_aside(self, parts: list[memoryview], offset: int) -> None:
        try:
            self._store(parts, offset)
        except BaseException as error:  # it must reach whoever appends
            self.error = error

    def _store(self, parts: list[memoryview], offset: int) -> None:
        rest: list[bytes | memoryview] = list(parts)
        end = offset + sum(map(len, parts))
        while offset < end:
            count = self.files.write(self.descriptor, rest, offset)
            if count <= 0:
                raise OSError(errno.EIO, "the file takes no more bytes")
            offset += count
            advance(rest, count)

    def _settle(self) -> None:
        """What is under way has ended."""
        under_way, self.under_way = self.under_way, None
        if under_way is not None:
            under_way()
        error, self.error = self.error, None
        if error is not None:
            raise error


def address(view: memoryview) -> int:
    """Where the bytes of a view lie."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)
