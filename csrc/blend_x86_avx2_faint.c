/* Element-wise arithmetic with AVX2 for CPUs that are slow on subnormal numbers.
 *
 * Must not give other bits than blend_portable.c, nor cost anything where nothing is subnormal.
 *
 * Some CPUs leave a multiplication with a subnormal operand or result to microcode: 150 cycles in the
 * place of one. Such numbers come by themselves: the momentum of a parameter that gets no gradient
 * any more decays to 4 units of the last place of all, where 0.9 times it rounds to itself, and stays.
 *
 * The CPU notes in its sticky flags that it met one (denormal operand, underflow). While none is set,
 * everything is plain. Once one is, each strip is looked at with integers before it is computed. If
 * something that is multiplied lies under FAINT, the strip is computed in f64, in which no f32 is
 * subnormal, and rounded after every operation to what f32 has there: 24 bits, but no finer than
 * 2^-149. Strips without such values clear the flags again, one in 16 does.
 *
 * Why that gives the same bits: a product of two f32 is exact in f64; sums and quotients are rounded
 * twice, first to 53 bits, and 53 >= 2 * 24 + 2 makes the first rounding harmless; a sum that is
 * subnormal in f32 is exact in both. Conversions go through integers, for they are slow as well.
 * Why FAINT and not the smallest normal number: products with a scalar shrink, and sums may cancel,
 * to 2^-23 of their operands.
 */
#include "syncer_kernels_impl.h"

#include <immintrin.h>

extern const sk_blend_variant sk_blend_portable, sk_blend_avx2, sk_blend_avx2_faint;

#define INLINE static inline __attribute__((always_inline))
#define STRIP 1024        /* elements of one decision */
#define PIECE 4096        /* elements between two looks at the flags */
#define FAINT 0x17800000u /* bits of 2^-80 */
#define LARGE 0x5D800000u /* bits of 2^60: from here on a sum might overflow, and f64 would not */
#define LEAST_NORMAL 0x00800000

/* ------------------------------------------------------------------ looking at a strip */

INLINE uint32_t lowest(__m256i v) {
    __m128i m = _mm_min_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    m = _mm_min_epu32(m, _mm_shuffle_epi32(m, 0x4E));
    m = _mm_min_epu32(m, _mm_shuffle_epi32(m, 0xB1));
    return (uint32_t)_mm_cvtsi128_si32(m);
}

INLINE __m256i magnitude(const float *x) {
    return _mm256_and_si256(_mm256_loadu_si256((const __m256i *)x), _mm256_set1_epi32(SK_ABS));
}

/* Whether one of n values lies under FAINT; zeros do not count. n: a multiple of 8. */
static int any_faint(const float *x, size_t n) {
    __m256i low = _mm256_set1_epi32(-1);
    for (size_t i = 0; i < n; i += 8)
        low = _mm256_min_epu32(low, _mm256_add_epi32(magnitude(x + i), _mm256_set1_epi32(-1)));
    return lowest(low) < FAINT - 1;
}

static int any_large(const float *x, size_t n) {
    __m256i not_high = _mm256_set1_epi32(-1);
    for (size_t i = 0; i < n; i += 8)
        not_high = _mm256_min_epu32(not_high,
                                    _mm256_xor_si256(magnitude(x + i), _mm256_set1_epi32(-1)));
    return ~lowest(not_high) >= LARGE;
}

/* A scalar that neither makes large values of others, nor faint ones of values above FAINT. */
static int moderate(double k) {
    double size = k < 0 ? -k : k;
    return size == 0.0 || (size >= 0x1p-40 && size <= 0x1p20);
}

/* ------------------------------------------------------------------ f32 in f64 */

typedef struct {
    __m256d low, high;
} wide;

#define BOTH(op, a, b) ((wide){op((a).low, (b).low), op((a).high, (b).high)})

INLINE wide all(double x) { return (wide){_mm256_set1_pd(x), _mm256_set1_pd(x)}; }

INLINE __m256d widened(__m128 ordinary, __m128i faint) {
    __m256d scaled = _mm256_mul_pd(_mm256_cvtepi32_pd(faint), _mm256_set1_pd(0x1p-149));
    return _mm256_or_pd(_mm256_cvtps_pd(ordinary), scaled);
}

