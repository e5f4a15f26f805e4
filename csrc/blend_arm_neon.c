/* Element-wise arithmetic with NEON: whole vectors here, ends through the portable definition.
 * Must not use vfma: a fused product has other bits. Streaming: see codec_arm_neon.c. */
#include "syncer_kernels_impl.h"

#include <arm_neon.h>

extern const sk_blend_variant sk_blend_portable;

#define LOAD(p) vld1q_f32(p)
#define STORE(p, v) vst1q_f32(p, v)
#define MUL(a, b) vmulq_f32(a, b)
#define ADD(a, b) vaddq_f32(a, b)
#define SUB(a, b) vsubq_f32(a, b)

static void accumulate(float *out, const float *g, float k, size_t n) {
    float32x4_t kk = vdupq_n_f32(k);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        float32x4_t a = ADD(LOAD(out + i), MUL(kk, LOAD(g + i)));
        float32x4_t b = ADD(LOAD(out + i + 4), MUL(kk, LOAD(g + i + 4)));
        STORE(out + i, a);
        STORE(out + i + 4, b);
    }
    sk_blend_portable.accumulate(out + i, g + i, k, n - i);
}

static void first(float *out, const float *g, float k, size_t n) {
    float32x4_t kk = vdupq_n_f32(k), zero = vdupq_n_f32(0.0f);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        STORE(out + i, ADD(zero, MUL(kk, LOAD(g + i))));
        STORE(out + i + 4, ADD(zero, MUL(kk, LOAD(g + i + 4))));
    }
    sk_blend_portable.first(out + i, g + i, k, n - i);
}

static void scale(float *out, float k, size_t n) {
    float32x4_t kk = vdupq_n_f32(k);
    size_t i = 0;
    for (; i + 4 <= n; i += 4) STORE(out + i, MUL(LOAD(out + i), kk));
    sk_blend_portable.scale(out + i, k, n - i);
}

static void blend(float *theta, const float *anchor, float a, float b, size_t n) {
    float32x4_t aa = vdupq_n_f32(a), bb = vdupq_n_f32(b);
    size_t i = 0;
    for (; i + 4 <= n; i += 4)
        STORE(theta + i, ADD(MUL(aa, LOAD(theta + i)), MUL(bb, LOAD(anchor + i))));
    sk_blend_portable.blend(theta + i, anchor + i, a, b, n - i);
}

static void shrink(float *out, const float *d, const float *m, float q, size_t n) {
    float32x4_t qq = vdupq_n_f32(q);
    size_t i = 0;
    for (; i + 4 <= n; i += 4) STORE(out + i, ADD(LOAD(d + i), MUL(qq, LOAD(m + i))));
    sk_blend_portable.shrink(out + i, d + i, m + i, q, n - i);
}

static inline float64x2_t mix(float64x2_t d, float64x2_t m, float64x2_t wu, float64x2_t wv) {
    return vaddq_f64(vmulq_f64(wu, d), vmulq_f64(wv, m));
}

static void rotate(float *out, const float *d, const float *m, double wu, double wv, float s,
                   size_t n) {
    float64x2_t u = vdupq_n_f64(wu), v = vdupq_n_f64(wv);
    float32x4_t ss = vdupq_n_f32(s);
    size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        float32x4_t dd = LOAD(d + i), mm = LOAD(m + i);
        float64x2_t low = mix(vcvt_f64_f32(vget_low_f32(dd)), vcvt_f64_f32(vget_low_f32(mm)), u, v);
        float64x2_t high = mix(vcvt_high_f64_f32(dd), vcvt_high_f64_f32(mm), u, v);
        STORE(out + i, MUL(vcvt_high_f32_f64(vcvt_f32_f64(low), high), ss));
    }
    sk_blend_portable.rotate(out + i, d + i, m + i, wu, wv, s, n - i);
}

/* ------------------------------------------------------------------ finite scan and outer steps */

static inline uint32x4_t magnitude(float32x4_t x) {
    return vandq_u32(vreinterpretq_u32_f32(x), vdupq_n_u32(SK_ABS));
}

static inline int above_finite(uint32x4_t max_abs) { return vmaxvq_u32(max_abs) > SK_FINITE_MAX; }

static size_t scan(const float *x, size_t n) {
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        uint32x4_t a = vmaxq_u32(magnitude(LOAD(x + i)), magnitude(LOAD(x + i + 4)));
        uint32x4_t b = vmaxq_u32(magnitude(LOAD(x + i + 8)), magnitude(LOAD(x + i + 12)));
        if (above_finite(vmaxq_u32(a, b))) break;
    }
    return i + sk_blend_portable.scan(x + i, n - i);
}

/* One vector of an outer step; returns the largest magnitude it wrote. */
typedef uint32x4_t (*step_fn)(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at,
                              float32x4_t g);
