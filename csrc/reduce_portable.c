/* Block sums as merge numerics define them: 8 f64 lanes inside blocks of 16,384 elements. */
#include "syncer_kernels_impl.h"

static inline size_t block_length(size_t n) { return n < SK_BLOCK ? n : SK_BLOCK; }

static void sumsq(const float *x, size_t n, double *sums) {
    for (; n; sums++) {
        size_t block = block_length(n);
        double lanes[SK_LANES] = {0};
        for (size_t j = 0; j < block; j++) lanes[j % SK_LANES] += (double)x[j] * (double)x[j];
        *sums = sk_fold_lanes(lanes);
        x += block, n -= block;
    }
}

static void dot(const float *x, const float *y, size_t n, double *sums) {
    for (; n; sums++) {
        size_t block = block_length(n);
        double lanes[SK_LANES] = {0};
        for (size_t j = 0; j < block; j++) lanes[j % SK_LANES] += (double)x[j] * (double)y[j];
        *sums = sk_fold_lanes(lanes);
        x += block, y += block, n -= block;
    }
}

static void three(const float *x, const float *y, size_t n, double *sums, size_t stride) {
    for (; n; sums++) {
        size_t block = block_length(n);
        double xx[SK_LANES] = {0}, xy[SK_LANES] = {0}, yy[SK_LANES] = {0};
        for (size_t j = 0; j < block; j++) {
            double a = x[j], b = y[j];
            xx[j % SK_LANES] += a * a;
            xy[j % SK_LANES] += a * b;
            yy[j % SK_LANES] += b * b;
        }
        sums[0] = sk_fold_lanes(xx);
        sums[stride] = sk_fold_lanes(xy);
        sums[2 * stride] = sk_fold_lanes(yy);
        x += block, y += block, n -= block;
    }
}

static void rotated(const float *d, const float *m, double wu, double wv, size_t n, double *sums) {
    for (; n; sums++) {
        size_t block = block_length(n);
        double lanes[SK_LANES] = {0};
        for (size_t j = 0; j < block; j++) {
            double t = wu * (double)d[j] + wv * (double)m[j];
            lanes[j % SK_LANES] += t * t;
        }
        *sums = sk_fold_lanes(lanes);
        d += block, m += block, n -= block;
    }
}

const sk_reduce_variant sk_reduce_portable = {"portable", 0, sumsq, dot, three, rotated};