INLINE wide load(const float *x) {
    __m256i u = _mm256_loadu_si256((const __m256i *)x), abs = magnitude(x);
    __m256i subnormal = _mm256_cmpgt_epi32(_mm256_set1_epi32(LEAST_NORMAL), abs);
    __m256i faint = _mm256_and_si256(subnormal, abs); /* its bits are the multiple of 2^-149 */
    __m256 ordinary = _mm256_castsi256_ps(_mm256_xor_si256(u, faint)); /* or a zero of that sign */
    return (wide){widened(_mm256_castps256_ps128(ordinary), _mm256_castsi256_si128(faint)),
                  widened(_mm256_extractf128_ps(ordinary, 1), _mm256_extracti128_si256(faint, 1))};
}

/* To what f32 has at this place, ties to even: adding 1.5 * 2^52 times that unit makes f64 round. */
INLINE __m256d rounded_half(__m256d x) {
    const __m256d exponent = _mm256_castsi256_pd(_mm256_set1_epi64x(0x7FF0000000000000));
    __m256d place = _mm256_max_pd(_mm256_and_pd(x, exponent), _mm256_set1_pd(0x1p-126));
    __m256d shift = _mm256_mul_pd(place, _mm256_set1_pd(0x1.8p29));
    __m256d r = _mm256_sub_pd(_mm256_add_pd(x, shift), shift);
    return _mm256_or_pd(r, _mm256_and_pd(x, _mm256_set1_pd(-0.0))); /* zeros keep the sign */
}

INLINE wide rounded(wide x) { return (wide){rounded_half(x.low), rounded_half(x.high)}; }
INLINE wide mul(wide a, wide b) { return rounded(BOTH(_mm256_mul_pd, a, b)); }
INLINE wide add(wide a, wide b) { return rounded(BOTH(_mm256_add_pd, a, b)); }
INLINE wide sub(wide a, wide b) { return rounded(BOTH(_mm256_sub_pd, a, b)); }
INLINE wide quotient(wide a, wide b) { return rounded(BOTH(_mm256_div_pd, a, b)); }

/* Of a rounded value. */
INLINE __m128 narrowed(__m256d x) {
    __m256d abs = _mm256_andnot_pd(_mm256_set1_pd(-0.0), x);
    __m256d subnormal = _mm256_cmp_pd(abs, _mm256_set1_pd(0x1p-126), _CMP_LT_OQ);
    __m256d faint = _mm256_and_pd(subnormal, abs);
    __m128i bits = _mm256_cvtpd_epi32(_mm256_mul_pd(faint, _mm256_set1_pd(0x1p149)));
    __m128 ordinary = _mm256_cvtpd_ps(_mm256_xor_pd(x, faint));
    return _mm_or_ps(ordinary, _mm_castsi128_ps(bits));
}

INLINE void store(float *out, wide x) {
    _mm_storeu_ps(out, narrowed(x.low));
    _mm_storeu_ps(out + 4, narrowed(x.high));
}

/* ------------------------------------------------------------------ kernels */

#define NOTED (_MM_EXCEPT_DENORM | _MM_EXCEPT_UNDERFLOW)

/* Elements of the next strip that may be computed in f64, in whole vectors: none until the CPU has
 * noted something. What is left goes through the plain kernel. */
INLINE size_t suspects(size_t left, size_t *len) {
    int noted = (_mm_getcsr() & NOTED) != 0;
    size_t most = noted ? STRIP : PIECE;
    *len = left < most ? left : most;
    return noted ? *len & ~(size_t)7 : 0;
}

/* A strip at x turned out to be ordinary. Not every one clears the flags: rows of dead parameters
 * between others would be found by accident again and again. */
INLINE void calm(const float *x) {
    if (((uintptr_t)x / (STRIP * sizeof *x)) % 16 == 0) _mm_setcsr(_mm_getcsr() & ~(unsigned)NOTED);
}

static int in_f64(const float *multiplied, const float *other, size_t len) {
    return any_faint(multiplied, len) && !any_large(multiplied, len) &&
           (other == NULL || !any_large(other, len));
}

static int both_in_f64(const float *x, const float *y, size_t len) {
    return (any_faint(x, len) || any_faint(y, len)) && !any_large(x, len) && !any_large(y, len);
}

