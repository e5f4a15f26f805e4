/* Element-wise arithmetic with NEON: whole vectors here, ends through the portable definition.
 * Must not fuse but where a square is added to a blocked sum: it is exact, other products are not.
 * Two vectors a turn: the latency of one hides behind the other. Streaming: see codec_arm_neon.c. */
#include "lanes_arm_neon.h"

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
    for (; i + 8 <= n; i += 8) {
        float32x4_t a = MUL(LOAD(out + i), kk), b = MUL(LOAD(out + i + 4), kk);
        STORE(out + i, a);
        STORE(out + i + 4, b);
    }
    sk_blend_portable.scale(out + i, k, n - i);
}

static void blend(float *theta, const float *anchor, float a, float b, size_t n) {
    float32x4_t aa = vdupq_n_f32(a), bb = vdupq_n_f32(b);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        float32x4_t u = ADD(MUL(aa, LOAD(theta + i)), MUL(bb, LOAD(anchor + i)));
        float32x4_t v = ADD(MUL(aa, LOAD(theta + i + 4)), MUL(bb, LOAD(anchor + i + 4)));
        STORE(theta + i, u);
        STORE(theta + i + 4, v);
    }
    sk_blend_portable.blend(theta + i, anchor + i, a, b, n - i);
}

static void shrink(float *out, const float *d, const float *m, float q, size_t n) {
    float32x4_t qq = vdupq_n_f32(q);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        float32x4_t u = ADD(LOAD(d + i), MUL(qq, LOAD(m + i)));
        float32x4_t v = ADD(LOAD(d + i + 4), MUL(qq, LOAD(m + i + 4)));
        STORE(out + i, u);
        STORE(out + i + 4, v);
    }
    sk_blend_portable.shrink(out + i, d + i, m + i, q, n - i);
}

/* Eight elements of a rotation before its scaling: both halves from one load each. */
INLINE void turned(const float *d, lanes m, lanes wu, lanes wv, float32x4_t *low,
                   float32x4_t *high) {
    lanes t = plus(product(wu, widen(d)), product(wv, m));
    *low = vcvt_high_f32_f64(vcvt_f32_f64(t.v[0]), t.v[1]);
    *high = vcvt_high_f32_f64(vcvt_f32_f64(t.v[2]), t.v[3]);
}

static void rotate(float *out, const float *d, const float *m, double wu, double wv, float s,
                   size_t n) {
    const lanes u = all(wu), v = all(wv);
    float32x4_t ss = vdupq_n_f32(s), low, high;
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        turned(d + i, widen(m + i), u, v, &low, &high);
        STORE(out + i, MUL(low, ss));
        STORE(out + i + 4, MUL(high, ss));
    }
    sk_blend_portable.rotate(out + i, d + i, m + i, wu, wv, s, n - i);
}

/* ------------------------------------------------------------------ several gradients at once */

#define VECTORS (CHUNK / 4)
#define EACH_VECTOR _Pragma("GCC unroll 8") for (int j = 0; j < VECTORS; j++)
#define EACH_PAIR _Pragma("GCC unroll 4") for (int j = 0; j < VECTORS; j += 2)

INLINE lanes plus_square(lanes sum, float32x4_t low, float32x4_t high) {
    lanes x = {{vcvt_f64_f32(vget_low_f32(low)), vcvt_high_f64_f32(low),
                vcvt_f64_f32(vget_low_f32(high)), vcvt_high_f64_f32(high)}};
    return plus_exact(sum, x, x);
}

/* A chunk of m, widened once for all gradients that rotate. */
INLINE void widen_chunk(const float *m, double *wide) {
    for (int j = 0; j < CHUNK; j += 8) store(wide + j, widen(m + j));
}

/* A chunk of one corrected gradient. */
INLINE void corrected(const sk_term *t, const float *m, const double *wide, size_t at,
                      float32x4_t *x) {
    float buffer[CHUNK];
    const float *d = clipped(t, at, buffer);
    if (t->turn == SK_KEEP) {
        EACH_VECTOR x[j] = LOAD(d + 4 * j);
    } else if (t->turn == SK_SHRINK) {
        float32x4_t q = vdupq_n_f32(t->q);
        EACH_VECTOR x[j] = ADD(LOAD(d + 4 * j), MUL(q, LOAD(m + at + 4 * j)));
    } else {
        const lanes wu = all(t->wu), wv = all(t->wv);
        float32x4_t q = vdupq_n_f32(t->q);
        EACH_PAIR {
            turned(d + 4 * j, load(wide + 4 * j), wu, wv, &x[j], &x[j + 1]);
            x[j] = MUL(x[j], q);
            x[j + 1] = MUL(x[j + 1], q);
        }
    }
}

