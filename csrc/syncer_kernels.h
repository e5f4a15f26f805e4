/* Kernels of syncer: contracts, variant tables, passes. The one header of csrc.
 *
 * Must not: allocate, lock, print, include Python.h, or keep any state but the dispatch table.
 *
 * Three layers, each using only the one above it:
 *   variant tables  one element-wise function per kernel and instruction set, single-threaded
 *   dispatch        detects the CPU once and points each family at its best variant
 *   passes          the same kernels over whole arrays, cut over threads (passes.c, merge_*.c)
 *
 * Contracts shared by all:
 *   - every variant of a kernel gives the same bits for every input, and so does every thread count
 *     (which NaN an arithmetic kernel returns is the CPU's choice: no such result is ever used);
 *   - `float *` arrays are aligned to 4 bytes, byte buffers may have any alignment;
 *   - an output may be the very same array as an input where the comment says "in place"; any other
 *     overlap is forbidden;
 *   - n == 0 is valid everywhere and touches nothing;
 *   - wire bytes are little-endian; arithmetic is IEEE-754, round to nearest even, with subnormals
 *     kept, and fused only where a product is exact (f64 products of two f32);
 *   - a scan returns the index of the first bad element, or n (variants) or -1 (passes) if all are
 *     good. The whole output is written in both cases.
 */
#ifndef SYNCER_KERNELS_H
#define SYNCER_KERNELS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define SK_BLOCK 16384     /* elements of one block of the blocked sum */
#define SK_LANES 8         /* f64 lanes inside a block */
#define SK_Q4_BLOCK 256    /* values that share one q4 scale */
#define SK_Q4_BYTES 132    /* f32 scale + 128 bytes of nibbles */
#define SK_THREADS_MAX 256 /* more is refused by the callers */
#define SK_SIGN 0x80000000u
#define SK_ABS 0x7FFFFFFFu
#define SK_FINITE_MAX 0x7F7FFFFFu /* bits of the largest finite |x| */

/* ------------------------------------------------------------------ CPU and dispatch */

enum sk_cpu {
    SK_CPU_SSE41 = 1 << 0,
    SK_CPU_SHANI = 1 << 1,
    SK_CPU_AVX2 = 1 << 2, /* the CPU has it and the system saves its registers */
    SK_CPU_NEON = 1 << 3,
    SK_CPU_SHA2 = 1 << 4, /* the ARMv8 SHA-2 instructions */
};
#define SK_CPU_COUNT 5

unsigned sk_cpu_detect(void);           /* bits of enum sk_cpu; reads the CPU every time */
const char *sk_cpu_name(unsigned bit);  /* bit 0..SK_CPU_COUNT-1 */

enum sk_family { SK_SHA256, SK_CODEC, SK_BLEND, SK_REDUCE, SK_FAMILIES };

enum sk_status {
    SK_OK = 0,
    SK_UNKNOWN_FAMILY = 1,
    SK_UNKNOWN_VARIANT = 2,    /* no variant of that name was compiled in */
    SK_UNSUPPORTED_VARIANT = 3 /* compiled in, but this CPU cannot run it */
};

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
} sk_codec_variant;

/* Scalars of the outer optimizers; each uses those it needs. */
typedef struct {
    float lr, mu;
    float period; /* Delayed Nesterov: N */
    float k;      /* Delayed Nesterov: factor of the momentum in the step, rounded once */
} sk_outer_scalars;

/* Arrays of one outer step. state: 0 momentum, 1 accumulator; those an optimizer does not keep may
 * be NULL. Inputs and outputs may be the same arrays (in place). */
typedef struct {
    const float *params;
    const float *state[2];
    float *params_out;
    float *state_out[2];
} sk_outer_arrays;

enum sk_outer {
    SK_OUTER_NESTEROV,      /* b = mu*b + g; p = p - lr*(g + mu*b) */
    SK_OUTER_SGD,           /* p = p - lr*g; no state */
    SK_OUTER_DELAYED_HOLD,  /* a = a + g; b copied; p = p - lr*(k*b + g/N) */
    SK_OUTER_DELAYED_APPLY, /* a = a + g; b = mu*b + a/N; p = p - lr*(k*b + g/N); a = +0 */
    SK_OUTERS
};

/* Elements [at, at+n) of all arrays; g points at element `at`. Returns the first index of the range
 * (0 = element `at`) where a written value is not finite, or n. */
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
    size_t (*scan)(const float *x, size_t n); /* first non-finite */
    sk_outer_fn outer[SK_OUTERS];
} sk_blend_variant;

/* Block sums of n elements, written to sums[0 .. ceil(n/SK_BLOCK)). */
typedef struct {
    const char *name;
    unsigned needs;
    void (*sumsq)(const float *x, size_t n, double *sums);
    void (*dot)(const float *x, const float *y, size_t n, double *sums);
    /* x·x to sums[0], x·y to sums[1], y·y to sums[2]: three rows of `stride` doubles */
    void (*three)(const float *x, const float *y, size_t n, double *sums, size_t stride);
    /* the square of t = wu*d + wv*m (f64, unrounded, not fused) */
    void (*rotated)(const float *d, const float *m, double wu, double wv, size_t n, double *sums);
} sk_reduce_variant;

typedef struct {
    const sk_sha256_variant *sha256;
    const sk_codec_variant *codec;
    const sk_blend_variant *blend;
    const sk_reduce_variant *reduce;
} sk_kernels;

extern sk_kernels sk_active; /* the dispatch table: portable until sk_init */