#define STEP static inline __attribute__((always_inline)) uint32x4_t

STEP step_nesterov(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at, float32x4_t g) {
    float32x4_t mu = vdupq_n_f32(o->mu), lr = vdupq_n_f32(o->lr);
    float32x4_t b = ADD(MUL(mu, LOAD(a->state[0] + at)), g);
    float32x4_t p = SUB(LOAD(a->params + at), MUL(lr, ADD(g, MUL(mu, b))));
    STORE(a->state_out[0] + at, b);
    STORE(a->params_out + at, p);
    return vmaxq_u32(magnitude(b), magnitude(p));
}

STEP step_sgd(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at, float32x4_t g) {
    float32x4_t p = SUB(LOAD(a->params + at), MUL(vdupq_n_f32(o->lr), g));
    STORE(a->params_out + at, p);
    return magnitude(p);
}

static inline float32x4_t delayed_params(const sk_outer_scalars *o, const sk_outer_arrays *a,
                                         size_t at, float32x4_t g, float32x4_t b) {
    float32x4_t step = ADD(MUL(vdupq_n_f32(o->k), b), vdivq_f32(g, vdupq_n_f32(o->period)));
    return SUB(LOAD(a->params + at), MUL(vdupq_n_f32(o->lr), step));
}

STEP step_hold(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at, float32x4_t g) {
    float32x4_t b = LOAD(a->state[0] + at), sum = ADD(LOAD(a->state[1] + at), g);
    float32x4_t p = delayed_params(o, a, at, g, b);
    STORE(a->state_out[0] + at, b);
    STORE(a->state_out[1] + at, sum);
    STORE(a->params_out + at, p);
    return vmaxq_u32(vmaxq_u32(magnitude(b), magnitude(sum)), magnitude(p));
}

STEP step_apply(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at, float32x4_t g) {
    float32x4_t sum = ADD(LOAD(a->state[1] + at), g);
    float32x4_t b = ADD(MUL(vdupq_n_f32(o->mu), LOAD(a->state[0] + at)),
                        vdivq_f32(sum, vdupq_n_f32(o->period)));
    float32x4_t p = delayed_params(o, a, at, g, b);
    STORE(a->state_out[0] + at, b);
    STORE(a->state_out[1] + at, vdupq_n_f32(0.0f));
    STORE(a->params_out + at, p);
    return vmaxq_u32(magnitude(b), magnitude(p));
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

static inline __attribute__((always_inline)) size_t outer(enum sk_outer which, step_fn step,
                                                          int states, const sk_outer_scalars *o,
                                                          const sk_outer_arrays *a, size_t at,
                                                          const float *g, size_t n) {
    size_t bad = n, i = 0;
    const sk_outer_arrays arrays = *a; /* a local copy cannot alias the stores */
    const sk_outer_scalars scalars = *o;
    for (size_t length; (length = (n - i < PIECE ? n - i : PIECE) & ~(size_t)3); i += length) {
        uint32x4_t max = vdupq_n_u32(0);
        for (size_t j = i; j < i + length; j += 4)
            max = vmaxq_u32(max, step(&scalars, &arrays, at + j, LOAD(g + j)));
        if (bad == n && vmaxvq_u32(max) > scalars.most)
            bad = i + first_bad(a, states, at + i, length, scalars.most);
    }
    size_t found = sk_blend_portable.outer[which](o, a, at + i, g + i, n - i, 0);
    return found < n - i && bad == n ? i + found : bad;
}

static size_t nesterov(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at,
                       const float *g, size_t n, int stream) {
    (void)stream;
    return outer(SK_OUTER_NESTEROV, step_nesterov, 1, o, a, at, g, n);
}

static size_t sgd(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at, const float *g,
                  size_t n, int stream) {
    (void)stream;
    return outer(SK_OUTER_SGD, step_sgd, 0, o, a, at, g, n);
}

static size_t delayed_hold(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at,
                           const float *g, size_t n, int stream) {
    (void)stream;
    return outer(SK_OUTER_DELAYED_HOLD, step_hold, 2, o, a, at, g, n);
}

static size_t delayed_apply(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at,
                            const float *g, size_t n, int stream) {
    (void)stream;
    return outer(SK_OUTER_DELAYED_APPLY, step_apply, 2, o, a, at, g, n);
}

// clang-format off: one line for the kernels, one for each optimizer
const sk_blend_variant sk_blend_neon = {
    "neon", SK_CPU_NEON, accumulate, first, scale, blend, shrink, rotate, scan,
    {[SK_OUTER_NESTEROV] = nesterov,
     [SK_OUTER_SGD] = sgd,
     [SK_OUTER_DELAYED_HOLD] = delayed_hold,
     [SK_OUTER_DELAYED_APPLY] = delayed_apply}};
// clang-format on