static void accumulate(float *out, const float *g, float k, size_t n) {
    const wide kk = all(k);
    for (size_t i = 0, len; i < n; i += len) {
        size_t whole = suspects(n - i, &len), done = 0;
        if (whole && moderate(k) && in_f64(g + i, out + i, whole)) done = whole;
        if (whole > done) calm(g + i);
        for (size_t j = i; j < i + done; j += 8)
            store(out + j, add(load(out + j), mul(kk, load(g + j))));
        sk_blend_avx2.accumulate(out + i + done, g + i + done, k, len - done);
    }
}

static void first(float *out, const float *g, float k, size_t n) {
    const wide kk = all(k), zero = all(0.0);
    for (size_t i = 0, len; i < n; i += len) {
        size_t whole = suspects(n - i, &len), done = 0;
        if (whole && moderate(k) && in_f64(g + i, NULL, whole)) done = whole;
        if (whole > done) calm(g + i);
        for (size_t j = i; j < i + done; j += 8) store(out + j, add(zero, mul(kk, load(g + j))));
        sk_blend_avx2.first(out + i + done, g + i + done, k, len - done);
    }
}

static void scale(float *out, float k, size_t n) {
    const wide kk = all(k);
    for (size_t i = 0, len; i < n; i += len) {
        size_t whole = suspects(n - i, &len), done = 0;
        if (whole && moderate(k) && in_f64(out + i, NULL, whole)) done = whole;
        if (whole > done) calm(out + i);
        for (size_t j = i; j < i + done; j += 8) store(out + j, mul(load(out + j), kk));
        sk_blend_avx2.scale(out + i + done, k, len - done);
    }
}

static void blend(float *theta, const float *anchor, float a, float b, size_t n) {
    const wide aa = all(a), bb = all(b);
    const int possible = moderate(a) && moderate(b);
    for (size_t i = 0, len; i < n; i += len) {
        size_t whole = suspects(n - i, &len), done = 0;
        if (whole && possible && both_in_f64(theta + i, anchor + i, whole)) done = whole;
        if (whole > done) calm(theta + i);
        for (size_t j = i; j < i + done; j += 8)
            store(theta + j, add(mul(aa, load(theta + j)), mul(bb, load(anchor + j))));
        sk_blend_avx2.blend(theta + i + done, anchor + i + done, a, b, len - done);
    }
}

static void shrink(float *out, const float *d, const float *m, float q, size_t n) {
    const wide qq = all(q);
    for (size_t i = 0, len; i < n; i += len) {
        size_t whole = suspects(n - i, &len), done = 0;
        if (whole && moderate(q) && in_f64(m + i, d + i, whole)) done = whole;
        if (whole > done) calm(m + i);
        for (size_t j = i; j < i + done; j += 8)
            store(out + j, add(load(d + j), mul(qq, load(m + j))));
        sk_blend_avx2.shrink(out + i + done, d + i + done, m + i + done, q, len - done);
    }
}

/* wu and wv belong to f64 in the definition, too, and may be as large as a faint norm is small. */
static void rotate(float *out, const float *d, const float *m, double wu, double wv, float s,
                   size_t n) {
    const wide u = all(wu), v = all(wv), ss = all(s);
    const int possible = moderate(s) && wu < 0x1p40 && wu > -0x1p40 && wv < 0x1p40 && wv > -0x1p40;
    for (size_t i = 0, len; i < n; i += len) {
        size_t whole = suspects(n - i, &len), done = 0;
        if (whole && possible && both_in_f64(d + i, m + i, whole)) done = whole;
        if (whole > done) calm(d + i);
        for (size_t j = i; j < i + done; j += 8) {
            wide a = BOTH(_mm256_mul_pd, u, load(d + j)), b = BOTH(_mm256_mul_pd, v, load(m + j));
            store(out + j, mul(add(a, b), ss));
        }
        sk_blend_avx2.rotate(out + i + done, d + i + done, m + i + done, wu, wv, s, len - done);
    }
}

/* Once something was noted the single kernels above look at each strip; until then nothing does. */
static void combine(const sk_term *terms, size_t count, const float *m, size_t at, size_t n,
                    float *out, int stream, double *lanes) {
    if (_mm_getcsr() & NOTED)
        sk_combine_by_parts(&sk_blend_avx2_faint, terms, count, m, at, n, out, lanes);
    else
        sk_blend_avx2.combine(terms, count, m, at, n, out, stream, lanes);
}

