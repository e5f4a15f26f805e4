"""Memory of received messages: never zero-filled, and the large ones are used again.

A fresh 64 MiB buffer costs more than what is received into it: its pages are faulted in one by one
while the kernel copies, which was measured at a quarter of the speed of a buffer that has been used
before (and at six tenths with huge pages). So large blocks ask for huge pages, and the most
recently freed ones are kept, up to SPARE_BYTES_MAX in the whole process.

Must not know frames or limits. Needs the GIL, which is the lock of the spares.
"""

from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdint cimport uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memmove

from syncer.errors import NoMemory

cdef extern from *:
    """
    #include <stdlib.h>
    #include <sys/mman.h>
    static void *syncer_large_block(size_t bytes, size_t alignment) {
        void *block = NULL;
        if (posix_memalign(&block, alignment, bytes)) return NULL;
    #ifdef MADV_HUGEPAGE
        (void)madvise(block, bytes, MADV_HUGEPAGE); /* advice: it works without, only slower */
    #endif
        return block;
    }
    """
    void* syncer_large_block(size_t bytes, size_t alignment) nogil

cdef enum:
    LARGE = 2 * 1024 * 1024  # a huge page, and the unit of large blocks
    SPARES_MAX = 64

SPARE_BYTES_MAX = 256 * 1024 * 1024
"""Bytes of freed large blocks that the process keeps at most."""

cdef struct Block:
    void* memory
    size_t capacity

# Oldest first.
cdef Block spares[SPARES_MAX]
cdef Py_ssize_t spare_count = 0
cdef size_t spare_total = 0
cdef size_t spare_max = SPARE_BYTES_MAX


def spare_bytes():
    """Bytes of freed large blocks that are kept for the next messages."""
    return spare_total


def free_spares():
    """Give the freed blocks back to the system: memory is short."""
    while spare_count:
        free(spares[spare_count - 1].memory)
        drop_spare(spare_count - 1)


cdef void drop_spare(Py_ssize_t index) noexcept:
    global spare_count, spare_total
    spare_total -= spares[index].capacity
    spare_count -= 1
    memmove(&spares[index], &spares[index + 1], (spare_count - index) * sizeof(Block))


cdef void keep_spare(void* memory, size_t capacity) noexcept:
    """Keeps a block; the oldest ones make room, because sizes that are gone do not come back."""
    global spare_count, spare_total
    if capacity > spare_max:
        free(memory)
        return
    while spare_count == SPARES_MAX or spare_total + capacity > spare_max:
        free(spares[0].memory)
        drop_spare(0)
    spares[spare_count].memory = memory
    spares[spare_count].capacity = capacity
    spare_count += 1
    spare_total += capacity


cdef void* take_spare(size_t capacity) noexcept:
    """The newest block of exactly this capacity, NULL if there is none."""
    cdef void* memory
    cdef Py_ssize_t index = spare_count - 1
    while index >= 0:
        if spares[index].capacity == capacity:
            memory = spares[index].memory
            drop_spare(index)
            return memory
        index -= 1
    return NULL


cdef class Payload:
    """Bytes of one message; a buffer that is read-only once the message is complete."""

    def __dealloc__(self):
        if self.capacity:
            keep_spare(self.memory, self.capacity)
        else:
            free(self.memory)

    def __len__(self):
        return self.size

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.data, self.size, self.sealed, flags)


cdef Payload allocate(uint64_t size, Py_ssize_t lead, bint recycle):
    cdef Payload payload = Payload.__new__(Payload)
    cdef size_t bytes = <size_t>size + lead
    if size <= <uint64_t>(<size_t>-1 >> 1) - LARGE - lead:
        if recycle and bytes >= LARGE:
            bytes = (bytes + LARGE - 1) // LARGE * LARGE
            payload.memory = take_spare(bytes)
            if payload.memory == NULL:
                payload.memory = syncer_large_block(bytes, LARGE)
            if payload.memory != NULL:
                payload.capacity = bytes
        else:
            payload.memory = malloc(bytes)
    if payload.memory == NULL:
        raise NoMemory(f"cannot allocate {size} bytes for a message of the peer: try again later")
    payload.data = <char*>payload.memory + lead
    payload.size = <Py_ssize_t>size
    return payload
