/* Kernels of syncer, as their callers see them: hashing, codecs and arithmetic over whole arrays.
 *
 * Must not: allocate, lock, print, include Python.h, or keep any state but the dispatch table.
 *
 * Two prefixes, two headers. `sk_` (syncer kernel) knows arrays of elements and bytes, nothing else.
 * `sm_` (syncer merge, syncer_merge.h) knows what a merge is: tensors, gradients, optimizers. sm_
 * calls sk_, never the other way round.
 *
 * Three layers, each using only the one above it:
 *   variant tables  one element-wise function per kernel and instruction set, single-threaded
 *                   (syncer_kernels_impl.h, which no caller includes)
 *   dispatch        detects the CPU once and points each family at its best variant
 *   whole arrays    the same kernels cut over threads (arrays.c); one merge (merge_*.c)
 *
 * Contracts shared by all:
 *   - every variant of a kernel gives the same bits for every input, and so does every thread count
 *     (which NaN an arithmetic kernel returns is the CPU's choice: no such result is ever used);
 *   - `float *` arrays are aligned to 4 bytes, byte buffers may have any alignment;
 *   - an output may be the very same array as an input where the comment says "in place"; any other
 *     overlap is forbidden;
 *   - n == 0 is valid everywhere and touches nothing;
 *   - wire bytes are little-endian; arithmetic is IEEE-754, round to nearest even, with subnormals
 *     kept, whatever mode the calling thread is in (float_mode.h), and fused only where a product is
 *     exact (f64 products of two f32);
 *   - a scan returns the index of the first bad element, or -1 if all are good (a variant returns n
 *     instead). The whole output is written in both cases;
 *   - nothing is checked: lengths and pointers are the caller's promise.
 */
#ifndef SYNCER_KERNELS_H
#define SYNCER_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#define SK_BLOCK 16384     /* elements of one block of the blocked sum */
#define SK_Q4_BLOCK 256    /* values that share one q4 scale */
#define SK_Q4_BYTES 132    /* f32 scale + 128 bytes of nibbles */
#define SK_THREADS_MAX 256 /* more is refused by the callers */

/* ------------------------------------------------------------------ CPU and dispatch */

enum sk_cpu {
    SK_CPU_SSE41 = 1 << 0,
    SK_CPU_SHANI = 1 << 1,
    SK_CPU_AVX2 = 1 << 2, /* the CPU has it and the system saves its registers */
    SK_CPU_NEON = 1 << 3,
    SK_CPU_SHA2 = 1 << 4,     /* the ARMv8 SHA-2 instructions */
    SK_CPU_ASSISTED = 1 << 5, /* subnormal numbers are left to microcode: no need, a reason */
    SK_CPU_BF16 = 1 << 6,     /* ARM's conversion to bf16 (FEAT_BF16) */
};
#define SK_CPU_COUNT 7

unsigned sk_cpu_detect(void);          /* bits of enum sk_cpu; reads the CPU every time */
const char *sk_cpu_name(unsigned bit); /* bit 0..SK_CPU_COUNT-1 */

enum sk_family { SK_SHA256, SK_CODEC, SK_BLEND, SK_REDUCE, SK_FAMILIES };

enum sk_status {
    SK_OK = 0,
    SK_UNKNOWN_FAMILY = 1,
    SK_UNKNOWN_VARIANT = 2,    /* no variant of that name was compiled in */
    SK_UNSUPPORTED_VARIANT = 3 /* compiled in, but this CPU cannot run it */
};

void sk_init(void);                             /* best supported variant of every family */
const char *sk_family_name(int family);         /* NULL if there is no such family */
const char *sk_variant_name(int family, int i); /* i-th compiled, best first; NULL at the end */
int sk_variant_supported(int family, int i);
const char *sk_active_name(int family);
/* Points one family at a variant; enum sk_status. Not for use while another thread runs kernels. */
int sk_select(const char *family, const char *variant);

int sk_has_openmp(void);
const char *sk_compiler(void);

/* ------------------------------------------------------------------ how a thread computes
 * Every function here computes as IEEE-754 says, whatever mode its caller's thread is in, and leaves
 * that mode as it was. These are for what a caller computes by itself. */

enum sk_float_fault { /* what of the calling thread's mode is not the default of IEEE-754 */
                      SK_FLOAT_FLUSHES = 1 << 0, /* subnormal operands or results become zero */
                      SK_FLOAT_ROUNDS = 1 << 1,  /* not to nearest even */
                      SK_FLOAT_OTHER = 1 << 2,   /* traps, NaN handling */
};

