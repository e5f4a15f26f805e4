/* Inside of the kernels: what a variant is made of, and the table through which all are called.
 *
 * Must not be included outside csrc: callers know syncer_kernels.h and syncer_merge.h alone. The
 * prefix sk_ stands for "syncer kernel" here as there.
 *
 * Every variant returns n from a scan in which all elements are good, works on one thread, and is
 * called through sk_active only.
 */
#ifndef SYNCER_KERNELS_IMPL_H
#define SYNCER_KERNELS_IMPL_H

#include "syncer_kernels.h"

#include <float.h>
#include <string.h>

/* What a compiler was told that changes bits, and setup.py could not take back. */
#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "syncer computes with subnormals, signed zeros and infinities: no -ffast-math"
#endif
#if FLT_EVAL_METHOD != 0
#error "syncer rounds every operation to its type: no extended precision (-mfpmath=387)"
#endif
_Static_assert(sizeof(1.0) == sizeof(double), "no -fsingle-precision-constant");

#define SK_LANES 8 /* f64 lanes inside a block of the blocked sum */
#define SK_SIGN 0x80000000u
#define SK_ABS 0x7FFFFFFFu

/* ------------------------------------------------------------------ variant tables */

typedef struct {
    const char *name;
    unsigned needs; /* CPU bits without which the functions must not be called */
    void (*compress)(uint32_t state[8], const uint8_t *data, size_t blocks);
    /* Two independent streams advanced together by `blocks` blocks of 64 bytes each. */
    void (*compress2)(uint32_t a[8], const uint8_t *data_a, uint32_t b[8], const uint8_t *data_b,
                      size_t blocks);
} sk_sha256_variant;

/* `flip` is XORed into every decoded element: SK_SIGN negates, 0 does not.
 * `stream` asks for stores that bypass the cache, for outputs far larger than it. */
typedef struct {
    const char *name;
    unsigned needs;
    size_t (*decode_f32)(const uint8_t *src, float *out, size_t n, uint32_t flip, int stream);
    size_t (*decode_bf16)(const uint8_t *src, float *out, size_t n, uint32_t flip, int stream);
    /* src: ceil(n/256) blocks; a scale not finite or < 0 is bad at its block's first index */
    size_t (*decode_q4)(const uint8_t *src, float *out, size_t n, uint32_t flip, int stream);
    void (*encode_bf16)(const float *src, uint8_t *out, size_t n, int stream);
    /* out: ceil(n/256) blocks; a block with a NaN gets the scale 0x7FC00000 */
    void (*encode_q4)(const float *src, uint8_t *out, size_t n);
    /* out = bf16(base + q4), base in bf16; returns the first index where that is not finite. NULL: the
     * other functions do it, one after the other (changes.c) */
    size_t (*apply_bf16)(const uint8_t *base, const uint8_t *change, uint8_t *out, size_t n);
} sk_codec_variant;

/* Elements [at, at+n) of all arrays; g points at element `at`. Returns the first index of the range
 * (0 = element `at`) where a written value is above scalars->most, or n. */
typedef size_t (*sk_outer_fn)(const sk_outer_scalars *scalars, const sk_outer_arrays *arrays,
                              size_t at, const float *g, size_t n, int stream);

typedef struct {
    const char *name;
    unsigned needs;
    void (*accumulate)(float *out, const float *g, float k, size_t n); /* out = out + k*g */
    void (*first)(float *out, const float *g, float k, size_t n);      /* +0 + k*g, in place */
    void (*scale)(float *out, float k, size_t n);                      /* out = out * k */
    /* theta = a*theta + b*anchor */
    void (*blend)(float *theta, const float *anchor, float a, float b, size_t n);
    /* out = d + q*m, in place */
    void (*shrink)(float *out, const float *d, const float *m, float q, size_t n);
    /* out = (f32)(wu*d + wv*m in f64) * s, in place */
    void (*rotate)(float *out, const float *d, const float *m, double wu, double wv, float s,
                   size_t n);
    /* Sum of k * corrected over the terms from +0, left to right, for [at, at+n), to out[0 .. n); its
     * squares are added to the lanes of a blocked sum, so n is a multiple of SK_LANES but at the end
     * of a block. m may be NULL if nothing is turned. `stream` as below. */
    void (*combine)(const sk_term *terms, size_t count, const float *m, size_t at, size_t n,
                    float *out, int stream, double *lanes);
    /* out = x*k, in place, too; its squares as above */
    void (*scaled)(float *out, const float *x, float k, size_t n, double *lanes);
    /* Block sums of the squares of corrected gradients, n <= SK_BLOCK: of those terms that are turned,
     * the i-th to sums[i * stride]. */
    void (*lengths)(const sk_term *terms, size_t count, const float *m, size_t at, size_t n,
                    double *sums, size_t stride);
    size_t (*scan)(const float *x, size_t n); /* first non-finite */
    sk_outer_fn outer[SK_OUTERS];
} sk_blend_variant;

/* Block sums of n elements, written to sums[0 .. ceil(n/SK_BLOCK)). */
typedef struct {
    const char *name;
    unsigned needs;
    void (*sumsq)(const float *x, size_t n, double *sums);
    void (*dot)(const float *x, const float *y, size_t n, double *sums);
    /* Of clipped gradients, elements [at, at+n), n <= SK_BLOCK: c.c of the i-th to sums[3 * i * stride]
     * and, unless m is NULL, c.m to the row after it; m.m to sums[2 * stride]. */
    void (*measure)(const sk_term *terms, size_t count, const float *m, size_t at, size_t n,
                    double *sums, size_t stride);
    /* Of those terms that rotate, the square of t = wu*c + wv*m (f64, unrounded, not fused), the i-th
     * to sums[i * stride]. */
    void (*rotated)(const sk_term *terms, size_t count, const float *m, size_t at, size_t n,
                    double *sums, size_t stride);
} sk_reduce_variant;

