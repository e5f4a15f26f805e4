"""Memory of received messages: never zero-filled, and the large ones are used again.

Must not know frames or limits. Needs the GIL, which is the lock of the blocks.
"""

from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdint cimport uint64_t
from libc.stdlib cimport free, malloc

from syncer.errors import NoMemory
from syncer.pages cimport GRAIN, give_block, take_block


cdef class Payload:
    """Bytes of one message; a buffer that is read-only once the message is complete."""

    def __dealloc__(self):
        if self.capacity:
            give_block(self.memory, self.capacity)
        else:
            free(self.memory)

    def __len__(self):
        return self.size

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.data, self.size, self.sealed, flags)


cdef Payload allocate(uint64_t size, Py_ssize_t lead, bint recycle):
    cdef Payload payload = Payload.__new__(Payload)
    cdef size_t bytes = <size_t>size + lead
    cdef bint zero
    if size <= <uint64_t>(<size_t>-1 >> 1) - lead:
        if recycle and bytes >= GRAIN:
            payload.memory = take_block(bytes, &zero)
            payload.capacity = bytes
        else:
            payload.memory = malloc(bytes)
    if payload.memory == NULL:
        raise NoMemory(f"cannot allocate {size} bytes for a message of the peer: try again later")
    payload.data = <char*>payload.memory + lead
    payload.size = <Py_ssize_t>size
    return payload
