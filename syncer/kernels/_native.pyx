"""Python face of csrc: checks buffers, releases the GIL, calls a kernel. Must not do arithmetic.

Arrays are any object with the buffer protocol; f32 arrays must be C-contiguous and aligned to 4
bytes. A wrong dtype is a TypeError; a wrong length, an unaligned array, or threads out of 1 .. 256
a ValueError, before anything is written.
"""

from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS,
    PyBUF_FORMAT,
    PyBUF_SIMPLE,
    PyBUF_WRITABLE,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from libc.math cimport sqrt
from libc.stdint cimport int64_t, uint8_t, uintptr_t

from syncer.kernels._merge cimport (
    sm_fold_add,
    sm_merge,
    sm_norms,
    sm_place_add,
    sm_placed,
    sm_places_clear,
    sm_total,
)

from syncer.errors import KernelError


cdef class _Buffers:
    """Holds the buffers of one call; they are released when this object goes away."""

    cdef Py_buffer views[8]
    cdef int count

    def __cinit__(self):
        self.count = 0

    def __dealloc__(self):
        while self.count:
            self.count -= 1
            PyBuffer_Release(&self.views[self.count])

    cdef Py_buffer *take(self, object owner, int flags) except NULL:
        cdef Py_buffer *view = &self.views[self.count]
        PyObject_GetBuffer(owner, view, flags)
        self.count += 1
        return view

    cdef uint8_t *data(self, object owner, size_t *nbytes, bint writable) except? NULL:
        """Raw bytes of any C-contiguous buffer. NULL is a valid start of an empty one."""
        cdef Py_buffer *view = self.take(owner, PyBUF_WRITABLE if writable else PyBUF_SIMPLE)
        nbytes[0] = <size_t>view.len
        return <uint8_t *>view.buf

    cdef float *floats(self, object owner, str name, size_t *n, bint writable) except? NULL:
        """Elements of a C-contiguous f32 array, of any shape."""
        cdef int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (PyBUF_WRITABLE if writable else 0)
        cdef Py_buffer *view = self.take(owner, flags)
        layout = (<bytes>view.format).decode() if view.format != NULL else "B"
        if layout.lstrip("<=@") != "f" or view.itemsize != 4:
            raise TypeError(f"{name}: expected float32 elements, found format {layout!r}; "
                            "convert with .astype(numpy.float32)")
        if <uintptr_t>view.buf % 4:
            raise ValueError(f"{name}: the array starts at an address that is not a multiple of 4; "
                             "pass an aligned copy")
        n[0] = <size_t>view.len // 4
        return <float *>view.buf

    cdef float *same(self, object owner, str name, size_t n, bint writable) except? NULL:
        """Like floats, for an array that must have n elements."""
        cdef size_t found
        cdef float *start = self.floats(owner, name, &found, writable)
        if found != n:
            raise ValueError(f"{name}: expected {n} elements like the first array, found {found}")
        return start


SUM_BLOCK = SK_BLOCK
"""Elements whose squares or products every sum takes together, before it adds up the blocks."""


cdef int check_threads(object threads) except -1:
    if not isinstance(threads, int) or not 1 <= threads <= SK_THREADS_MAX:
        raise ValueError(f"threads: expected 1 to {SK_THREADS_MAX}, found {threads!r}")
    return threads


cdef size_t wire_bytes(int dtype, size_t n) except? 1:
    """Bytes of n elements, which are in memory, on the wire; an encoding never takes a single
    one."""
    if dtype == SK_DTYPE_F32:
        return n * 4
    if dtype == SK_DTYPE_BF16:
        return n * 2
    if dtype == SK_DTYPE_Q4:
        return (n + SK_Q4_BLOCK - 1) // SK_Q4_BLOCK * SK_Q4_BYTES
    raise ValueError(f"dtype: expected 1 (f32), 2 (bf16) or 3 (q4), found {dtype}")


cdef int check_wire_bytes(str name, int dtype, size_t n, size_t found) except -1:
    cdef size_t expected = wire_bytes(dtype, n)
    if expected != found:
        raise ValueError(f"{name}: {n} elements take {expected} bytes, found {found}")
    return 0


# ------------------------------------------------------------------ SHA-256

def sha256(data):
    """SHA-256 digest (32 bytes) of a C-contiguous buffer."""
    cdef _Buffers held = _Buffers()
    cdef size_t n
    cdef uint8_t *start = held.data(data, &n, False)
    cdef uint8_t out[32]
    cdef sk_sha256 stream
    with nogil:
        sk_sha256_init(&stream)
        sk_sha256_update(&stream, start, n)
        sk_sha256_digest(&stream, out)
    return out[:32]


def sha256_pair(a, b):
    """Digests of two buffers, computed by one thread in two interleaved streams."""
    cdef _Buffers held = _Buffers()
    cdef size_t na, nb
    cdef uint8_t *start_a = held.data(a, &na, False)
    cdef uint8_t *start_b = held.data(b, &nb, False)
    cdef uint8_t out_a[32]
    cdef uint8_t out_b[32]
    with nogil:
        sk_sha256_pair(start_a, na, start_b, nb, out_a, out_b)
    return out_a[:32], out_b[:32]


