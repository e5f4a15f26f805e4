/* Element-wise arithmetic with AVX2: whole vectors here, ends through the portable definition.
 * Must not use FMA: a fused product has other bits. */
#include "syncer_kernels_impl.h"

#include <immintrin.h>

extern const sk_blend_variant sk_blend_portable;

#define INLINE static inline __attribute__((always_inline))
#define LOAD(p) _mm256_loadu_ps(p)
#define STORE(p, v) _mm256_storeu_ps(p, v)
#define MUL(a, b) _mm256_mul_ps(a, b)
#define ADD(a, b) _mm256_add_ps(a, b)
#define SUB(a, b) _mm256_sub_ps(a, b)

static void accumulate(float *out, const float *g, float k, size_t n) {
    __m256 kk = _mm256_set1_ps(k);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) STORE(out + i, ADD(LOAD(out + i), MUL(kk, LOAD(g + i))));
    sk_blend_portable.accumulate(out + i, g + i, k, n - i);
}

static void first(float *out, const float *g, float k, size_t n) {
    __m256 kk = _mm256_set1_ps(k), zero = _mm256_setzero_ps();
    size_t i = 0;
    for (; i + 8 <= n; i += 8) STORE(out + i, ADD(zero, MUL(kk, LOAD(g + i))));
    sk_blend_portable.first(out + i, g + i, k, n - i);
}

static void scale(float *out, float k, size_t n) {
    __m256 kk = _mm256_set1_ps(k);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) STORE(out + i, MUL(LOAD(out + i), kk));
    sk_blend_portable.scale(out + i, k, n - i);
}

static void blend(float *theta, const float *anchor, float a, float b, size_t n) {
    __m256 aa = _mm256_set1_ps(a), bb = _mm256_set1_ps(b);
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        STORE(theta + i, ADD(MUL(aa, LOAD(theta + i)), MUL(bb, LOAD(anchor + i))));
    sk_blend_portable.blend(theta + i, anchor + i, a, b, n - i);
}

static void shrink(float *out, const float *d, const float *m, float q, size_t n) {
    __m256 qq = _mm256_set1_ps(q);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) STORE(out + i, ADD(LOAD(d + i), MUL(qq, LOAD(m + i))));
    sk_blend_portable.shrink(out + i, d + i, m + i, q, n - i);
}

static inline __m128 rotated(const float *d, const float *m, __m256d wu, __m256d wv) {
    __m256d u = _mm256_mul_pd(wu, _mm256_cvtps_pd(_mm_loadu_ps(d)));
    __m256d v = _mm256_mul_pd(wv, _mm256_cvtps_pd(_mm_loadu_ps(m)));
    return _mm256_cvtpd_ps(_mm256_add_pd(u, v));
}

static void rotate(float *out, const float *d, const float *m, double wu, double wv, float s,
                   size_t n) {
    __m256d u = _mm256_set1_pd(wu), v = _mm256_set1_pd(wv);
    __m128 ss = _mm_set1_ps(s);
    size_t i = 0;
    for (; i + 4 <= n; i += 4) _mm_storeu_ps(out + i, _mm_mul_ps(rotated(d + i, m + i, u, v), ss));
    sk_blend_portable.rotate(out + i, d + i, m + i, wu, wv, s, n - i);
}

/* ------------------------------------------------------------------ finite scan and outer steps */

static inline __m256i magnitude(__m256 x) {
    return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(SK_ABS));
}

static inline int above(__m256i max_abs, uint32_t most) {
    __m256i limit = _mm256_set1_epi32((int)most);
    return _mm256_movemask_epi8(_mm256_cmpgt_epi32(max_abs, limit)) != 0;
}

static size_t scan(const float *x, size_t n) {
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        __m256i a = _mm256_max_epu32(magnitude(LOAD(x + i)), magnitude(LOAD(x + i + 8)));
        __m256i b = _mm256_max_epu32(magnitude(LOAD(x + i + 16)), magnitude(LOAD(x + i + 24)));
        if (above(_mm256_max_epu32(a, b), SK_FINITE_MAX)) break;
    }
    return i + sk_blend_portable.scan(x + i, n - i);
}

static inline void put(float *out, __m256 v, int stream) {
    if (stream)
        _mm256_stream_ps(out, v);
    else
        STORE(out, v);
}

/* One vector of an outer step; returns the largest magnitude it wrote. */
typedef __m256i (*step_fn)(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at, __m256 g,
                           int stream);

INLINE __m256i step_nesterov(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at,
                             __m256 g, int stream) {
    __m256 mu = _mm256_set1_ps(o->mu), lr = _mm256_set1_ps(o->lr);
    __m256 b = ADD(MUL(mu, LOAD(a->state[0] + at)), g);
    __m256 p = SUB(LOAD(a->params + at), MUL(lr, ADD(g, MUL(mu, b))));
    put(a->state_out[0] + at, b, stream);
    put(a->params_out + at, p, stream);
    return _mm256_max_epu32(magnitude(b), magnitude(p));
}

