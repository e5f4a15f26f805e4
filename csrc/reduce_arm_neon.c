/* Block sums with NEON: the 8 f64 lanes in four registers. Two blocks run side by side, because the
 * chains of additions of one would wait for themselves. */
#include "lanes_arm_neon.h"

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

/* ------------------------------------------------------------------ several gradients at once */

/* The sums of one gradient are in registers for a chunk, and in the cache while others have theirs:
 * 32 registers do not hold eight of each of several. */
static void measure_some(const sk_term *terms, size_t count, const float *m, size_t at, size_t n,
                         double *sums, size_t stride, int first) {
    double cc[TOGETHER][SK_LANES] = {{0}}, cm[TOGETHER][SK_LANES] = {{0}}, left[SK_LANES];
    double wide[CHUNK];
    float buffer[CHUNK];
    lanes mm = all(0.0);
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
            const lanes us = all(terms[l].wu), vs = all(terms[l].wv);
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

const sk_reduce_variant sk_reduce_neon = {"neon", SK_CPU_NEON, sumsq, dot, measure, rotated};
