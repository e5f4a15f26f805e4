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

static void measure(const sk_term *terms, size_t count, const float *m, size_t at, size_t n,
                    double *sums, size_t stride) {
    if (m != NULL) sumsq(m + at, n, sums + 2 * stride);
    for (size_t i = 0; i < count; i++, sums += 3 * stride) {
        double cc[SK_LANES] = {0}, cm[SK_LANES] = {0};
        for (size_t j = 0; j < n; j++) {
            double c = sk_clipped(&terms[i], at + j), b = m != NULL ? m[at + j] : 0.0;
            cc[j % SK_LANES] += c * c;
            cm[j % SK_LANES] += c * b;
        }
        sums[0] = sk_fold_lanes(cc);
        if (m != NULL) sums[stride] = sk_fold_lanes(cm);
    }
}

static void rotated(const sk_term *terms, size_t count, const float *m, size_t at, size_t n,
                    double *sums, size_t stride) {
    for (size_t i = 0; i < count; i++) {
        const sk_term *term = &terms[i];
        double lanes[SK_LANES] = {0};
        if (term->turn != SK_ROTATE) continue;
        for (size_t j = 0; j < n; j++) {
            double t = term->wu * (double)sk_clipped(term, at + j) + term->wv * (double)m[at + j];
            lanes[j % SK_LANES] += t * t;
        }
        sums[i * stride] = sk_fold_lanes(lanes);
    }
}

const sk_reduce_variant sk_reduce_portable = {"portable", 0, sumsq, dot, measure, rotated};
