"""Buffers that end at a page nobody may read, with canaries before them. Must not know kernels.

A kernel that reads or writes one byte past the end of such a buffer is killed by the memory
management unit; one that writes before the start changes a canary.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

CANARY = 0xA5
CANARY_BYTES = 128
PROT_NONE = 0
PROT_READ_WRITE = 3
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Guarded:
    """`nbytes` writable bytes that end `gap` bytes before an unreadable page.

    With gap 0 the last byte touches the page. `.bytes` is a uint8 view; `.floats` the same memory
    as float32 (nbytes and gap must then be multiples of 4)."""

    def __init__(self, nbytes: int, gap: int = 0) -> None:
        page = mmap.PAGESIZE
        room = CANARY_BYTES + nbytes + gap
        self._pages = -(-room // page) * page
        self._map = mmap.mmap(-1, self._pages + page)
        self._all = np.frombuffer(self._map, np.uint8)
        self._protect(PROT_NONE)
        self._start = self._pages - gap - nbytes
        self._end = self._start + nbytes
        self._all[: self._start] = CANARY
        self._all[self._end : self._pages] = CANARY
        self.bytes = self._all[self._start : self._end]

    @property
    def floats(self) -> np.ndarray:
        return self.bytes.view(np.float32)

    def intact(self) -> bool:
        """Whether nothing around the buffer was written."""
        before, after = self._all[: self._start], self._all[self._end : self._pages]
        return bool((before == CANARY).all() and (after == CANARY).all())

    def _protect(self, mode: int) -> None:
        address = self._all.ctypes.data + self._pages
        if _libc.mprotect(address, mmap.PAGESIZE, mode):
            raise OSError(ctypes.get_errno(), "mprotect failed")