typedef struct {
    const sk_sha256_variant *sha256;
    const sk_codec_variant *codec;
    const sk_blend_variant *blend;
    const sk_reduce_variant *reduce;
} sk_kernels;

extern sk_kernels sk_active; /* the dispatch table: portable until sk_init */

/* Table of a family's i-th variant, of the type of the family. */
const void *sk_variant_table(int family, int i);

/* ------------------------------------------------------------------ pieces of the variants */

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#define SK_LE16(v) __builtin_bswap16(v)
#define SK_LE32(v) __builtin_bswap32(v)
#else
#define SK_LE16(v) (v)
#define SK_LE32(v) (v)
#endif

static inline uint16_t sk_load16(const uint8_t *p) {
    uint16_t v;
    memcpy(&v, p, sizeof v);
    return SK_LE16(v);
}

static inline uint32_t sk_load32(const uint8_t *p) {
    uint32_t v;
    memcpy(&v, p, sizeof v);
    return SK_LE32(v);
}

static inline void sk_store16(uint8_t *p, uint16_t v) {
    v = SK_LE16(v);
    memcpy(p, &v, sizeof v);
}

static inline void sk_store32(uint8_t *p, uint32_t v) {
    v = SK_LE32(v);
    memcpy(p, &v, sizeof v);
}

static inline uint32_t sk_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static inline float sk_float(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static inline uint16_t sk_bf16(float x) { /* round to nearest even, NaN quieted */
    uint32_t u = sk_bits(x);
    uint32_t nan = (u >> 16) | 0x40u;
    uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
    return (uint16_t)((u & SK_ABS) > 0x7F800000u ? nan : rounded);
}

/* Block sum of 8 lanes, step 3 of the blocked sum. */
static inline double sk_fold_lanes(const double a[SK_LANES]) {
    return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
}

/* Element i of a term, after the clipping. */
static inline float sk_clipped(const sk_term *t, size_t i) {
    return t->clip == 1.0f ? t->d[i] : t->d[i] * t->clip;
}

static inline int sk_any_rotates(const sk_term *terms, size_t count) {
    int found = 0;
    for (size_t i = 0; i < count; i++) found |= terms[i].turn == SK_ROTATE;
    return found;
}

/* combine, and the squares of one corrected gradient, put together from a variant's single kernels. */
void sk_combine_by_parts(const sk_blend_variant *parts, const sk_term *terms, size_t count,
                         const float *m, size_t at, size_t n, float *out, double *lanes);
void sk_length_by_parts(const sk_blend_variant *parts, const sk_term *term, const float *m,
                        size_t at, size_t n, double *lanes);

/* After stores past the cache and before another thread is told of them. */
static inline void sk_stores_done(void) {
#if defined(__x86_64__)
    __builtin_ia32_sfence();
#endif
}

extern const uint32_t SK_SHA256_K[64];

extern const float SK_Q4_LEVELS[8];        /* value of a level at scale 1 */
extern const uint32_t SK_Q4_THRESHOLDS[7]; /* bits of |x|/scale from which level i+1 begins */

/* One q4 block of at most 256 values (fewer: padded with +0). Shared by the variants, for their
 * ragged last block and for blocks whose scale is not finite. */
void sk_q4_encode_block(const float *src, size_t n, uint8_t *out);
/* A whole block of zeros, which is what a parameter without a gradient sends. */
void sk_q4_encode_zeros(uint8_t *out);
void sk_q4_decode_block(const uint8_t *src, float *out, size_t n, uint32_t flip);
/* One block of a change of bf16, as it is defined; the first index that is not finite, or n. */
size_t sk_apply_block(const uint8_t *base, const uint8_t *change, uint8_t *out, size_t n);

/* Levels without a division, for scales whose thresholds are normal numbers (sk_q4_ordinary).
 *
 * Level k of a value begins where fl(|x|/scale) reaches its threshold 2^(k-7.5), up to 4 ulp; in
 * bits of |x| that is bits(2^-6.5 * scale) + (k-1)*2^23, up to 6 ulp. Adding sk_q4_base to them
 * puts it at k*2^23 + SK_Q4_NEAR, up to 6: the sum's exponent is the level, except for sums within
 * SK_Q4_NEAR of such a place, where only the division tells. */
#define SK_Q4_NEAR 16u

#define SK_Q4_ORDINARY 0x08000000u /* bits of 2^-111 */

/* A whole block times 2^126, for a scale below that: exact, so that all quotients are the same, and
 * without arithmetic on subnormal numbers. */
static inline void sk_q4_enlarge(const float *src, float *out) {
    for (size_t i = 0; i < SK_Q4_BLOCK; i++) {
        uint32_t u = sk_bits(src[i]), abs = u & SK_ABS;
        uint32_t subnormal = sk_bits((float)(int32_t)abs * 0x1p-23f), normal = abs + (126u << 23);
        out[i] = sk_float((abs < 0x00800000u ? subnormal : normal) | (u & SK_SIGN));
    }
}

static inline int sk_q4_ordinary(uint32_t scale) {
    return scale >= SK_Q4_ORDINARY && scale <= SK_FINITE_MAX;
}

static inline uint32_t sk_q4_base(uint32_t scale) {
    return (1u << 23) + SK_Q4_NEAR - sk_bits(sk_float(SK_Q4_THRESHOLDS[0]) * sk_float(scale));
}

static inline int sk_q4_scale_bad(uint32_t scale) { /* not finite, or < 0; -0.0 passes */
    return (scale & SK_ABS) > SK_FINITE_MAX || (scale > SK_SIGN);
}

#endif