INLINE __m256i step_sgd(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at, __m256 g,
                        int stream) {
    __m256 p = SUB(LOAD(a->params + at), MUL(_mm256_set1_ps(o->lr), g));
    put(a->params_out + at, p, stream);
    return magnitude(p);
}

static inline __m256 delayed_params(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at,
                                    __m256 g, __m256 b) {
    __m256 step = ADD(MUL(_mm256_set1_ps(o->k), b), _mm256_div_ps(g, _mm256_set1_ps(o->period)));
    return SUB(LOAD(a->params + at), MUL(_mm256_set1_ps(o->lr), step));
}

INLINE __m256i step_hold(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at, __m256 g,
                         int stream) {
    __m256 b = LOAD(a->state[0] + at), sum = ADD(LOAD(a->state[1] + at), g);
    __m256 p = delayed_params(o, a, at, g, b);
    put(a->state_out[0] + at, b, stream);
    put(a->state_out[1] + at, sum, stream);
    put(a->params_out + at, p, stream);
    return _mm256_max_epu32(_mm256_max_epu32(magnitude(b), magnitude(sum)), magnitude(p));
}

INLINE __m256i step_apply(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at, __m256 g,
                          int stream) {
    __m256 sum = ADD(LOAD(a->state[1] + at), g);
    __m256 b = ADD(MUL(_mm256_set1_ps(o->mu), LOAD(a->state[0] + at)),
                   _mm256_div_ps(sum, _mm256_set1_ps(o->period)));
    __m256 p = delayed_params(o, a, at, g, b);
    put(a->state_out[0] + at, b, stream);
    put(a->state_out[1] + at, _mm256_setzero_ps(), stream);
    put(a->params_out + at, p, stream);
    return _mm256_max_epu32(magnitude(b), magnitude(p));
}

#define PIECE 4096 /* elements between two looks at the running maximum */

static size_t first_bad(const sk_outer_arrays *a, int states, size_t at, size_t n, uint32_t most) {
    size_t lowest = n;
    for (int s = -1; s < states; s++) {
        const float *written = (s < 0 ? a->params_out : a->state_out[s]) + at;
        for (size_t i = 0; i < lowest; i++)
            if ((sk_bits(written[i]) & SK_ABS) > most) lowest = i;
    }
    return lowest;
}

INLINE int aligned(const sk_outer_arrays *a, int states, size_t at) {
    uintptr_t bits = (uintptr_t)(a->params_out + at);
    for (int s = 0; s < states; s++) bits |= (uintptr_t)(a->state_out[s] + at);
    return (bits & 31) == 0;
}

INLINE size_t outer(enum sk_outer which, step_fn step, int states, const sk_outer_scalars *o,
                    const sk_outer_arrays *a, size_t at, const float *g, size_t n, int stream) {
    size_t bad = n, i = 0;
    stream = stream && aligned(a, states, at);
    const sk_outer_arrays arrays = *a; /* a local copy cannot alias the stores */
    const sk_outer_scalars scalars = *o;
    for (size_t length; (length = (n - i < PIECE ? n - i : PIECE) & ~(size_t)7); i += length) {
        __m256i max = _mm256_setzero_si256();
        if (stream)
            for (size_t j = i; j < i + length; j += 8)
                max = _mm256_max_epu32(max, step(&scalars, &arrays, at + j, LOAD(g + j), 1));
        else
            for (size_t j = i; j < i + length; j += 8)
                max = _mm256_max_epu32(max, step(&scalars, &arrays, at + j, LOAD(g + j), 0));
        if (bad == n && above(max, scalars.most))
            bad = i + first_bad(a, states, at + i, length, scalars.most);
    }
    if (stream) _mm_sfence();
    size_t found = sk_blend_portable.outer[which](o, a, at + i, g + i, n - i, 0);
    return found < n - i && bad == n ? i + found : bad;
}

static size_t nesterov(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at,
                       const float *g, size_t n, int stream) {
    return outer(SK_OUTER_NESTEROV, step_nesterov, 1, o, a, at, g, n, stream);
}

static size_t sgd(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at, const float *g,
                  size_t n, int stream) {
    return outer(SK_OUTER_SGD, step_sgd, 0, o, a, at, g, n, stream);
}

static size_t delayed_hold(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at,
                           const float *g, size_t n, int stream) {
    return outer(SK_OUTER_DELAYED_HOLD, step_hold, 2, o, a, at, g, n, stream);
}

static size_t delayed_apply(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at,
                            const float *g, size_t n, int stream) {
    return outer(SK_OUTER_DELAYED_APPLY, step_apply, 2, o, a, at, g, n, stream);
}

// clang-format off: one line for the kernels, one for each optimizer
const sk_blend_variant sk_blend_avx2 = {
    "avx2", SK_CPU_AVX2, accumulate, first, scale, blend, shrink, rotate, scan,
    {[SK_OUTER_NESTEROV] = nesterov,
     [SK_OUTER_SGD] = sgd,
     [SK_OUTER_DELAYED_HOLD] = delayed_hold,
     [SK_OUTER_DELAYED_APPLY] = delayed_apply}};
// clang-format on
