"""Memory of fragment versions: arrays that go back to a pool; must not know what they hold.

A `Buffer` exports its f32 elements by the buffer protocol. Every array made from it keeps it alive,
so it returns to its pool exactly when nothing can read it any more: the last version, view or
memoryview is gone. From then on its memory may be written again.

Capacities come in eight classes per power of two. Memory above a fragment's length is never
touched, so the rounding costs address space only, and fragments of nearly the same size share
spares.
"""

from cpython.buffer cimport PyBUF_FORMAT, PyBUF_ND, PyBUF_STRIDES, PyBUF_WRITABLE
from libc.stdint cimport uintptr_t
from libc.string cimport memset

cimport cython


cdef extern from *:
    """
    #include <stdlib.h>
    #include <string.h>
    #include <sys/mman.h>
    #define SYNCER_HUGE_PAGE ((size_t)2 << 20)
    /* +0 in every byte. Large blocks are untouched pages (huge ones if the system likes): zero
     * without being written, and given back to the system by free. */
    static void *syncer_fragment_memory(size_t bytes) {
        void *memory = NULL;
        if (bytes < 2 * SYNCER_HUGE_PAGE) {
            if (posix_memalign(&memory, 64, bytes)) return NULL;
            return memset(memory, 0, bytes);
        }
        char *all = mmap(NULL, bytes + SYNCER_HUGE_PAGE, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (all == MAP_FAILED) return NULL;
        size_t before = -(size_t)all & (SYNCER_HUGE_PAGE - 1);
        if (before) (void)munmap(all, before);
        (void)munmap(all + before + bytes, SYNCER_HUGE_PAGE - before);
    #ifdef MADV_HUGEPAGE
        (void)madvise(all + before, bytes, MADV_HUGEPAGE); /* advice: slower without, not wrong */
    #endif
        return all + before;
    }
    static void syncer_fragment_free(void *memory, size_t bytes) {
        if (memory == NULL) return;
        if (bytes < 2 * SYNCER_HUGE_PAGE) free(memory);
        else (void)munmap(memory, bytes);
    }
    """
    Py_ssize_t PY_SSIZE_T_MAX
    void* syncer_fragment_memory(size_t bytes)
    void syncer_fragment_free(void* memory, size_t bytes)

cdef char* FORMAT = b"f"


cdef Py_ssize_t capacity_class(Py_ssize_t numel) noexcept:
    """Smallest (8 + i) * 2**k elements, i in 0..7, that hold `numel`."""
    cdef Py_ssize_t unit = 128
    while unit * 16 < numel:
        unit *= 2
    return (numel + unit - 1) // unit * unit


