"""Memory of received messages: never zero-filled, and the large ones are used again.

Must not know frames or limits. Needs the GIL, which is the lock of the blocks.
"""

from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport free, malloc

from syncer.errors import NoMemory
from syncer.pages cimport GRAIN, give_block, take_block


cdef class Payload:
    """Bytes of one message; a buffer that is read-only once the message is complete."""

    def __dealloc__(self):
        if self.capacity:
            give_block(self.memory, self.capacity, False)
        else:
            free(self.memory)

    def __len__(self):
        return self.size

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.data, self.size, self.sealed, flags)

    def values(self, Py_ssize_t at):
        """Writable f32 elements in place of the bytes from `at` on, which are theirs from now on;
        None where they would not be aligned."""
        cdef bint sealed = self.sealed
        if <uintptr_t>(self.data + at) % 4:
            return None
        self.sealed = False
        try:
            return memoryview(self)[at:].cast("f")
        finally:
            self.sealed = sealed


def space(uint64_t size):
    """Memory for a message that is made here in place of one that comes. Raises `NoMemory`."""
    return memoryview(allocate(size, 0, True))


cdef Payload allocate(uint64_t size, Py_ssize_t lead, bint recycle):
    cdef Payload payload = Payload.__new__(Payload)
    cdef size_t bytes = <size_t>size + lead
    cdef bint zero
    if size <= <uint64_t>(<size_t>-1 >> 1) - lead:
        if recycle and bytes >= GRAIN:
            payload.memory = take_block(bytes, &zero, False)
            payload.capacity = bytes
        else:
            payload.memory = malloc(bytes)
    if payload.memory == NULL:
        raise NoMemory(f"cannot allocate {size} bytes for a message of the peer: try again later")
    payload.data = <char*>payload.memory + lead
    payload.size = <Py_ssize_t>size
    return payload
