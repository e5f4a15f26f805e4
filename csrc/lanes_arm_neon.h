/* What blend and reduce share of NEON: the 8 f64 lanes of a blocked sum, and how several gradients are
 * walked together. Must not be included elsewhere. */
#ifndef SYNCER_LANES_ARM_NEON_H
#define SYNCER_LANES_ARM_NEON_H

#include "syncer_kernels_impl.h"

#include <arm_neon.h>

#define INLINE static inline __attribute__((always_inline))
#define FMA /* every one of these CPUs has it */

typedef struct {
    float64x2_t v[4]; /* lanes 0 1, 2 3, 4 5, 6 7 */
} lanes;

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

INLINE lanes load(const double *x) {
    lanes r;
    for (int i = 0; i < 4; i++) r.v[i] = vld1q_f64(x + 2 * i);
    return r;
}

INLINE void store(double *x, lanes a) {
    for (int i = 0; i < 4; i++) vst1q_f64(x + 2 * i, a.v[i]);
}

#define CHUNK 32   /* elements of one gradient before the next one's turn: two cache lines */
#define TOGETHER 8 /* gradients that are walked together: streams that a core prefetches well */

/* A chunk of one gradient, clipped if it has to be. */
INLINE const float *clipped(const sk_term *t, size_t at, float *buffer) {
    const float *d = t->d + at;
    if (__builtin_expect(t->clip == 1.0f, 1)) return d;
    for (size_t j = 0; j < CHUNK; j += 4)
        vst1q_f32(buffer + j, vmulq_n_f32(vld1q_f32(d + j), t->clip));
    return buffer;
}

#endif