@cython.final
@cython.no_gc
cdef class BufferPool:
    """Counts the buffers in use and keeps a bounded number of bytes of returned ones.

    bytes_max: spares are freed where they and the buffers in use are more together.

    Its methods are called with the GIL held and run no Python code in between, so a buffer may come
    back on any thread.
    """

    def __cinit__(self):
        self._spare = []
        self._spare_bytes_max = 0
        self.bytes_max = PY_SSIZE_T_MAX
        self.live = 0
        self.live_bytes = 0
        self.spare_bytes = 0

    @property
    def spare_bytes_max(self):
        """Most bytes of spare memory kept; what comes back beyond it is freed, oldest first."""
        return self._spare_bytes_max

    @spare_bytes_max.setter
    def spare_bytes_max(self, Py_ssize_t value):
        self._spare_bytes_max = value
        self.trim()

    def take(self, Py_ssize_t numel, bint zero=False):
        """A writable buffer of `numel` f32 elements: a spare if one fits, new memory otherwise.

        `zero` fills it with +0; otherwise its elements are unspecified. Raises MemoryError.
        """
        cdef Buffer buffer, best = None
        cdef Py_ssize_t wanted = capacity_class(numel), i, place = 0
        if numel <= 0:
            raise ValueError(f"a buffer holds at least one element, not {numel}")
        for i in range(len(self._spare)):
            buffer = self._spare[i]
            # A much larger spare would tie up memory that its own fragment will ask for again.
            if numel <= buffer.capacity <= wanted + wanted // 4 and (
                best is None or buffer.capacity < best.capacity
            ):
                best, place = buffer, i
                if buffer.capacity == wanted:
                    break
        cdef Buffer fresh = Buffer.__new__(Buffer)
        if best is not None:
            del self._spare[place]
            self.spare_bytes -= best.capacity * sizeof(float)
            fresh.data, fresh.capacity = best.data, best.capacity
            best.data = NULL
            if zero:
                memset(fresh.data, 0, numel * sizeof(float))
        else:
            fresh.capacity = wanted
            fresh.data = <float*>syncer_fragment_memory(wanted * sizeof(float))
            if fresh.data == NULL:
                raise MemoryError(f"no memory for a fragment buffer of {wanted * 4} bytes")
        fresh.numel = numel
        fresh.frozen = False
        fresh.pool = self
        self.live += 1
        self.live_bytes += numel * sizeof(float)
        self.trim()
        return fresh

    def adopt(self, source):
        """A frozen buffer over the memory of `source` (f32, C-contiguous), which it keeps alive.

        Counted as live, never recycled. Raises ValueError for another dtype or shape, or an address
        that is no multiple of 4.
        """
        cdef const float[::1] view = source
        cdef Buffer buffer = Buffer.__new__(Buffer)
        if view.shape[0] == 0:
            raise ValueError("a buffer holds at least one element, not 0")
        if <uintptr_t>&view[0] % 4:
            raise ValueError("an array starts at an address that is not a multiple of 4; pass an "
                             "aligned copy")
        buffer.source = view
        buffer.data = <float*>&view[0]
        buffer.numel = buffer.capacity = view.shape[0]
        buffer.frozen = True
        buffer.pool = self
        self.live += 1
        self.live_bytes += buffer.numel * sizeof(float)
        return buffer

    cdef void give_back(self, Buffer buffer):
        self.live -= 1
        self.live_bytes -= buffer.numel * sizeof(float)
        if buffer.source is not None:
            return
        cdef Buffer spare = Buffer.__new__(Buffer)
        spare.data, spare.capacity = buffer.data, buffer.capacity
        buffer.data = NULL
        self._spare.append(spare)
        self.spare_bytes += spare.capacity * sizeof(float)
        self.trim()

    cdef void trim(self):
        cdef Buffer oldest
        while self._spare and (self.spare_bytes > self._spare_bytes_max
                               or self.spare_bytes > self.bytes_max - self.live_bytes):
            oldest = self._spare.pop(0)
            self.spare_bytes -= oldest.capacity * sizeof(float)
            # its memory is freed by its own __dealloc__


@cython.final
@cython.no_gc
cdef class Buffer:
    """`numel` f32 elements; read-only once frozen. Made by `BufferPool` alone."""

    def freeze(self):
        """From now on only read-only views can be made. Returns itself."""
        self.frozen = True
        return self

    def __len__(self):
        return self.numel

    def __getbuffer__(self, Py_buffer* view, int flags):
        if self.frozen and flags & PyBUF_WRITABLE:
            raise BufferError("a published fragment never changes: its buffer is read-only")
        self.shape[0] = self.numel
        self.strides[0] = sizeof(float)
        view.buf = self.data
        view.obj = self
        view.len = self.numel * sizeof(float)
        view.readonly = self.frozen
        view.itemsize = sizeof(float)
        view.format = FORMAT if flags & PyBUF_FORMAT else NULL
        view.ndim = 1
        view.shape = self.shape if flags & PyBUF_ND else NULL
        view.strides = self.strides if (flags & PyBUF_STRIDES) == PyBUF_STRIDES else NULL
        view.suboffsets = NULL
        view.internal = NULL

    def __dealloc__(self):
        if self.pool is not None:
            self.pool.give_back(self)
        if self.source is None:
            syncer_fragment_free(self.data, self.capacity * sizeof(float))