void sk_init(void);                             /* best supported variant of every family */
const char *sk_family_name(int family);         /* NULL if there is no such family */
const char *sk_variant_name(int family, int i); /* i-th compiled, best first; NULL at the end */
int sk_variant_supported(int family, int i);
const void *sk_variant_table(int family, int i); /* its table, of the type of the family */
const char *sk_active_name(int family);
/* Points one family at a variant. Not for use while another thread runs kernels. */
int sk_select(const char *family, const char *variant);

/* ------------------------------------------------------------------ SHA-256 streams */

typedef struct {
    uint32_t state[8];
    uint64_t bytes; /* length so far */
    uint8_t tail[64];
} sk_sha256;

void sk_sha256_init(sk_sha256 *s);
void sk_sha256_update(sk_sha256 *s, const uint8_t *data, size_t n);
void sk_sha256_digest(const sk_sha256 *s, uint8_t out[32]); /* the stream may go on afterwards */
/* Adds to two different streams by one thread, interleaved while both are at a multiple of 64 bytes
 * (the instructions are bound by their latency); the lengths may differ. */
void sk_sha256_update_pair(sk_sha256 *a, const uint8_t *data_a, size_t na, sk_sha256 *b,
                           const uint8_t *data_b, size_t nb);
/* Two digests by one thread in interleaved streams; the lengths may differ. */
void sk_sha256_pair(const uint8_t *a, size_t na, const uint8_t *b, size_t nb, uint8_t out_a[32],
                    uint8_t out_b[32]);

/* ------------------------------------------------------------------ passes
 * `threads` >= 1; 1 never enters a parallel region. Scans return an index or -1. */

enum sk_dtype { SK_DTYPE_F32 = 1, SK_DTYPE_BF16 = 2, SK_DTYPE_Q4 = 3 }; /* as on the wire */

int64_t sk_decode(int dtype, const uint8_t *src, float *out, size_t n, int negate, int threads);
void sk_encode_bf16(const float *src, uint8_t *out, size_t n, int threads);
void sk_encode_q4(const float *src, uint8_t *out, size_t n, int threads);
/* Bytes [begin, end) of what encoding all n elements of src would give, to out[0 .. end-begin). */
void sk_encode_range(int dtype, const float *src, size_t n, size_t begin, size_t end, uint8_t *out,
                     int threads);

double sk_sumsq(const float *x, size_t n, int threads);
double sk_dot(const float *x, const float *y, size_t n, int threads);
/* x.x, x.y, y.y */
void sk_three(const float *x, const float *y, size_t n, double out[3], int threads);
double sk_rotated_sumsq(const float *d, const float *m, double wu, double wv, size_t n,
                        int threads);

void sk_accumulate(float *out, const float *g, float k, size_t n, int threads);
void sk_first(float *out, const float *g, float k, size_t n, int threads);
void sk_scale(float *out, float k, size_t n, int threads);
void sk_blend(float *theta, const float *anchor, float a, float b, size_t n, int threads);
void sk_shrink(float *out, const float *d, const float *m, float q, size_t n, int threads);
void sk_rotate(float *out, const float *d, const float *m, double wu, double wv, float s, size_t n,
               int threads);
int64_t sk_scan(const float *x, size_t n, int threads);
int64_t sk_outer_step(int outer, const sk_outer_scalars *scalars, const sk_outer_arrays *arrays,
                      const float *g, size_t n, int threads);

/* What sk_check needs from whoever runs it: memory of exact size, and an ear for failures. */
typedef struct {
    void *context;
    void *(*lend)(void *context, size_t bytes); /* must not fail */
    void (*give_back)(void *context, void *memory);
    void (*fail)(void *context, const char *family, const char *variant, const char *what,
                 size_t n);
} sk_check_host;

/* Golden results of every variant this CPU runs, and each against portable; returns the failures.
 * Selects variants meanwhile: no other thread may run kernels. */
int sk_check(const sk_check_host *host);

int sk_has_openmp(void);
const char *sk_compiler(void);

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

extern const uint32_t SK_SHA256_K[64];

extern const float SK_Q4_LEVELS[8];         /* value of a level at scale 1 */
extern const uint32_t SK_Q4_THRESHOLDS[7];  /* bits of |x|/scale from which level i+1 begins */

/* One q4 block of at most 256 values (fewer: padded with +0). Shared by the variants, for their
 * ragged last block and for blocks whose scale is not finite. */
void sk_q4_encode_block(const float *src, size_t n, uint8_t *out);
void sk_q4_decode_block(const uint8_t *src, float *out, size_t n, uint32_t flip);

/* Levels without a division, for scales whose thresholds are normal numbers (sk_q4_ordinary).
 *
 * Level k of a value begins where fl(|x|/scale) reaches its threshold 2^(k-7.5), up to 4 ulp; in
 * bits of |x| that is bits(2^-6.5 * scale) + (k-1)*2^23, up to 6 ulp. Adding sk_q4_base to them
 * puts it at k*2^23 + SK_Q4_NEAR, up to 6: the sum's exponent is the level, except for sums within
 * SK_Q4_NEAR of such a place, where only the division tells. */
#define SK_Q4_NEAR 16u

static inline int sk_q4_ordinary(uint32_t scale) {
    return scale >= 0x08000000u && scale <= SK_FINITE_MAX; /* 2^-111 .. largest finite */
}

static inline uint32_t sk_q4_base(uint32_t scale) {
    return (1u << 23) + SK_Q4_NEAR - sk_bits(sk_float(SK_Q4_THRESHOLDS[0]) * sk_float(scale));
}

static inline int sk_q4_scale_bad(uint32_t scale) { /* not finite, or < 0; -0.0 passes */
    return (scale & SK_ABS) > SK_FINITE_MAX || (scale > SK_SIGN);
}

#endif
