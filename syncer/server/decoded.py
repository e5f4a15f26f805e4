"""The payload of an INIT or PUSH behind the wire: whose memory it is, and when that is given back.

It must not know who sent it or what becomes of it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from syncer.merge.buffers import BufferPool

Decode = Callable[..., int]
"""(wire bytes, f32 values to fill, negate, threads) -> first bad element, or -1."""


class Decoded:
    """f32 values of one fragment, in memory of a pool, or in that of their message.

    They go when the scheduler has released them and no worker uses them; the memory is used again
    when the last view of it is gone. A late push that waits for another round is parked: only its
    bytes as received are kept, if they are another copy.
    """

    __slots__ = ("array", "decode", "digest", "in_place", "numel", "parked", "pool", "released",
                 "tensor", "users")

    def __init__(self, pool: BufferPool, numel: int, tensor: memoryview | None = None,
                 decode: Decode | None = None, place: memoryview | None = None):
        self.pool = pool
        self.numel = numel
        self.array: np.ndarray | None = None
        self.tensor = tensor
        """The wire bytes, while a push may still be parked, or is."""
        self.decode = decode
        self.in_place = place is not None
        """The values are where the message came: they are its bytes, or their negatives."""
        self.parked = False
        """Only `tensor` is kept: whoever needs the values decodes them, into memory for them."""
        self.digest: bytes | None = None
        """SHA-256 of the wire bytes, of an INIT only."""
        self.users = 0
        self.released = False
        self.array = self._memory() if place is None else np.frombuffer(place, np.float32)

    @property
    def buffer(self) -> np.ndarray:
        """The memory of the values, neither parked nor given back."""
        assert self.array is not None
        return self.array

    def values(self) -> np.ndarray:
        """The f32 values; on a worker, decoded anew if the payload was parked. Raises
        MemoryError."""
        if self.array is None:
            self.array = self._memory()
        if self.parked and self.decode is not None:
            self.decode(self.tensor, self.buffer, True, 1)
            self.parked, self.tensor = False, None
        return self.buffer

    def borrow(self) -> None:
        """A worker is going to use the values; `give_back` when it has."""
        self.users += 1

    def give_back(self) -> None:
        """The worker is done with the values."""
        self.users -= 1
        self._free_if_unused()

    def release(self) -> None:
        """The scheduler needs the payload no more."""
        self.released = True
        self._free_if_unused()

    def settle(self) -> None:
        """The scheduler has judged the push: unless it parked it, the wire copy has no use."""
        if not self.parked:
            self.tensor = None

    def park(self) -> None:
        """Keep the wire bytes only; values in their place take no more."""
        if not self.in_place:
            self.array, self.parked = None, True

    def _memory(self) -> np.ndarray:
        return np.frombuffer(memoryview(self.pool.take(self.numel)), np.float32)

    def _free_if_unused(self) -> None:
        if self.released and not self.users:
            self.tensor = self.array = None