static void scaled(float *out, const float *x, float k, size_t n, double *lanes) {
    if (!(_mm_getcsr() & NOTED)) {
        sk_blend_avx2.scaled(out, x, k, n, lanes);
        return;
    }
    if (out != x) memcpy(out, x, n * sizeof *x);
    scale(out, k, n);
    sk_blend_portable.scaled(out, out, 1.0f, n, lanes);
}

static void lengths(const sk_term *terms, size_t count, const float *m, size_t at, size_t n,
                    double *sums, size_t stride) {
    if (!(_mm_getcsr() & NOTED)) {
        sk_blend_avx2.lengths(terms, count, m, at, n, sums, stride);
        return;
    }
    for (size_t i = 0; i < count; i++) {
        double lanes[SK_LANES] = {0};
        if (terms[i].turn == SK_KEEP) continue;
        sk_length_by_parts(&sk_blend_avx2_faint, &terms[i], m, at, n, lanes);
        sums[i * stride] = sk_fold_lanes(lanes);
    }
}

static size_t scan(const float *x, size_t n) { return sk_blend_avx2.scan(x, n); }

/* ------------------------------------------------------------------ outer steps */

/* Eight elements of an outer step in f64. None of what is written can be too large for f32. */
typedef void (*step_fn)(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at, wide g);

INLINE void step_nesterov(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at, wide g) {
    const wide mu = all(o->mu), lr = all(o->lr);
    wide b = add(mul(mu, load(a->state[0] + at)), g);
    wide p = sub(load(a->params + at), mul(lr, add(g, mul(mu, b))));
    store(a->state_out[0] + at, b);
    store(a->params_out + at, p);
}

INLINE void step_sgd(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at, wide g) {
    store(a->params_out + at, sub(load(a->params + at), mul(all(o->lr), g)));
}

INLINE wide delayed_params(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at, wide g,
                           wide b) {
    wide step = add(mul(all(o->k), b), quotient(g, all(o->period)));
    return sub(load(a->params + at), mul(all(o->lr), step));
}

INLINE void step_hold(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at, wide g) {
    wide b = load(a->state[0] + at), sum = add(load(a->state[1] + at), g);
    wide p = delayed_params(o, a, at, g, b);
    store(a->state_out[0] + at, b);
    store(a->state_out[1] + at, sum);
    store(a->params_out + at, p);
}

INLINE void step_apply(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at, wide g) {
    wide sum = add(load(a->state[1] + at), g);
    wide b = add(mul(all(o->mu), load(a->state[0] + at)), quotient(sum, all(o->period)));
    wide p = delayed_params(o, a, at, g, b);
    store(a->state_out[0] + at, b);
    store(a->state_out[1] + at, all(0.0));
    store(a->params_out + at, p);
}

/* Whether a Nesterov step of this strip leaves every parameter as it is: gradients and momentum are
 * subnormal (or zero), and no parameter is so small that it would notice. n: a multiple of 8. */
static int dead(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at, const float *g,
                size_t n) {
    const __m256i one = _mm256_set1_epi32(-1);
    __m256i high = _mm256_setzero_si256(), low = one, not_high = one;
    if (!(o->mu >= 0.0f && o->mu <= 1.0f && o->lr >= 0.0f && o->lr <= 0x1p10f)) return 0;
    for (size_t i = 0; i < n; i += 8) {
        __m256i p = magnitude(a->params + at + i);
        high = _mm256_max_epu32(high, magnitude(g + i));
        high = _mm256_max_epu32(high, magnitude(a->state[0] + at + i));
        low = _mm256_min_epu32(low, p);
        not_high = _mm256_min_epu32(not_high, _mm256_xor_si256(p, one));
    }
    return ~lowest(_mm256_xor_si256(high, one)) < LEAST_NORMAL && lowest(low) >= FAINT &&
           ~lowest(not_high) < LARGE;
}

/* mu*b + g of a dead strip, in units of 2^-149: the product is exact in f64, rounding to an integer
 * is the rounding of f32 there, and the sum is exact. The integers are the bits of the result. */
