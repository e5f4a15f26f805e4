/* Element-wise arithmetic with AVX2: whole vectors here, ends through the portable definition.
 * Must not fuse but where a square is added to a blocked sum: it is exact, other products are not. */
#include "lanes_x86_avx2.h"

extern const sk_blend_variant sk_blend_portable;

#define LOAD(p) _mm256_loadu_ps(p)
#define STORE(p, v) _mm256_storeu_ps(p, v)
#define MUL(a, b) _mm256_mul_ps(a, b)
#define ADD(a, b) _mm256_add_ps(a, b)
#define SUB(a, b) _mm256_sub_ps(a, b)

INLINE void put(float *out, __m256 v, int stream) {
    if (stream)
        _mm256_stream_ps(out, v);
    else
        STORE(out, v);
}

static void accumulate(float *out, const float *g, float k, size_t n) {
    __m256 kk = _mm256_set1_ps(k);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) STORE(out + i, ADD(LOAD(out + i), MUL(kk, LOAD(g + i))));
    sk_blend_portable.accumulate(out + i, g + i, k, n - i);
}

static void first(float *out, const float *g, float k, size_t n) {
    __m256 kk = _mm256_set1_ps(k), zero = _mm256_setzero_ps();
    size_t i = 0;
    for (; i + 8 <= n; i += 8) STORE(out + i, ADD(zero, MUL(kk, LOAD(g + i))));
    sk_blend_portable.first(out + i, g + i, k, n - i);
}

static void scale(float *out, float k, size_t n) {
    __m256 kk = _mm256_set1_ps(k);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) STORE(out + i, MUL(LOAD(out + i), kk));
    sk_blend_portable.scale(out + i, k, n - i);
}

static void blend(float *theta, const float *anchor, float a, float b, size_t n) {
    __m256 aa = _mm256_set1_ps(a), bb = _mm256_set1_ps(b);
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        STORE(theta + i, ADD(MUL(aa, LOAD(theta + i)), MUL(bb, LOAD(anchor + i))));
    sk_blend_portable.blend(theta + i, anchor + i, a, b, n - i);
}

static void shrink(float *out, const float *d, const float *m, float q, size_t n) {
    __m256 qq = _mm256_set1_ps(q);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) STORE(out + i, ADD(LOAD(d + i), MUL(qq, LOAD(m + i))));
    sk_blend_portable.shrink(out + i, d + i, m + i, q, n - i);
}

static inline __m128 rotated(const float *d, const float *m, __m256d wu, __m256d wv) {
    __m256d u = _mm256_mul_pd(wu, _mm256_cvtps_pd(_mm_loadu_ps(d)));
    __m256d v = _mm256_mul_pd(wv, _mm256_cvtps_pd(_mm_loadu_ps(m)));
    return _mm256_cvtpd_ps(_mm256_add_pd(u, v));
}

static void rotate(float *out, const float *d, const float *m, double wu, double wv, float s,
                   size_t n) {
    __m256d u = _mm256_set1_pd(wu), v = _mm256_set1_pd(wv);
    __m128 ss = _mm_set1_ps(s);
    size_t i = 0;
    for (; i + 4 <= n; i += 4) _mm_storeu_ps(out + i, _mm_mul_ps(rotated(d + i, m + i, u, v), ss));
    sk_blend_portable.rotate(out + i, d + i, m + i, wu, wv, s, n - i);
}

/* ------------------------------------------------------------------ several gradients at once */

#define VECTORS (CHUNK / 8)
#define EACH_VECTOR _Pragma("GCC unroll 4") for (int j = 0; j < VECTORS; j++)

/* Of a register; from memory in two halves where there is a choice, without the crossing. */
INLINE lanes widened(__m256 x) {
    lanes r = {_mm256_cvtps_pd(_mm256_castps256_ps128(x)),
               _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1))};
    return r;
}

FMA INLINE lanes plus_square(lanes sum, lanes x) { return plus_exact(sum, x, x); }

