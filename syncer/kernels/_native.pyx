"""Python face of csrc: checks buffers, releases the GIL, calls a pass. Must not do arithmetic."""

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

from syncer.kernels._merge cimport sm_fold_add, sm_merge, sm_norms, sm_total

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


cdef int check_threads(object threads) except -1:
    if not isinstance(threads, int) or not 1 <= threads <= SK_THREADS_MAX:
        raise ValueError(f"threads: expected 1 to {SK_THREADS_MAX}, found {threads!r}")
    return threads


cdef int check_wire_bytes(str name, size_t expected, size_t found, size_t n) except -1:
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


def sha256_update_pair(Sha256 a, data_a, Sha256 b, data_b):
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
    """Streaming SHA-256 like hashlib's: update, digest, hexdigest, copy.

    The GIL is released while bytes are hashed, so one object must not be updated by two threads."""

    cdef sk_sha256 stream

    digest_size = 32
    block_size = 64
    name = "sha256"

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
        return self.digest().hex()

    def copy(self):
        cdef Sha256 other = Sha256()
        other.stream = self.stream
        return other


# ------------------------------------------------------------------ codecs

def wire_bytes(int dtype, size_t n):
    """Bytes of n elements on the wire; dtype 1 f32, 2 bf16, 3 q4. Raises ValueError for another."""
    if dtype == SK_DTYPE_F32:
        return n * 4
    if dtype == SK_DTYPE_BF16:
        return n * 2
    if dtype == SK_DTYPE_Q4:
        return (n + SK_Q4_BLOCK - 1) // SK_Q4_BLOCK * SK_Q4_BYTES
    raise ValueError(f"dtype: expected 1 (f32), 2 (bf16) or 3 (q4), found {dtype}")


def decode(int dtype, src, out, bint negate, threads=1):
    """Decodes wire bytes into an f32 array in one pass; `negate` flips every sign bit.

    Returns the index of the first value that is not finite (q4: of the first block with a bad
    scale), or -1. All of `out` is written in both cases. Raises ValueError when the lengths do not
    fit, TypeError when `out` is not f32."""
    cdef _Buffers held = _Buffers()
    cdef size_t nbytes, n
    cdef int parts = check_threads(threads)
    cdef uint8_t *start = held.data(src, &nbytes, False)
    cdef float *target = held.floats(out, "out", &n, True)
    cdef int64_t bad
    check_wire_bytes("src", wire_bytes(dtype, n), nbytes, n)
    with nogil:
        bad = sk_decode(dtype, start, target, n, negate, parts)
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
    check_wire_bytes("out", wire_bytes(SK_DTYPE_BF16, n), nbytes, n)
    with nogil:
        sk_encode_bf16(start, target, n, parts)


def encode_q4(src, out, threads=1):
    """f32 array -> q4 blocks of 256 values (132 bytes each), the last padded with +0."""
    cdef _Buffers held = _Buffers()
    cdef size_t nbytes, n
    cdef int parts = check_threads(threads)
    cdef float *start = held.floats(src, "src", &n, False)
    cdef uint8_t *target = held.data(out, &nbytes, True)
    check_wire_bytes("out", wire_bytes(SK_DTYPE_Q4, n), nbytes, n)
    with nogil:
        sk_encode_q4(start, target, n, parts)


def encode_range(int dtype, src, size_t begin, size_t end, out, threads=1):
    """Bytes [begin, end) of the encoding of a whole f32 array, for example one chunk of a message.

    `out` takes end - begin bytes. The bytes equal those of encoding everything and slicing.
    Raises ValueError when the range does not lie in the encoding or `out` has another length."""
    cdef _Buffers held = _Buffers()
    cdef size_t nbytes, n, whole
    cdef int parts = check_threads(threads)
    cdef float *start = held.floats(src, "src", &n, False)
    cdef uint8_t *target = held.data(out, &nbytes, True)
    whole = wire_bytes(dtype, n)
    if not begin <= end <= whole:
        raise ValueError(f"range: expected 0 <= begin <= end <= {whole}, found {begin} and {end}")
    if nbytes != end - begin:
        raise ValueError(f"out: expected {end - begin} bytes, found {nbytes}")
    with nogil:
        sk_encode_range(dtype, start, n, begin, end, target, parts)


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


def norm(x, threads=1):
    """Euclidean norm: the root of `sumsq`."""
    return sqrt(sumsq(x, threads))


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


def three_sums(x, y, threads=1):
    """(x.x, x.y, y.y) as blocked sums from one pass over both arrays."""
    cdef _Buffers held = _Buffers()
    cdef size_t n
    cdef int parts = check_threads(threads)
    cdef float *first = held.floats(x, "x", &n, False)
    cdef float *second = held.same(y, "y", n, False)
    cdef double out[3]
    with nogil:
        sk_three(first, second, n, out, parts)
    return out[0], out[1], out[2]


def rotated_sumsq(d, m, double wu, double wv, threads=1):
    """Blocked sum of squares of t = wu*d + wv*m, t in f64 and not rounded to f32."""
    cdef _Buffers held = _Buffers()
    cdef size_t n
    cdef int parts = check_threads(threads)
    cdef float *first = held.floats(d, "d", &n, False)
    cdef float *second = held.same(m, "m", n, False)
    cdef double total
    with nogil:
        total = sk_rotated_sumsq(first, second, wu, wv, n, parts)
    return total


# ------------------------------------------------------------------ element-wise

