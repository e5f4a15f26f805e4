/* Block sums with NEON: the 8 f64 lanes in four registers. Two blocks run side by side, because the
 * chains of additions of one would wait for themselves. */
#include "syncer_kernels_impl.h"

#include <arm_neon.h>

typedef struct {
    float64x2_t v[4]; /* lanes 0 1, 2 3, 4 5, 6 7 */
} lanes;

#define INLINE static inline __attribute__((always_inline))

INLINE lanes widen(const float *x) {
    float32x4_t low = vld1q_f32(x), high = vld1q_f32(x + 4);
    lanes r = {{vcvt_f64_f32(vget_low_f32(low)), vcvt_high_f64_f32(low),
                vcvt_f64_f32(vget_low_f32(high)), vcvt_high_f64_f32(high)}};
    return r;
}

INLINE lanes product(lanes x, lanes y) {
    lanes r;
    for (int i = 0; i < 4; i++) r.v[i] = vmulq_f64(x.v[i], y.v[i]);
    return r;
}

/* a + x*y, fused: the product of two f32 is exact in f64, so that a fused sum has the same bits. */
INLINE lanes plus_exact(lanes a, lanes x, lanes y) {
    lanes r;
    for (int i = 0; i < 4; i++) r.v[i] = vfmaq_f64(a.v[i], x.v[i], y.v[i]);
    return r;
}

INLINE lanes plus(lanes x, lanes y) {
    lanes r;
    for (int i = 0; i < 4; i++) r.v[i] = vaddq_f64(x.v[i], y.v[i]);
    return r;
}

INLINE lanes all(double value) {
    lanes r;
    for (int i = 0; i < 4; i++) r.v[i] = vdupq_n_f64(value);
    return r;
}

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

static void three(const float *x, const float *y, size_t n, double *sums, size_t stride) {
    for (size_t block; n; x += block, y += block, n -= block, sums++) {
        block = n < SK_BLOCK ? n : SK_BLOCK;
        lanes xx = all(0.0), xy = xx, yy = xx;
        size_t j = 0;
        for (; j + 8 <= block; j += 8) {
            lanes u = widen(x + j), v = widen(y + j);
            xx = plus_exact(xx, u, u);
            xy = plus_exact(xy, u, v);
            yy = plus_exact(yy, v, v);
        }
        if (j < block) {
            double t[3][SK_LANES];
            for (size_t i = 0; i < block - j; i++) {
                double a = x[j + i], b = y[j + i];
                t[0][i] = a * a, t[1][i] = a * b, t[2][i] = b * b;
            }
            xx = finish(xx, t[0], block - j);
            xy = finish(xy, t[1], block - j);
            yy = finish(yy, t[2], block - j);
        }
        sums[0] = fold(xx);
        sums[stride] = fold(xy);
        sums[2 * stride] = fold(yy);
    }
}

static void rotated(const float *d, const float *m, double wu, double wv, size_t n, double *sums) {
    const lanes us = all(wu), vs = all(wv);
    for (size_t block; n; d += block, m += block, n -= block, sums++) {
        block = n < SK_BLOCK ? n : SK_BLOCK;
        lanes a = all(0.0);
        size_t j = 0;
        for (; j + 8 <= block; j += 8) {
            lanes t = plus(product(us, widen(d + j)), product(vs, widen(m + j)));
            a = plus(a, product(t, t));
        }
        double terms[SK_LANES];
        for (size_t i = 0; i < block - j; i++) {
            double t = wu * (double)d[j + i] + wv * (double)m[j + i];
            terms[i] = t * t;
        }
        *sums = fold(j < block ? finish(a, terms, block - j) : a);
    }
}

const sk_reduce_variant sk_reduce_neon = {"neon", SK_CPU_NEON, sumsq, dot, three, rotated};
