"""Memory of fragment versions: arrays that are used again; must not know what they hold.

A `Buffer` exports its f32 elements by the buffer protocol. Every array made from it keeps it alive,
so its memory goes back exactly when nothing can read it any more: the last version, view or
memoryview is gone. From then on it may be written again, by whoever takes a block (pages.pyx).
"""

from cpython.buffer cimport PyBUF_FORMAT, PyBUF_ND, PyBUF_STRIDES, PyBUF_WRITABLE
from libc.stdint cimport uintptr_t
from libc.string cimport memset

cimport cython

from syncer.pages cimport give_block, take_block

cdef char* FORMAT = b"f"

cdef enum:
    # Blocks lie side by side, so that those of one size are as far apart as they are long. At a
    # large power of two their streams meet in the same sets of caches and banks of memory: a merge
    # of 32 Mi parameters took twice as long as one of 31 or 33 Mi. So such a block is a huge page
    # longer, of which nothing is ever used.
    STRIDE = 64 << 20
    APART = 2 << 20


cdef inline size_t block_bytes(Py_ssize_t numel) noexcept:
    """Bytes of the block for so many elements."""
    cdef size_t nbytes = <size_t>numel * sizeof(float)
    return nbytes if nbytes % STRIDE else nbytes + APART


@cython.final
@cython.no_gc
cdef class BufferPool:
    """Counts the buffers in use. lasting: they are of fragments, not of messages.

    Its methods are called with the GIL held and run no Python code in between, so a buffer may come
    back on any thread.
    """

    def __cinit__(self, bint lasting=False):
        self.lasting = lasting
        self.live = 0
        self.live_bytes = 0

    def take(self, Py_ssize_t numel, bint zero=False):
        """A writable buffer of `numel` f32 elements.

        `zero` fills it with +0; otherwise its elements are unspecified. Raises MemoryError.
        """
        if numel <= 0:
            raise ValueError(f"a buffer holds at least one element, not {numel}")
        cdef Buffer buffer = Buffer.__new__(Buffer)
        cdef size_t nbytes = block_bytes(numel)
        cdef bint is_zero = False
        buffer.data = <float*>take_block(nbytes, &is_zero, self.lasting)
        if buffer.data == NULL:
            raise MemoryError(f"no memory for a fragment buffer of {4 * numel} bytes")
        if zero and not is_zero:
            memset(buffer.data, 0, numel * sizeof(float))
        self.count(buffer, numel)
        return buffer

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
        buffer.frozen = True
        self.count(buffer, view.shape[0])
        return buffer

    cdef void count(self, Buffer buffer, Py_ssize_t numel):
        buffer.numel = numel
        buffer.pool = self
        self.live += 1
        self.live_bytes += numel * sizeof(float)


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
            self.pool.live -= 1
            self.pool.live_bytes -= self.numel * sizeof(float)
        if self.source is None:
            give_block(self.data, block_bytes(self.numel),
                       self.pool is not None and self.pool.lasting)
