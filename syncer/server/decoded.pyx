"""The payload of an INIT or PUSH behind the wire: whose memory it is, and when that is given back.

It must not know who sent it or what becomes of it.

Compiled because every push of a small fragment has one (`small_push`).
"""

from syncer.wire.payload cimport Payload

import numpy as np

from syncer import kernels
from syncer.protocol import DTYPE_BF16, DTYPE_F32, DTYPE_Q4

cdef int F32 = DTYPE_F32

# (wire bytes, f32 values to fill, negate, threads) -> first bad element, or -1.
DECODERS = {
    DTYPE_F32: kernels.decode_f32, DTYPE_BF16: kernels.decode_bf16, DTYPE_Q4: kernels.decode_q4,
}


cpdef Decoded memory_for(pool, Py_ssize_t numel, tensor, int dtype, bint keep_wire):
    """Memory for the values of a payload: that of its message if it can be. Raises MemoryError."""
    cdef Payload message
    memory = tensor.obj
    if dtype == F32 and isinstance(memory, Payload):
        message = memory
        place = message.values(message.size - len(tensor))
        if place is not None:
            return Decoded(pool, numel, None, None, place)
    return Decoded(pool, numel, tensor if keep_wire else None, DECODERS[dtype])


cdef class Decoded:
    """f32 values of one fragment, in memory of a pool, or in that of their message.

    They go when the scheduler has released them and no worker uses them; the memory is used again
    when the last view of it is gone. A late push that waits for another round is parked: only its
    bytes as received are kept, if they are another copy.

    tensor: the wire bytes, while a push may still be parked, or is; decode: one of DECODERS for
    them. place: the values are where the message came; they are its bytes, or their negatives.
    digest: SHA-256 of the wire bytes, of an INIT only.
    """

    def __init__(self, pool, Py_ssize_t numel, tensor=None, decode=None, place=None):
        self.pool = pool
        self.numel = numel
        self.tensor = tensor
        self.decode = decode
        self.in_place = place is not None
        self.array = self._memory() if place is None else np.frombuffer(place, np.float32)

    @property
    def buffer(self):
        """The memory of the values, neither parked nor given back."""
        assert self.array is not None
        return self.array

    def values(self):
        """The f32 values; on a worker, decoded anew if the payload was parked. Raises
        MemoryError."""
        if self.array is None:
            self.array = self._memory()
        if self.parked and self.decode is not None:
            self.decode(self.tensor, self.array, True, 1)
            self.parked, self.tensor = False, None
        return self.buffer

    def borrow(self):
        """A worker is going to use the values; `give_back` when it has."""
        self.users += 1

    def give_back(self):
        """The worker is done with the values."""
        self.users -= 1
        self._free_if_unused()

    def release(self):
        """The scheduler needs the payload no more."""
        self.released = True
        self._free_if_unused()

    def settle(self):
        """The scheduler has judged the push: unless it parked it, the wire copy has no use."""
        if not self.parked:
            self.tensor = None

    def park(self):
        """Keep the wire bytes only; values in their place take no more."""
        if not self.in_place:
            self.array, self.parked = None, True

    cdef object _memory(self):
        return np.frombuffer(memoryview(self.pool.take(self.numel)), np.float32)

    cdef int _free_if_unused(self) except -1:
        if self.released and not self.users:
            self.tensor = self.array = None
        return 0
