# Part of _native.pyx: the bodies behind _native.pxd, for other rooms. Nothing is checked here.

cdef int64_t decode_ptr(int dtype, const uint8_t *src, float *out, size_t n, bint negate,
                        int threads) noexcept nogil:
    return sk_decode(dtype, src, out, n, negate, threads)

cdef void encode_bf16_ptr(const float *src, uint8_t *out, size_t n, int threads) noexcept nogil:
    sk_encode_bf16(src, out, n, threads)

cdef void encode_range_ptr(int dtype, const float *src, size_t n, size_t begin, size_t end,
                           uint8_t *out, int threads) noexcept nogil:
    sk_encode_range(dtype, src, n, begin, end, out, threads)

cdef double sumsq_ptr(const float *x, size_t n, int threads) noexcept nogil:
    return sk_sumsq(x, n, threads)

cdef double dot_ptr(const float *x, const float *y, size_t n, int threads) noexcept nogil:
    return sk_dot(x, y, n, threads)

cdef void three_ptr(const float *x, const float *y, size_t n, double *out,
                    int threads) noexcept nogil:
    sk_three(x, y, n, out, threads)

cdef double rotated_sumsq_ptr(const float *d, const float *m, double wu, double wv, size_t n,
                              int threads) noexcept nogil:
    return sk_rotated_sumsq(d, m, wu, wv, n, threads)

cdef void accumulate_ptr(float *out, const float *g, float k, size_t n,
                         int threads) noexcept nogil:
    sk_accumulate(out, g, k, n, threads)

cdef void first_ptr(float *out, const float *g, float k, size_t n, int threads) noexcept nogil:
    sk_first(out, g, k, n, threads)

cdef void scale_ptr(float *out, float k, size_t n, int threads) noexcept nogil:
    sk_scale(out, k, n, threads)

cdef void blend_ptr(float *theta, const float *anchor, float a, float b, size_t n,
                    int threads) noexcept nogil:
    sk_blend(theta, anchor, a, b, n, threads)

cdef void shrink_ptr(float *out, const float *d, const float *m, float q, size_t n,
                     int threads) noexcept nogil:
    sk_shrink(out, d, m, q, n, threads)

cdef void rotate_ptr(float *out, const float *d, const float *m, double wu, double wv, float s,
                     size_t n, int threads) noexcept nogil:
    sk_rotate(out, d, m, wu, wv, s, n, threads)

cdef int64_t scan_ptr(const float *x, size_t n, int threads) noexcept nogil:
    return sk_scan(x, n, threads)

cdef int64_t outer_step_ptr(int outer, const sk_outer_scalars *scalars,
                            const sk_outer_arrays *arrays, const float *g, size_t n,
                            int threads) noexcept nogil:
    return sk_outer_step(outer, scalars, arrays, g, n, threads)

cdef void merge_fragment(sm_job *job) noexcept nogil:
    sm_merge(job)

cdef void fold_add(sm_job *job) noexcept nogil:
    sm_fold_add(job)

cdef void gradient_norms(sm_job *job, double *sums, double *norms) noexcept nogil:
    sm_norms(job, sums, norms)

cdef double fragment_total(const sm_plan *plan, const double *row) noexcept nogil:
    return sm_total(plan, row)