static void combine(const sk_term *terms, size_t count, const float *m, size_t at, size_t n,
                    float *out, int stream, double *sums) {
    (void)stream;
    const int rotates = sk_any_rotates(terms, count);
    double wide[CHUNK] = {0};
    lanes squares = load(sums);
    size_t i = 0;
    for (; i + CHUNK <= n; i += CHUNK) {
        float32x4_t sum[VECTORS], x[VECTORS];
        EACH_VECTOR sum[j] = vdupq_n_f32(0.0f);
        if (rotates) widen_chunk(m + at + i, wide);
        for (size_t l = 0; l < count; l++) {
            float32x4_t k = vdupq_n_f32(terms[l].k);
            corrected(&terms[l], m, wide, at + i, x);
            EACH_VECTOR sum[j] = ADD(sum[j], MUL(k, x[j]));
        }
        EACH_VECTOR STORE(out + i + 4 * j, sum[j]);
        EACH_PAIR squares = plus_square(squares, sum[j], sum[j + 1]);
    }
    store(sums, squares);
    if (i < n)
        sk_combine_by_parts(&sk_blend_portable, terms, count, m, at + i, n - i, out + i, sums);
}

static void scaled(float *out, const float *x, float k, size_t n, double *sums) {
    float32x4_t kk = vdupq_n_f32(k);
    lanes squares = load(sums);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        float32x4_t low = MUL(LOAD(x + i), kk), high = MUL(LOAD(x + i + 4), kk);
        STORE(out + i, low);
        STORE(out + i + 4, high);
        squares = plus_square(squares, low, high);
    }
    store(sums, squares);
    sk_blend_portable.scaled(out + i, x + i, k, n - i, sums);
}

static void lengths(const sk_term *terms, size_t count, const float *m, size_t at, size_t n,
                    double *sums, size_t stride) {
    const size_t whole = n - n % CHUNK;
    for (size_t first = 0, some; first < count; first += some) {
        const sk_term *t = terms + first;
        some = count - first < TOGETHER ? count - first : TOGETHER;
        const int rotates = sk_any_rotates(t, some);
        double wide[CHUNK] = {0}, squares[TOGETHER][SK_LANES] = {{0}};
        for (size_t i = 0; i < whole; i += CHUNK) {
            if (rotates) widen_chunk(m + at + i, wide);
            for (size_t l = 0; l < some; l++) {
                float32x4_t x[VECTORS];
                if (t[l].turn == SK_KEEP) continue;
                lanes a = load(squares[l]);
                corrected(&t[l], m, wide, at + i, x);
                EACH_PAIR a = plus_square(a, x[j], x[j + 1]);
                store(squares[l], a);
            }
        }
        for (size_t l = 0; l < some; l++) {
            if (t[l].turn == SK_KEEP) continue;
            if (whole < n)
                sk_length_by_parts(&sk_blend_portable, &t[l], m, at + whole, n - whole, squares[l]);
            sums[(first + l) * stride] = sk_fold_lanes(squares[l]);
        }
    }
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
    for (size_t length; (length = (n - i < PIECE ? n - i : PIECE) & ~(size_t)7); i += length) {
        uint32x4_t max = vdupq_n_u32(0), other = max;
        for (size_t j = i; j < i + length; j += 8) {
            max = vmaxq_u32(max, step(&scalars, &arrays, at + j, LOAD(g + j)));
            other = vmaxq_u32(other, step(&scalars, &arrays, at + j + 4, LOAD(g + j + 4)));
        }
        max = vmaxq_u32(max, other);
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
    "neon", SK_CPU_NEON, accumulate, first, scale, blend, shrink, rotate,
    combine, scaled, lengths, scan,
    {[SK_OUTER_NESTEROV] = nesterov,
     [SK_OUTER_SGD] = sgd,
     [SK_OUTER_DELAYED_HOLD] = delayed_hold,
     [SK_OUTER_DELAYED_APPLY] = delayed_apply}};
// clang-format on
