/* Block sums with AVX2: lanes 0..3 in one register, 4..7 in another. Four blocks run side by side,
 * because one chain of additions waits for itself: one block 29, two 58, four 90 GB/s in cache. */
#include "lanes_x86_avx2.h"
#include "reduce_together.h"

/* ((a0+a4)+(a2+a6)) + ((a1+a5)+(a3+a7)) */
static inline double fold(lanes a) {
    __m256d pairs = _mm256_add_pd(a.low, a.high); /* a0+a4, a1+a5, a2+a6, a3+a7 */
    __m128d halves = _mm_add_pd(_mm256_castpd256_pd128(pairs), _mm256_extractf128_pd(pairs, 1));
    return _mm_cvtsd_f64(_mm_add_sd(halves, _mm_unpackhi_pd(halves, halves)));
}

/* The last elements of a short block: lane j takes element j, others stay. */
static inline lanes finish(lanes a, const double *terms, size_t count) {
    double lane[SK_LANES];
    _mm256_storeu_pd(lane, a.low);
    _mm256_storeu_pd(lane + 4, a.high);
    for (size_t j = 0; j < count; j++) lane[j] += terms[j];
    lanes r = {_mm256_loadu_pd(lane), _mm256_loadu_pd(lane + 4)};
    return r;
}

/* Not fused: two chains of additions wait for each other, and a fused one takes a cycle longer. */
static inline lanes block_dot(const float *x, const float *y, size_t n) {
    lanes a = all(0.0);
    size_t j = 0;
    for (; j + 8 <= n; j += 8) a = plus(a, product(widen(x + j), widen(y + j)));
    if (j == n) return a;
    double terms[SK_LANES];
    for (size_t i = 0; i < n - j; i++) terms[i] = (double)x[j + i] * (double)y[j + i];
    return finish(a, terms, n - j);
}

#define SIDE_BY_SIDE 4

FMA static void sumsq(const float *x, size_t n, double *sums) {
    const size_t many = SIDE_BY_SIDE * SK_BLOCK;
    for (; n >= many; x += many, n -= many, sums += SIDE_BY_SIDE) {
        lanes a[SIDE_BY_SIDE];
        for (int k = 0; k < SIDE_BY_SIDE; k++) a[k] = all(0.0);
        for (size_t j = 0; j < SK_BLOCK; j += 8)
            for (int k = 0; k < SIDE_BY_SIDE; k++) {
                lanes u = widen(x + (size_t)k * SK_BLOCK + j);
                a[k] = plus_exact(a[k], u, u);
            }
        for (int k = 0; k < SIDE_BY_SIDE; k++) sums[k] = fold(a[k]);
    }
    for (size_t block; n; x += block, n -= block, sums++) {
        block = n < SK_BLOCK ? n : SK_BLOCK;
        *sums = fold(block_dot(x, x, block));
    }
}

FMA static void dot(const float *x, const float *y, size_t n, double *sums) {
    const size_t many = SIDE_BY_SIDE * SK_BLOCK;
    for (; n >= many; x += many, y += many, n -= many, sums += SIDE_BY_SIDE) {
        lanes a[SIDE_BY_SIDE];
        for (int k = 0; k < SIDE_BY_SIDE; k++) a[k] = all(0.0);
        for (size_t j = 0; j < SK_BLOCK; j += 8)
            for (int k = 0; k < SIDE_BY_SIDE; k++) {
                size_t at = (size_t)k * SK_BLOCK + j;
                a[k] = plus_exact(a[k], widen(x + at), widen(y + at));
            }
        for (int k = 0; k < SIDE_BY_SIDE; k++) sums[k] = fold(a[k]);
    }
    for (size_t block; n; x += block, y += block, n -= block, sums++) {
        block = n < SK_BLOCK ? n : SK_BLOCK;
        *sums = fold(block_dot(x, y, block));
    }
}

const sk_reduce_variant sk_reduce_avx2 = {"avx2", SK_CPU_AVX2, sumsq, dot, measure, rotated};