/* A chunk of m, widened once for all gradients that rotate. */
INLINE void widen_chunk(const float *m, double *wide) {
    EACH_VECTOR store(wide + 8 * j, widen(m + 8 * j));
}

/* Half a vector, as m is there in f64. */
INLINE __m128 turned(const float *d, const double *m, __m256d wu, __m256d wv) {
    return _mm256_cvtpd_ps(_mm256_add_pd(_mm256_mul_pd(wu, _mm256_cvtps_pd(_mm_loadu_ps(d))),
                                         _mm256_mul_pd(wv, _mm256_load_pd(m))));
}

/* A chunk of one corrected gradient. */
INLINE void corrected(const sk_term *t, const float *m, const double *wide, size_t at, __m256 *x) {
    float buffer[CHUNK];
    const float *d = clipped(t, at, buffer);
    if (t->turn == SK_KEEP) {
        EACH_VECTOR x[j] = LOAD(d + 8 * j);
    } else if (t->turn == SK_SHRINK) {
        __m256 q = _mm256_set1_ps(t->q);
        EACH_VECTOR x[j] = ADD(LOAD(d + 8 * j), MUL(q, LOAD(m + at + 8 * j)));
    } else {
        __m256d wu = _mm256_set1_pd(t->wu), wv = _mm256_set1_pd(t->wv);
        __m256 q = _mm256_set1_ps(t->q);
        EACH_VECTOR x[j] = MUL(_mm256_set_m128(turned(d + 8 * j + 4, wide + 8 * j + 4, wu, wv),
                                               turned(d + 8 * j, wide + 8 * j, wu, wv)),
                               q);
    }
}

FMA INLINE void combine_chunks(const sk_term *terms, size_t count, const float *m, size_t at,
                               size_t n, float *out, int stream, double *sums) {
    const int rotates = sk_any_rotates(terms, count);
    double wide[CHUNK] __attribute__((aligned(32))) = {0};
    lanes squares = load(sums);
    for (size_t i = 0; i < n; i += CHUNK) {
        __m256 sum[VECTORS], x[VECTORS];
        EACH_VECTOR sum[j] = _mm256_setzero_ps();
        if (rotates) widen_chunk(m + at + i, wide);
        for (size_t l = 0; l < count; l++) {
            __m256 k = _mm256_set1_ps(terms[l].k);
            corrected(&terms[l], m, wide, at + i, x);
            EACH_VECTOR sum[j] = ADD(sum[j], MUL(k, x[j]));
        }
        EACH_VECTOR put(out + i + 8 * j, sum[j], stream);
        EACH_VECTOR squares = plus_square(squares, widened(sum[j]));
    }
    store(sums, squares);
}

FMA static void combine(const sk_term *terms, size_t count, const float *m, size_t at, size_t n,
                        float *out, int stream, double *sums) {
    size_t whole = n - n % CHUNK;
    if (stream && ((uintptr_t)out & 31) == 0)
        combine_chunks(terms, count, m, at, whole, out, 1, sums);
    else
        combine_chunks(terms, count, m, at, whole, out, 0, sums);
    if (whole < n)
        sk_combine_by_parts(&sk_blend_portable, terms, count, m, at + whole, n - whole, out + whole,
                            sums);
}

FMA static void scaled(float *out, const float *x, float k, size_t n, double *sums) {
    __m256 kk = _mm256_set1_ps(k);
    lanes squares = load(sums);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 v = MUL(LOAD(x + i), kk);
        STORE(out + i, v);
        squares = plus_square(squares, widened(v));
    }
    store(sums, squares);
    sk_blend_portable.scaled(out + i, x + i, k, n - i, sums);
}

/* The squares of a chunk. What rotates stays in halves: putting them together and widening them again
 * takes as long as the rotation. */