unsigned sk_float_faults(void);
uint64_t sk_float_exact(void);     /* sets the default; returns the mode as it was */
void sk_float_back(uint64_t mode); /* sets a mode that sk_float_exact returned */
float sk_float_of(double x);       /* rounded to nearest, in any mode of the calling thread */

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

/* ------------------------------------------------------------------ whole arrays
 * `threads`: 1 to SK_THREADS_MAX; 1 never enters a parallel region. */

enum sk_dtype { SK_DTYPE_F32 = 1, SK_DTYPE_BF16 = 2, SK_DTYPE_Q4 = 3 }; /* as on the wire */

/* whole: elements of the array that `out` is a part of; what is large is written past the cache,
 * however small its parts are. */
int64_t sk_decode(int dtype, const uint8_t *src, float *out, size_t n, size_t whole, int negate,
                  int threads);
void sk_encode_bf16(const float *src, uint8_t *out, size_t n, int threads);
void sk_encode_q4(const float *src, uint8_t *out, size_t n, int threads);
/* change = q4(values - base), out = base + change: base and out are f32 or bf16 bytes, as `dtype`
 * says. Returns the first element of out that is not finite, or -1. */
int64_t sk_encode_change(int dtype, const float *values, const uint8_t *base, uint8_t *change,
                         uint8_t *out, size_t n, int threads);
/* The same `out` from the change. */
void sk_apply_change(int dtype, const uint8_t *base, const uint8_t *change, uint8_t *out, size_t n,
                     int threads);

double sk_sumsq(const float *x, size_t n, int threads); /* blocked sums, in f64 */
double sk_dot(const float *x, const float *y, size_t n, int threads);
/* theta = a*theta + b*anchor */
void sk_blend(float *theta, const float *anchor, float a, float b, size_t n, int threads);
int64_t sk_scan(const float *x, size_t n, int threads); /* first non-finite */

/* ------------------------------------------------------------------ gradients in a sum */

enum sk_turn { SK_KEEP, SK_SHRINK, SK_ROTATE }; /* what a correction does to one gradient */

/* One gradient on its way into a sum: clipped (c = d*clip), corrected against m, times k. Kernels that
 * take several walk them together, some vectors of each in turn: every gradient is a stream from
 * memory of its own, and m is read and widened once for all. */
typedef struct {
    const float *d; /* elements are counted from here, as those of m */
    double wu, wv;
    float clip; /* 1: none */
    float q;    /* shrink: c + q*m; rotate: (f32)(wu*c + wv*m in f64) * q */
    float k;
    int turn; /* enum sk_turn */
} sk_term;

/* ------------------------------------------------------------------ outer optimizers */

/* Scalars of the outer optimizers; each uses those it needs. */
typedef struct {
    float lr, mu;
    float period;  /* Delayed Nesterov: N */
    float k;       /* Delayed Nesterov: factor of the momentum in the step, rounded once */
    uint32_t most; /* bits of the largest magnitude that may be written: SK_FINITE_MAX, or less */
} sk_outer_scalars;

#define SK_FINITE_MAX 0x7F7FFFFFu /* bits of the largest finite |x| */
#define SK_BF16_MAX 0x7F7F7FFFu   /* bits of the largest |x| that is still finite as bf16 */

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

/* ------------------------------------------------------------------ for checks alone
 * A merge runs these kernels block by block inside its own passes (merge_*.c), so no product path
 * calls them over whole arrays. Here they carry sk_check, the tests against the oracle and the
 * benchmarks; their Python faces are syncer/kernels/testing.py. */

/* Bytes [begin, end) of what encoding all n elements of src would give, to out[0 .. end-begin). */
void sk_encode_range(int dtype, const float *src, size_t n, size_t begin, size_t end, uint8_t *out,
                     int threads);
/* x.x, x.y, y.y */
void sk_three(const float *x, const float *y, size_t n, double out[3], int threads);
/* Sum of the squares of t = wu*d + wv*m, in f64, t unrounded. */
double sk_rotated_sumsq(const float *d, const float *m, double wu, double wv, size_t n,
                        int threads);
void sk_accumulate(float *out, const float *g, float k, size_t n, int threads); /* out + k*g */
void sk_first(float *out, const float *g, float k, size_t n, int threads); /* +0 + k*g, in place */
void sk_scale(float *out, float k, size_t n, int threads);
/* d + q*m and (f32)(wu*d + wv*m) * s, both in place */
void sk_shrink(float *out, const float *d, const float *m, float q, size_t n, int threads);
void sk_rotate(float *out, const float *d, const float *m, double wu, double wv, float s, size_t n,
               int threads);
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

#endif