static void decay(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at, const float *g,
                  size_t n) {
    const __m256d mu = _mm256_set1_pd(o->mu);
    const __m256i sign = _mm256_set1_epi32((int)SK_SIGN), zero = _mm256_setzero_si256();
    for (size_t i = 0; i < n; i += 8) {
        __m256i u = _mm256_loadu_si256((const __m256i *)(a->state[0] + at + i));
        __m256i v = _mm256_loadu_si256((const __m256i *)(g + i)), v_abs = magnitude(g + i);
        __m256i b = _mm256_sign_epi32(_mm256_andnot_si256(sign, u), u);
        __m256d low = _mm256_mul_pd(mu, _mm256_cvtepi32_pd(_mm256_castsi256_si128(b)));
        __m256d high = _mm256_mul_pd(mu, _mm256_cvtepi32_pd(_mm256_extracti128_si256(b, 1)));
        __m256i r = _mm256_set_m128i(_mm256_cvtpd_epi32(high), _mm256_cvtpd_epi32(low));
        r = _mm256_add_epi32(r, _mm256_sign_epi32(v_abs, v));
        /* -0 is left of two -0 alone */
        __m256i nothing = _mm256_cmpeq_epi32(_mm256_or_si256(r, v_abs), zero);
        __m256i negative = _mm256_or_si256(r, _mm256_and_si256(nothing, _mm256_and_si256(u, v)));
        r = _mm256_or_si256(_mm256_abs_epi32(r), _mm256_and_si256(negative, sign));
        _mm256_storeu_si256((__m256i *)(a->state_out[0] + at + i), r);
    }
    memmove(a->params_out + at, a->params + at, n * sizeof *a->params);
}

typedef int (*look_fn)(const float *x, size_t n);

/* Whether there is something in the gradient or a state of a strip. */
static int any_of(look_fn look, int states, const sk_outer_arrays *a, size_t at, const float *g,
                  size_t n) {
    int found = look(g, n);
    for (int s = 0; s < states; s++) found |= look(a->state[s] + at, n);
    return found;
}

INLINE size_t outer(enum sk_outer which, step_fn step, int states, const sk_outer_scalars *o,
                    const sk_outer_arrays *a, size_t at, const float *g, size_t n, int stream) {
    const sk_outer_arrays arrays = *a; /* a local copy cannot alias the stores */
    const sk_outer_scalars scalars = *o;
    const int possible = moderate(o->lr) && moderate(o->mu) && moderate(o->k) && o->period >= 1 &&
                         o->period <= 0x1p20f;
    size_t bad = n;
    for (size_t i = 0, len; i < n; i += len) {
        size_t here = at + i, whole = suspects(n - i, &len), done = 0;
        if (whole && any_of(any_faint, states, a, here, g + i, whole)) {
            if (which == SK_OUTER_NESTEROV && dead(o, a, here, g + i, whole)) {
                decay(o, a, here, g + i, whole);
                done = whole;
            } else if (possible && !any_large(a->params + here, whole) &&
                       !any_of(any_large, states, a, here, g + i, whole)) {
                for (; done < whole; done += 8)
                    step(&scalars, &arrays, here + done, load(g + i + done));
            }
        }
        if (whole > done) calm(g + i);
        size_t left = len - done, begin = i + done;
        size_t found = sk_blend_avx2.outer[which](o, a, at + begin, g + begin, left, stream);
        if (found < left && bad == n) bad = begin + found;
    }
    return bad;
}

static size_t nesterov(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at,
                       const float *g, size_t n, int stream) {
    return outer(SK_OUTER_NESTEROV, step_nesterov, 1, o, a, at, g, n, stream);
}

static size_t sgd(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at, const float *g,
                  size_t n, int stream) {
    return outer(SK_OUTER_SGD, step_sgd, 0, o, a, at, g, n, stream);
}

static size_t delayed_hold(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at,
                           const float *g, size_t n, int stream) {
    return outer(SK_OUTER_DELAYED_HOLD, step_hold, 2, o, a, at, g, n, stream);
}

static size_t delayed_apply(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at,
                            const float *g, size_t n, int stream) {
    return outer(SK_OUTER_DELAYED_APPLY, step_apply, 2, o, a, at, g, n, stream);
}

// clang-format off: one line for the kernels, one for each optimizer
const sk_blend_variant sk_blend_avx2_faint = {
    "avx2-faint", SK_CPU_AVX2 | SK_CPU_ASSISTED, accumulate, first, scale, blend, shrink, rotate,
    combine, scaled, lengths, scan,
    {[SK_OUTER_NESTEROV] = nesterov,
     [SK_OUTER_SGD] = sgd,
     [SK_OUTER_DELAYED_HOLD] = delayed_hold,
     [SK_OUTER_DELAYED_APPLY] = delayed_apply}};
// clang-format on