FMA INLINE lanes plus_squares(lanes squares, const sk_term *t, const float *m, const double *wide,
                              size_t at) {
    float buffer[CHUNK];
    const float *d = clipped(t, at, buffer);
    if (t->turn == SK_SHRINK) {
        __m256 q = _mm256_set1_ps(t->q);
        EACH_VECTOR squares = plus_square(
            squares, widened(ADD(LOAD(d + 8 * j), MUL(q, LOAD(m + at + 8 * j)))));
        return squares;
    }
    __m256d wu = _mm256_set1_pd(t->wu), wv = _mm256_set1_pd(t->wv);
    __m128 q = _mm_set1_ps(t->q);
    EACH_VECTOR {
        __m128 low = _mm_mul_ps(turned(d + 8 * j, wide + 8 * j, wu, wv), q);
        __m128 high = _mm_mul_ps(turned(d + 8 * j + 4, wide + 8 * j + 4, wu, wv), q);
        squares = plus_square(squares, (lanes){_mm256_cvtps_pd(low), _mm256_cvtps_pd(high)});
    }
    return squares;
}

FMA static void lengths(const sk_term *terms, size_t count, const float *m, size_t at, size_t n,
                        double *sums, size_t stride) {
    const size_t whole = n - n % CHUNK;
    for (size_t first = 0, some; first < count; first += some) {
        const sk_term *t = terms + first;
        some = count - first < TOGETHER ? count - first : TOGETHER;
        const int rotates = sk_any_rotates(t, some);
        double wide[CHUNK] __attribute__((aligned(32))) = {0};
        double squares[TOGETHER][SK_LANES] = {{0}};
        for (size_t i = 0; i < whole; i += CHUNK) {
            if (rotates) widen_chunk(m + at + i, wide);
            for (size_t l = 0; l < some; l++)
                if (t[l].turn != SK_KEEP)
                    store(squares[l], plus_squares(load(squares[l]), &t[l], m, wide, at + i));
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

static inline __m256i magnitude(__m256 x) {
    return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(SK_ABS));
}

static inline int above(__m256i max_abs, uint32_t most) {
    __m256i limit = _mm256_set1_epi32((int)most);
    return _mm256_movemask_epi8(_mm256_cmpgt_epi32(max_abs, limit)) != 0;
}

static size_t scan(const float *x, size_t n) {
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        __m256i a = _mm256_max_epu32(magnitude(LOAD(x + i)), magnitude(LOAD(x + i + 8)));
        __m256i b = _mm256_max_epu32(magnitude(LOAD(x + i + 16)), magnitude(LOAD(x + i + 24)));
        if (above(_mm256_max_epu32(a, b), SK_FINITE_MAX)) break;
    }
    return i + sk_blend_portable.scan(x + i, n - i);
}

/* One vector of an outer step; returns the largest magnitude it wrote. */
typedef __m256i (*step_fn)(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at, __m256 g,
                           int stream);

INLINE __m256i step_nesterov(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at,
                             __m256 g, int stream) {
    __m256 mu = _mm256_set1_ps(o->mu), lr = _mm256_set1_ps(o->lr);
    __m256 b = ADD(MUL(mu, LOAD(a->state[0] + at)), g);
    __m256 p = SUB(LOAD(a->params + at), MUL(lr, ADD(g, MUL(mu, b))));
    put(a->state_out[0] + at, b, stream);
    put(a->params_out + at, p, stream);
    return _mm256_max_epu32(magnitude(b), magnitude(p));
}

INLINE __m256i step_sgd(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at, __m256 g,
                        int stream) {
    __m256 p = SUB(LOAD(a->params + at), MUL(_mm256_set1_ps(o->lr), g));
    put(a->params_out + at, p, stream);
    return magnitude(p);
}

static inline __m256 delayed_params(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at,
                                    __m256 g, __m256 b) {
    __m256 step = ADD(MUL(_mm256_set1_ps(o->k), b), _mm256_div_ps(g, _mm256_set1_ps(o->period)));
    return SUB(LOAD(a->params + at), MUL(_mm256_set1_ps(o->lr), step));
}

INLINE __m256i step_hold(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at, __m256 g,
                         int stream) {
    __m256 b = LOAD(a->state[0] + at), sum = ADD(LOAD(a->state[1] + at), g);
    __m256 p = delayed_params(o, a, at, g, b);
    put(a->state_out[0] + at, b, stream);
    put(a->state_out[1] + at, sum, stream);
    put(a->params_out + at, p, stream);
    return _mm256_max_epu32(_mm256_max_epu32(magnitude(b), magnitude(sum)), magnitude(p));
}

INLINE __m256i step_apply(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at, __m256 g,
                          int stream) {
    __m256 sum = ADD(LOAD(a->state[1] + at), g);
    __m256 b = ADD(MUL(_mm256_set1_ps(o->mu), LOAD(a->state[0] + at)),
                   _mm256_div_ps(sum, _mm256_set1_ps(o->period)));
    __m256 p = delayed_params(o, a, at, g, b);
    put(a->state_out[0] + at, b, stream);
    put(a->state_out[1] + at, _mm256_setzero_ps(), stream);
    put(a->params_out + at, p, stream);
    return _mm256_max_epu32(magnitude(b), magnitude(p));
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

/* Elements before the first cache line that all outputs begin with, or n if there is none. */
INLINE size_t before_line(const sk_outer_arrays *a, int states, size_t at, size_t n) {
    uintptr_t start = (uintptr_t)(a->params_out + at), others = 0;
    size_t head = (-start & 63) / sizeof(float);
    for (int s = 0; s < states; s++) others |= start ^ (uintptr_t)(a->state_out[s] + at);
    return (others & 63) || head > n ? n : head;
}

/* Whole vectors of [i, end); returns the first that is left. */
INLINE size_t vectors(step_fn step, int states, const sk_outer_scalars *o, const sk_outer_arrays *a,
                      size_t at, const float *g, size_t i, size_t end, int stream, size_t *bad) {
    const sk_outer_arrays arrays = *a; /* a local copy cannot alias the stores */
    const sk_outer_scalars scalars = *o;
    for (size_t length; (length = (end - i < PIECE ? end - i : PIECE) & ~(size_t)7); i += length) {
        __m256i max = _mm256_setzero_si256();
        for (size_t j = i; j < i + length; j += 8)
            max = _mm256_max_epu32(max, step(&scalars, &arrays, at + j, LOAD(g + j), stream));
        if (*bad == SIZE_MAX && above(max, scalars.most))
            *bad = i + first_bad(a, states, at + i, length, scalars.most);
    }
    return i;
}

/* Streamed are whole cache lines alone: one that is written both ways is slow. */
INLINE size_t outer(enum sk_outer which, step_fn step, int states, const sk_outer_scalars *o,
                    const sk_outer_arrays *a, size_t at, const float *g, size_t n, int stream) {
    size_t head = stream ? before_line(a, states, at, n) : n, bad = SIZE_MAX, i = 0;
    for (int part = 0; part < 3 && i < n; part++) { /* before the lines, the lines, after them */
        size_t end = part == 0 ? head : part == 1 ? n - (n - head) % 16 : n;
        if (part == 1)
            i = vectors(step, states, o, a, at, g, i, end, 1, &bad);
        else
            i = vectors(step, states, o, a, at, g, i, end, 0, &bad);
        if (i == end) continue;
        size_t found = sk_blend_portable.outer[which](o, a, at + i, g + i, end - i, 0);
        if (found < end - i && bad == SIZE_MAX) bad = i + found;
        i = end;
    }
    return bad == SIZE_MAX ? n : bad;
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
const sk_blend_variant sk_blend_avx2 = {
    "avx2", SK_CPU_AVX2, accumulate, first, scale, blend, shrink, rotate,
    combine, scaled, lengths, scan,
    {[SK_OUTER_NESTEROV] = nesterov,
     [SK_OUTER_SGD] = sgd,
     [SK_OUTER_DELAYED_HOLD] = delayed_hold,
     [SK_OUTER_DELAYED_APPLY] = delayed_apply}};
// clang-format on