def accumulate(out, g, double k, threads=1):
    """out += f32(k) * g: f32 multiply, then f32 add."""
    cdef _Buffers held = _Buffers()
    cdef size_t n
    cdef int parts = check_threads(threads)
    cdef float *target = held.floats(out, "out", &n, True)
    cdef float *source = held.same(g, "g", n, False)
    with nogil:
        sk_accumulate(target, source, <float>k, n, parts)


def accumulate_first(out, g, double k, threads=1):
    """out = +0 + f32(k) * g: the first `accumulate`, without reading out."""
    cdef _Buffers held = _Buffers()
    cdef size_t n
    cdef int parts = check_threads(threads)
    cdef float *target = held.floats(out, "out", &n, True)
    cdef float *source = held.same(g, "g", n, False)
    with nogil:
        sk_first(target, source, <float>k, n, parts)


def scale(out, double k, threads=1):
    """out *= f32(k)."""
    cdef _Buffers held = _Buffers()
    cdef size_t n
    cdef int parts = check_threads(threads)
    cdef float *target = held.floats(out, "out", &n, True)
    with nogil:
        sk_scale(target, <float>k, n, parts)


def axpby_blend(theta, anchor, double alpha, threads=1):
    """theta = f32(alpha) * theta + f32(1 - alpha) * anchor."""
    cdef _Buffers held = _Buffers()
    cdef size_t n
    cdef int parts = check_threads(threads)
    cdef float *target = held.floats(theta, "theta", &n, True)
    cdef float *source = held.same(anchor, "anchor", n, False)
    with nogil:
        sk_blend(target, source, <float>alpha, <float>(1.0 - alpha), n, parts)


def shrink(out, d, m, double q, threads=1):
    """out = d + f32(q) * m; out may be d or m."""
    cdef _Buffers held = _Buffers()
    cdef size_t n
    cdef int parts = check_threads(threads)
    cdef float *target = held.floats(out, "out", &n, True)
    cdef float *first = held.same(d, "d", n, False)
    cdef float *second = held.same(m, "m", n, False)
    with nogil:
        sk_shrink(target, first, second, <float>q, n, parts)


def rotate(out, d, m, double wu, double wv, double s, threads=1):
    """out = f32(wu*d + wv*m in f64) * f32(s); out may be d or m."""
    cdef _Buffers held = _Buffers()
    cdef size_t n
    cdef int parts = check_threads(threads)
    cdef float *target = held.floats(out, "out", &n, True)
    cdef float *first = held.same(d, "d", n, False)
    cdef float *second = held.same(m, "m", n, False)
    with nogil:
        sk_rotate(target, first, second, wu, wv, <float>s, n, parts)


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


# ------------------------------------------------------------------ outer optimizers

cdef int64_t outer_step(int which, const sk_outer_scalars *scalars, _Buffers held, params, g,
                        out_params, states, out_states, threads) except? -2:
    cdef size_t n
    cdef int parts = check_threads(threads), i
    cdef sk_outer_arrays arrays
    cdef int64_t bad
    cdef float *gradient
    arrays.state[0] = arrays.state[1] = NULL
    arrays.state_out[0] = arrays.state_out[1] = NULL
    arrays.params = held.floats(params, "params", &n, False)
    gradient = held.same(g, "g", n, False)
    arrays.params_out = held.same(out_params, "out_params", n, True)
    names = ("momentum", "accumulator")
    for i in range(len(states)):
        arrays.state[i] = held.same(states[i], names[i], n, False)
        arrays.state_out[i] = held.same(out_states[i], f"out_{names[i]}", n, True)
    with nogil:
        bad = sk_outer_step(which, scalars, &arrays, gradient, n, parts)
    return bad


def nesterov(params, momentum, g, double lr, double mu, out_params, out_momentum, threads=1):
    """b = mu*b + g; p = p - lr*(g + mu*b), all f32; outputs may be the inputs.

    Returns the index of the first element whose new value is not finite, or -1."""
    cdef sk_outer_scalars scalars = [<float>lr, <float>mu, 1.0, 0.0]
    return outer_step(SK_OUTER_NESTEROV, &scalars, _Buffers(), params, g, out_params,
                      (momentum,), (out_momentum,), threads)


def sgd(params, g, double lr, out_params, threads=1):
    """p = p - lr*g in f32; out_params may be params. Returns like `nesterov`."""
    cdef sk_outer_scalars scalars = [<float>lr, 0.0, 1.0, 0.0]
    return outer_step(SK_OUTER_SGD, &scalars, _Buffers(), params, g, out_params, (), (), threads)


def delayed_nesterov(params, momentum, accumulator, g, double lr, double mu, int period, double c,
                     bint apply, out_params, out_momentum, out_accumulator, threads=1):
    """One commit of Delayed Nesterov; `apply` says that it is an N-th one. Returns like `nesterov`.

    The factor of the momentum is rounded to f32 once: (1 - c*N + c)*mu when applying, else c*mu."""
    cdef float mu32 = <float>mu
    cdef double factor = (1.0 - c * period + c) if apply else c
    cdef sk_outer_scalars scalars = [<float>lr, mu32, <float>period, <float>(factor * <double>mu32)]
    if period < 1 or not 0.0 <= c <= 1.0 / period:
        raise ValueError(f"period, c: expected period >= 1 and 0 <= c <= 1/period, "
                         f"found {period} and {c}")
    return outer_step(SK_OUTER_DELAYED_APPLY if apply else SK_OUTER_DELAYED_HOLD, &scalars,
                      _Buffers(), params, g, out_params, (momentum, accumulator),
                      (out_momentum, out_accumulator), threads)


include "_dispatch.pxi"
include "_pointers.pxi"
