/* Block sums with NEON: the 8 f64 lanes in four registers. Two blocks run side by side, because the
 * chains of additions of one would wait for themselves. */
#include "lanes_arm_neon.h"
#include "reduce_together.h"

/* ((a0+a4)+(a2+a6)) + ((a1+a5)+(a3+a7)) */
INLINE double fold(lanes a) {
    float64x2_t p = vaddq_f64(a.v[0], a.v[2]), q = vaddq_f64(a.v[1], a.v[3]);
    float64x2_t sum = vaddq_f64(p, q);
    return vgetq_lane_f64(sum, 0) + vgetq_lane_f64(sum, 1);
}

/* The last elements of a short block: lane j takes term j, others stay. */
static lanes finish(lanes a, const double *terms, size_t count) {
    double lane[SK_LANES];
    for (int i = 0; i < 4; i++) vst1q_f64(lane + 2 * i, a.v[i]);
    for (size_t j = 0; j < count; j++) lane[j] += terms[j];
    for (int i = 0; i < 4; i++) a.v[i] = vld1q_f64(lane + 2 * i);
    return a;
}

/* Not fused: one block is four chains of additions that wait for themselves, and a fused one waits
 * longer. */
static double block_dot(const float *x, const float *y, size_t n) {
    lanes a = all(0.0);
    size_t j = 0;
    for (; j + 8 <= n; j += 8) a = plus(a, product(widen(x + j), widen(y + j)));
    double terms[SK_LANES];
    for (size_t i = 0; i < n - j; i++) terms[i] = (double)x[j + i] * (double)y[j + i];
    return fold(j < n ? finish(a, terms, n - j) : a);
}

static void sumsq(const float *x, size_t n, double *sums) {
    for (; n >= 2 * SK_BLOCK; x += 2 * SK_BLOCK, n -= 2 * SK_BLOCK, sums += 2) {
        lanes a = all(0.0), b = a;
        for (size_t j = 0; j < SK_BLOCK; j += 8) {
            lanes u = widen(x + j), v = widen(x + SK_BLOCK + j);
            a = plus_exact(a, u, u);
            b = plus_exact(b, v, v);
        }
        sums[0] = fold(a);
        sums[1] = fold(b);
    }
    for (size_t block; n; x += block, n -= block, sums++) {
        block = n < SK_BLOCK ? n : SK_BLOCK;
        *sums = block_dot(x, x, block);
    }
}

static void dot(const float *x, const float *y, size_t n, double *sums) {
    for (; n >= 2 * SK_BLOCK; x += 2 * SK_BLOCK, y += 2 * SK_BLOCK, n -= 2 * SK_BLOCK, sums += 2) {
        lanes a = all(0.0), b = a;
        for (size_t j = 0; j < SK_BLOCK; j += 8) {
            a = plus_exact(a, widen(x + j), widen(y + j));
            b = plus_exact(b, widen(x + SK_BLOCK + j), widen(y + SK_BLOCK + j));
        }
        sums[0] = fold(a);
        sums[1] = fold(b);
    }
    for (size_t block; n; x += block, y += block, n -= block, sums++) {
        block = n < SK_BLOCK ? n : SK_BLOCK;
        *sums = block_dot(x, y, block);
    }
}

const sk_reduce_variant sk_reduce_neon = {"neon", SK_CPU_NEON, sumsq, dot, measure, rotated};
