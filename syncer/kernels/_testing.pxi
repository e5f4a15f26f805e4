# Part of _native.pyx: faces of kernels that no product path calls over whole arrays (csrc/arrays.c
# says why they are there). Tests and benchmarks take them from syncer.kernels.testing.

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


def norm(x, threads=1):
    """Euclidean norm: the root of `sumsq`."""
    return sqrt(sumsq(x, threads))


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


def accumulate(out, g, double k, threads=1):
    """out += f32(k) * g: f32 multiply, then f32 add."""
    cdef _Buffers held = _Buffers()
    cdef size_t n
    cdef int parts = check_threads(threads)
    cdef float *target = held.floats(out, "out", &n, True)
    cdef float *source = held.same(g, "g", n, False)
    with nogil:
        sk_accumulate(target, source, sk_float_of(k), n, parts)


def accumulate_first(out, g, double k, threads=1):
    """out = +0 + f32(k) * g: the first `accumulate`, without reading out."""
    cdef _Buffers held = _Buffers()
    cdef size_t n
    cdef int parts = check_threads(threads)
    cdef float *target = held.floats(out, "out", &n, True)
    cdef float *source = held.same(g, "g", n, False)
    with nogil:
        sk_first(target, source, sk_float_of(k), n, parts)


def scale(out, double k, threads=1):
    """out *= f32(k)."""
    cdef _Buffers held = _Buffers()
    cdef size_t n
    cdef int parts = check_threads(threads)
    cdef float *target = held.floats(out, "out", &n, True)
    with nogil:
        sk_scale(target, sk_float_of(k), n, parts)


def shrink(out, d, m, double q, threads=1):
    """out = d + f32(q) * m; out may be d or m."""
    cdef _Buffers held = _Buffers()
    cdef size_t n
    cdef int parts = check_threads(threads)
    cdef float *target = held.floats(out, "out", &n, True)
    cdef float *first = held.same(d, "d", n, False)
    cdef float *second = held.same(m, "m", n, False)
    with nogil:
        sk_shrink(target, first, second, sk_float_of(q), n, parts)


def rotate(out, d, m, double wu, double wv, double s, threads=1):
    """out = f32(wu*d + wv*m in f64) * f32(s); out may be d or m."""
    cdef _Buffers held = _Buffers()
    cdef size_t n
    cdef int parts = check_threads(threads)
    cdef float *target = held.floats(out, "out", &n, True)
    cdef float *first = held.same(d, "d", n, False)
    cdef float *second = held.same(m, "m", n, False)
    with nogil:
        sk_rotate(target, first, second, wu, wv, sk_float_of(s), n, parts)


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
    cdef sk_outer_scalars scalars = [sk_float_of(lr), sk_float_of(mu), 1.0, 0.0, SK_FINITE_MAX]
    return outer_step(SK_OUTER_NESTEROV, &scalars, _Buffers(), params, g, out_params,
                      (momentum,), (out_momentum,), threads)


def sgd(params, g, double lr, out_params, threads=1):
    """p = p - lr*g in f32; out_params may be params. Returns like `nesterov`."""
    cdef sk_outer_scalars scalars = [sk_float_of(lr), 0.0, 1.0, 0.0, SK_FINITE_MAX]
    return outer_step(SK_OUTER_SGD, &scalars, _Buffers(), params, g, out_params, (), (), threads)


def delayed_nesterov(params, momentum, accumulator, g, double lr, double mu, int period, double c,
                     bint apply, out_params, out_momentum, out_accumulator, threads=1):
    """One commit of Delayed Nesterov; `apply` says that it is an N-th one. Returns like `nesterov`.

    The factor of the momentum is rounded to f32 once: (1 - c*N + c)*mu when applying, else c*mu."""
    cdef float mu32 = sk_float_of(mu)
    cdef double factor = (1.0 - c * period + c) if apply else c
    cdef sk_outer_scalars scalars = [sk_float_of(lr), mu32, <float>period,
                                     sk_float_of(factor * <double>mu32), SK_FINITE_MAX]
    if period < 1 or not 0.0 <= c <= 1.0 / period:
        raise ValueError(f"period, c: expected period >= 1 and 0 <= c <= 1/period, "
                         f"found {period} and {c}")
    return outer_step(SK_OUTER_DELAYED_APPLY if apply else SK_OUTER_DELAYED_HOLD, &scalars,
                      _Buffers(), params, g, out_params, (momentum, accumulator),
                      (out_momentum, out_accumulator), threads)
