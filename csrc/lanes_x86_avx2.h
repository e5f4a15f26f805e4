/* What blend and reduce share of AVX2: the 8 f64 lanes of a blocked sum, and how several gradients are
 * walked together. Must not be included elsewhere. */
#ifndef SYNCER_LANES_X86_AVX2_H
#define SYNCER_LANES_X86_AVX2_H

#include "syncer_kernels_impl.h"

#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))
#define FMA __attribute__((target("avx2,fma")))

typedef struct {
    __m256d low, high;
} lanes;

INLINE lanes widen(const float *x) { /* two half loads: no lane crossing, a third faster */
    lanes r = {_mm256_cvtps_pd(_mm_loadu_ps(x)), _mm256_cvtps_pd(_mm_loadu_ps(x + 4))};
    return r;
}

INLINE lanes product(lanes x, lanes y) {
    lanes r = {_mm256_mul_pd(x.low, y.low), _mm256_mul_pd(x.high, y.high)};
    return r;
}

/* a + x*y, fused: the product of two f32 is exact in f64, so that a fused sum has the same bits. */
FMA INLINE lanes plus_exact(lanes a, lanes x, lanes y) {
    lanes r = {_mm256_fmadd_pd(x.low, y.low, a.low), _mm256_fmadd_pd(x.high, y.high, a.high)};
    return r;
}

INLINE lanes plus(lanes x, lanes y) {
    lanes r = {_mm256_add_pd(x.low, y.low), _mm256_add_pd(x.high, y.high)};
    return r;
}

INLINE lanes all(double value) {
    lanes r = {_mm256_set1_pd(value), _mm256_set1_pd(value)};
    return r;
}

#define CHUNK 32   /* elements of one gradient before the next one's turn: two cache lines */
#define TOGETHER 8 /* gradients that are walked together: streams that a core prefetches well */

INLINE lanes load(const double *x) {
    lanes r = {_mm256_loadu_pd(x), _mm256_loadu_pd(x + 4)};
    return r;
}

INLINE void store(double *x, lanes v) {
    _mm256_storeu_pd(x, v.low);
    _mm256_storeu_pd(x + 4, v.high);
}

/* A chunk of one gradient, clipped if it has to be. */
INLINE const float *clipped(const sk_term *t, size_t at, float *buffer) {
    const float *d = t->d + at;
    if (__builtin_expect(t->clip == 1.0f, 1)) return d;
    __m256 clip = _mm256_set1_ps(t->clip);
    for (size_t j = 0; j < CHUNK; j += 8)
        _mm256_storeu_ps(buffer + j, _mm256_mul_ps(_mm256_loadu_ps(d + j), clip));
    return buffer;
}

#endif
