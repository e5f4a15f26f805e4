/* Block sums with AVX2: lanes 0..3 in one register, 4..7 in another. Four blocks run side by side,
 * because one chain of additions waits for itself: one block 29, two 58, four 90 GB/s in cache. */
#include "lanes_x86_avx2.h"

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
    lanes a = zero();
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
        for (int k = 0; k < SIDE_BY_SIDE; k++) a[k] = zero();
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
        for (int k = 0; k < SIDE_BY_SIDE; k++) a[k] = zero();
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

/* ------------------------------------------------------------------ several gradients at once */

/* The sums of one gradient are in registers for a chunk, and in the cache while others have theirs:
 * 16 registers do not hold four of each of several. */
FMA static void measure_some(const sk_term *terms, size_t count, const float *m, size_t at,
                             size_t n, double *sums, size_t stride, int first) {
    double cc[TOGETHER][SK_LANES] = {{0}}, cm[TOGETHER][SK_LANES] = {{0}}, left[SK_LANES];
    double wide[CHUNK];
    float buffer[CHUNK];
    lanes mm = zero();
    size_t i = 0;
    for (; i + CHUNK <= n; i += CHUNK) {
        for (size_t j = 0; m != NULL && j < CHUNK; j += 8) {
            lanes v = widen(m + at + i + j);
            store(wide + j, v);
            if (first) mm = plus_exact(mm, v, v);
        }
        for (size_t l = 0; l < count; l++) {
            const float *d = clipped(&terms[l], at + i, buffer);
            lanes x = load(cc[l]), y = load(cm[l]);
            for (size_t j = 0; j < CHUNK; j += 8) {
                lanes u = widen(d + j);
                x = plus_exact(x, u, u);
                if (m != NULL) y = plus_exact(y, u, load(wide + j));
            }
            store(cc[l], x);
            store(cm[l], y);
        }
    }
    for (size_t l = 0; l < count; l++) {
        for (size_t j = i; j < n; j++) {
            double c = sk_clipped(&terms[l], at + j);
            cc[l][j % SK_LANES] += c * c;
            if (m != NULL) cm[l][j % SK_LANES] += c * (double)m[at + j];
        }
        sums[3 * l * stride] = sk_fold_lanes(cc[l]);
        if (m != NULL) sums[(3 * l + 1) * stride] = sk_fold_lanes(cm[l]);
    }
    if (m == NULL || !first) return;
    store(left, mm);
    for (size_t j = i; j < n; j++) left[j % SK_LANES] += (double)m[at + j] * (double)m[at + j];
    sums[2 * stride] = sk_fold_lanes(left);
}

static void measure(const sk_term *terms, size_t count, const float *m, size_t at, size_t n,
                    double *sums, size_t stride) {
    for (size_t l = 0, some; l < count; l += some) {
        some = count - l < TOGETHER ? count - l : TOGETHER;
        measure_some(terms + l, some, m, at, n, sums + 3 * l * stride, stride, l == 0);
    }
}

static void rotated_some(const sk_term *terms, size_t count, const float *m, size_t at, size_t n,
                         double *sums, size_t stride) {
    double squares[TOGETHER][SK_LANES] = {{0}}, wide[CHUNK];
    float buffer[CHUNK];
    size_t i = 0;
    for (; i + CHUNK <= n; i += CHUNK) {
        for (size_t j = 0; j < CHUNK; j += 8) store(wide + j, widen(m + at + i + j));
        for (size_t l = 0; l < count; l++) {
            if (terms[l].turn != SK_ROTATE) continue;
            const float *d = clipped(&terms[l], at + i, buffer);
            const __m256d u = _mm256_set1_pd(terms[l].wu), v = _mm256_set1_pd(terms[l].wv);
            const lanes us = {u, u}, vs = {v, v};
            lanes a = load(squares[l]);
            for (size_t j = 0; j < CHUNK; j += 8) {
                lanes t = plus(product(us, widen(d + j)), product(vs, load(wide + j)));
                a = plus(a, product(t, t));
            }
            store(squares[l], a);
        }
    }
    for (size_t l = 0; l < count; l++) {
        if (terms[l].turn != SK_ROTATE) continue;
        for (size_t j = i; j < n; j++) {
            double t = terms[l].wu * (double)sk_clipped(&terms[l], at + j) +
                       terms[l].wv * (double)m[at + j];
            squares[l][j % SK_LANES] += t * t;
        }
        sums[l * stride] = sk_fold_lanes(squares[l]);
    }
}

static void rotated(const sk_term *terms, size_t count, const float *m, size_t at, size_t n,
                    double *sums, size_t stride) {
    for (size_t l = 0, some; l < count; l += some) {
        some = count - l < TOGETHER ? count - l : TOGETHER;
        rotated_some(terms + l, some, m, at, n, sums + l * stride, stride);
    }
}

const sk_reduce_variant sk_reduce_avx2 = {"avx2", SK_CPU_AVX2, sumsq, dot, measure, rotated};