def sha256_update_pair(Sha256 a not None, data_a, Sha256 b not None, data_b):
    """Adds bytes to two different streams by one thread, interleaved: nearly twice as fast as one
    after the other, while both streams are at a multiple of 64 bytes. The GIL is released."""
    cdef _Buffers held = _Buffers()
    cdef size_t na, nb
    cdef uint8_t *start_a = held.data(data_a, &na, False)
    cdef uint8_t *start_b = held.data(data_b, &nb, False)
    if a is b:
        raise ValueError("a pair needs two different streams")
    with nogil:
        sk_sha256_update_pair(&a.stream, start_a, na, &b.stream, start_b, nb)


cdef class Sha256:
    """Streaming SHA-256: update, digest, hexdigest, copy, as of hashlib.

    The GIL is released while bytes are hashed, so one object must not be updated by two threads."""

    cdef sk_sha256 stream

    def __cinit__(self, data=b""):
        sk_sha256_init(&self.stream)
        self.update(data)

    def update(self, data):
        """Adds the bytes of a C-contiguous buffer."""
        cdef _Buffers held = _Buffers()
        cdef size_t n
        cdef uint8_t *start = held.data(data, &n, False)
        with nogil:
            sk_sha256_update(&self.stream, start, n)

    def digest(self):
        """32 bytes; the stream may go on afterwards."""
        cdef uint8_t out[32]
        sk_sha256_digest(&self.stream, out)
        return out[:32]

    def hexdigest(self):
        """The digest as 64 lower-case hexadecimal digits."""
        return self.digest().hex()

    def copy(self):
        """Another stream that has taken the same bytes so far."""
        cdef Sha256 other = Sha256()
        other.stream = self.stream
        return other


# ------------------------------------------------------------------ codecs

def decode(int dtype, src, out, bint negate, threads=1, size_t whole=0):
    """Decodes wire bytes into an f32 array in one pass; `negate` flips every sign bit.

    dtype: 1 f32, 2 bf16, 3 q4. Returns the index of the first value that is not finite (q4: of the
    first block with a bad scale), or -1. All of `out` is written in both cases. whole: elements of
    what `out` is a part of; what is large is written past the cache. Raises ValueError for another
    dtype or lengths that do not fit, TypeError when `out` is not f32."""
    cdef _Buffers held = _Buffers()
    cdef size_t nbytes, n
    cdef int parts = check_threads(threads)
    cdef uint8_t *start = held.data(src, &nbytes, False)
    cdef float *target = held.floats(out, "out", &n, True)
    cdef int64_t bad
    check_wire_bytes("src", dtype, n, nbytes)
    with nogil:
        bad = sk_decode(dtype, start, target, n, whole, negate, parts)
    return bad


def decode_f32(src, out, bint negate, threads=1):
    """`decode` for little-endian f32 bytes."""
    return decode(SK_DTYPE_F32, src, out, negate, threads)


def decode_bf16(src, out, bint negate, threads=1):
    """`decode` for little-endian bf16 bytes."""
    return decode(SK_DTYPE_BF16, src, out, negate, threads)


def decode_q4(src, out, bint negate, threads=1):
    """`decode` for q4 blocks; the padding of the last block is not looked at."""
    return decode(SK_DTYPE_Q4, src, out, negate, threads)


def encode_bf16(src, out, threads=1):
    """f32 array -> little-endian bf16 bytes, rounded to nearest even, NaN quieted."""
    cdef _Buffers held = _Buffers()
    cdef size_t nbytes, n
    cdef int parts = check_threads(threads)
    cdef float *start = held.floats(src, "src", &n, False)
    cdef uint8_t *target = held.data(out, &nbytes, True)
    check_wire_bytes("out", SK_DTYPE_BF16, n, nbytes)
    with nogil:
        sk_encode_bf16(start, target, n, parts)


def encode_q4(src, out, threads=1):
    """f32 array -> q4 blocks of 256 values (132 bytes each), the last padded with +0."""
    cdef _Buffers held = _Buffers()
    cdef size_t nbytes, n
    cdef int parts = check_threads(threads)
    cdef float *start = held.floats(src, "src", &n, False)
    cdef uint8_t *target = held.data(out, &nbytes, True)
    check_wire_bytes("out", SK_DTYPE_Q4, n, nbytes)
    with nogil:
        sk_encode_q4(start, target, n, parts)


cdef int check_bulk(int dtype) except -1:
    if dtype not in (SK_DTYPE_F32, SK_DTYPE_BF16):
        raise ValueError(f"dtype: expected 1 (f32) or 2 (bf16), found {dtype}")
    return 0


