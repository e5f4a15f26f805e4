# Memory that one received message lands in. Hold the object for as long as `data` is used.

from libc.stdint cimport uint64_t


cdef class Payload:
    cdef void* memory
    cdef size_t capacity  # bytes at `memory`; 0 if it is malloc's
    cdef char* data
    cdef readonly Py_ssize_t size
    cdef bint sealed      # read-only for every view taken from now on


# `size` bytes, not zero-filled, `lead` (< 64) bytes past an aligned address. `recycle`: large ones
# are blocks that are used again. Raises RemoteProtocolError if there is no such memory.
cdef Payload allocate(uint64_t size, Py_ssize_t lead, bint recycle)
