"""Recycled float buffers for decoded payloads.

A push of a large fragment would otherwise cost a page fault per 4 KiB, every round. It must not
hold more free memory than it was told, and never hands out a buffer that somebody still holds.
"""

from __future__ import annotations

import numpy as np


class BufferPool:
    """Lends f32 arrays; keeps at most `free_bytes_max` of returned memory for the next borrower."""

    def __init__(self, free_bytes_max: int):
        self.free_bytes_max = free_bytes_max
        self.free: list[np.ndarray] = []
        self.free_bytes = 0
        self.lent = 0

    def take(self, numel: int) -> np.ndarray:
        """An array of `numel` elements, f32, C-contiguous, content undefined.

        The smallest free buffer that fits is used, unless more than half of it would lie idle.
        """
        best = None
        for index, buffer in enumerate(self.free):
            if numel <= buffer.size <= 2 * numel and (
                best is None or buffer.size < self.free[best].size
            ):
                best = index
        if best is None:
            array = np.empty(numel, np.float32)
        else:
            buffer = self.free.pop(best)
            self.free_bytes -= buffer.nbytes
            array = buffer[:numel]
        self.lent += 1
        return array

    def give_back(self, array: np.ndarray) -> None:
        """The borrower is done with an array of `take`."""
        self.lent -= 1
        buffer = array if array.base is None else array.base
        self.free.append(buffer)
        self.free_bytes += buffer.nbytes
        while self.free_bytes > self.free_bytes_max:
            self.free_bytes -= self.free.pop(0).nbytes