def encode_change(int dtype, values, base, change, out, threads=1):
    """change = q4(values - base), and out = base + change: what a peer has that had `base`.

    dtype: of `base` and `out`, 1 f32 or 2 bf16. Returns the index of the first value of `out` that
    is not finite, or -1; all is written in both cases. Raises as `decode`."""
    cdef _Buffers held = _Buffers()
    cdef size_t n, of_base, of_change, of_out
    cdef int parts = check_threads(threads)
    cdef float *source = held.floats(values, "values", &n, False)
    cdef uint8_t *before = held.data(base, &of_base, False)
    cdef uint8_t *told = held.data(change, &of_change, True)
    cdef uint8_t *after = held.data(out, &of_out, True)
    cdef int64_t bad
    check_bulk(dtype)
    check_wire_bytes("base", dtype, n, of_base)
    check_wire_bytes("change", SK_DTYPE_Q4, n, of_change)
    check_wire_bytes("out", dtype, n, of_out)
    with nogil:
        bad = sk_encode_change(dtype, source, before, told, after, n, parts)
    return bad


def apply_change(int dtype, base, change, out, threads=1):
    """The same `out` from the same `base` and the `change` alone. `out` is another memory than
    `base`. Raises as `decode`."""
    cdef _Buffers held = _Buffers()
    cdef size_t n, of_base, of_change, of_out
    cdef int parts = check_threads(threads)
    cdef uint8_t *before = held.data(base, &of_base, False)
    cdef uint8_t *told = held.data(change, &of_change, False)
    cdef uint8_t *after = held.data(out, &of_out, True)
    check_bulk(dtype)
    n = of_base // wire_bytes(dtype, 1)
    check_wire_bytes("base", dtype, n, of_base)
    check_wire_bytes("change", SK_DTYPE_Q4, n, of_change)
    check_wire_bytes("out", dtype, n, of_out)
    with nogil:
        sk_apply_change(dtype, before, told, after, n, parts)


# ------------------------------------------------------------------ blocked sums

def sumsq(x, threads=1):
    """Blocked sum of squares of an f32 array, in f64."""
    cdef _Buffers held = _Buffers()
    cdef size_t n
    cdef int parts = check_threads(threads)
    cdef float *start = held.floats(x, "x", &n, False)
    cdef double total
    with nogil:
        total = sk_sumsq(start, n, parts)
    return total


def dot(x, y, threads=1):
    """Blocked sum of products of two f32 arrays, in f64."""
    cdef _Buffers held = _Buffers()
    cdef size_t n
    cdef int parts = check_threads(threads)
    cdef float *first = held.floats(x, "x", &n, False)
    cdef float *second = held.same(y, "y", n, False)
    cdef double total
    with nogil:
        total = sk_dot(first, second, n, parts)
    return total


# ------------------------------------------------------------------ element-wise

def axpby_blend(theta, anchor, double alpha, threads=1):
    """theta = f32(alpha) * theta + f32(1 - alpha) * anchor."""
    cdef _Buffers held = _Buffers()
    cdef size_t n
    cdef int parts = check_threads(threads)
    cdef float *target = held.floats(theta, "theta", &n, True)
    cdef float *source = held.same(anchor, "anchor", n, False)
    with nogil:
        sk_blend(target, source, sk_float_of(alpha), sk_float_of(1.0 - alpha), n, parts)


def first_nonfinite(x, threads=1):
    """Index of the first NaN or infinity of an f32 array, or -1."""
    cdef _Buffers held = _Buffers()
    cdef size_t n
    cdef int parts = check_threads(threads)
    cdef float *start = held.floats(x, "x", &n, False)
    cdef int64_t bad
    with nogil:
        bad = sk_scan(start, n, parts)
    return bad


include "_dispatch.pxi"
include "_testing.pxi"


# ------------------------------------------------------------------ for the merge room

def set_places(places):
    """Thread i of n of every merge keeps to the cores of place i * len(places) // n from now on,
    and to its share of each tensor; with fewer than two, threads run anywhere.

    places: lists of cores that share memory, at most 64. Returns whether there are two or more.
    """
    cdef int cores[1024]
    cdef size_t count
    sm_places_clear()
    for place in places:
        count = 0
        for core in place[:1024]:
            cores[count] = core
            count += 1
        sm_place_add(cores, count)
    if not sm_placed():
        sm_places_clear()
    return bool(sm_placed())


cdef void merge_fragment(sm_merge_job *job) noexcept nogil:
    sm_merge(job)


cdef void fold_add(sm_fold_job *job) noexcept nogil:
    sm_fold_add(job)


cdef void gradient_norms(sm_norms_job *job) noexcept nogil:
    sm_norms(job)


cdef int64_t decode_part(int dtype, const uint8_t *src, float *out, size_t n, size_t whole,
                         bint negate) noexcept nogil:
    return sk_decode(dtype, src, out, n, whole, negate, 1)


cdef double fragment_total(const sm_plan *plan, const double *row) noexcept nogil:
    return sm_total(plan, row)
