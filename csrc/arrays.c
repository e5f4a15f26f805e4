/* Kernels over whole arrays: the selected variants, cut over threads.
 *
 * Must not: compute anything itself but the left-to-right total of block sums.
 *
 * The product calls decode, both encoders, sumsq, dot, blend and scan. The others (encode_range,
 * three, rotated_sumsq, accumulate, first, scale, shrink, rotate, outer_step) live for sk_check,
 * tests and benchmarks: a merge runs those kernels block by block (merge_*.c), which hides each
 * behind all others, while here every one can be held against its definition over arrays of any
 * length and any number of threads. Their Python faces are in syncer/kernels/testing.py.
 */
#include "parallel.h"
#include "syncer_kernels_impl.h"

/* Below this a second thread costs more than it saves (a parallel region is some microseconds). */
#define GRAIN SK_BLOCK
/* Outputs larger than this are written past the cache; see benchmarks/README.md. */
#define STREAM_BYTES ((size_t)8 << 20)

int sk_has_openmp(void) {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}

const char *sk_compiler(void) {
#if defined(__clang__)
    return "clang " __clang_version__;
#elif defined(__GNUC__)
    return "gcc " __VERSION__;
#else
    return "unknown";
#endif
}

/* A scan cut over threads: each part stores its first bad index here, the lowest part wins. */
typedef struct {
    size_t first[SK_THREADS_MAX];
} bad_parts;

static void bad_init(bad_parts *bad) {
    for (int i = 0; i < SK_THREADS_MAX; i++) bad->first[i] = SIZE_MAX;
}

static void bad_set(bad_parts *bad, int part, size_t begin, size_t found, size_t length) {
    if (found < length) bad->first[part] = begin + found;
}

static int64_t bad_result(const bad_parts *bad) {
    for (int i = 0; i < SK_THREADS_MAX; i++)
        if (bad->first[i] != SIZE_MAX) return (int64_t)bad->first[i];
    return -1;
}

/* ------------------------------------------------------------------ codecs */

typedef struct {
    int dtype, stream;
    const uint8_t *src;
    float *out;
    uint32_t flip;
    bad_parts bad;
} decode_job;

static void decode_range(void *context, int part, size_t begin, size_t end) {
    decode_job *job = context;
    const sk_codec_variant *codec = sk_active.codec;
    size_t n = end - begin, found;
    float *out = job->out + begin;
    if (job->dtype == SK_DTYPE_F32)
        found = codec->decode_f32(job->src + 4 * begin, out, n, job->flip, job->stream);
    else if (job->dtype == SK_DTYPE_BF16)
        found = codec->decode_bf16(job->src + 2 * begin, out, n, job->flip, job->stream);
    else
        found = codec->decode_q4(job->src + begin / SK_Q4_BLOCK * SK_Q4_BYTES, out, n, job->flip,
                                 job->stream);
    bad_set(&job->bad, part, begin, found, n);
}

int64_t sk_decode(int dtype, const uint8_t *src, float *out, size_t n, size_t whole, int negate,
                  int threads) {
    int moves = src != (const uint8_t *)out; /* what is read in its place is in the cache by then */
    decode_job job = {.dtype = dtype,
                      .stream = moves && (n > whole ? n : whole) >= STREAM_BYTES / sizeof(float),
                      .src = src,
                      .out = out,
                      .flip = negate ? SK_SIGN : 0};
    bad_init(&job.bad);
    sk_ranges(threads, n, GRAIN, decode_range, &job);
    return bad_result(&job.bad);
}

typedef struct {
    const float *src;
    uint8_t *out;
    int stream;
} encode_job;

static void encode_bf16_range(void *context, int part, size_t begin, size_t end) {
    (void)part;
    const encode_job *job = context;
    sk_active.codec->encode_bf16(job->src + begin, job->out + 2 * begin, end - begin, job->stream);
}

void sk_encode_bf16(const float *src, uint8_t *out, size_t n, int threads) {
    encode_job job = {src, out, n * 2 >= STREAM_BYTES};
    sk_ranges(threads, n, GRAIN, encode_bf16_range, &job);
}

static void encode_q4_range(void *context, int part, size_t begin, size_t end) {
    (void)part;
    const encode_job *job = context;
    sk_active.codec->encode_q4(job->src + begin, job->out + begin / SK_Q4_BLOCK * SK_Q4_BYTES,
                               end - begin);
}

void sk_encode_q4(const float *src, uint8_t *out, size_t n, int threads) {
    encode_job job = {src, out, 0};
    sk_ranges(threads, n, GRAIN, encode_q4_range, &job);
}

/* Units of the wire: one f32, one bf16, one q4 block. The bytes of a unit are made together. */
static size_t unit_bytes(int dtype) {
    return dtype == SK_DTYPE_F32 ? 4 : dtype == SK_DTYPE_BF16 ? 2 : SK_Q4_BYTES;
}

/* Units [first, last) of the encoding of n elements. */
static void encode_units(int dtype, const float *src, size_t n, size_t first, size_t last,
                         uint8_t *out, int threads) {
    if (dtype == SK_DTYPE_BF16) {
        sk_encode_bf16(src + first, out, last - first, threads);
    } else if (dtype == SK_DTYPE_Q4) {
        size_t begin = first * SK_Q4_BLOCK, end = last * SK_Q4_BLOCK;
        if (last > first) sk_encode_q4(src + begin, out, (end < n ? end : n) - begin, threads);
    } else {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        for (size_t i = first; i < last; i++) sk_store32(out + 4 * (i - first), sk_bits(src[i]));
#else
        if (last > first) memcpy(out, src + first, 4 * (last - first));
#endif
    }
}

/* Bytes [begin, end) of one unit, which lie inside it. */
static void encode_cut_unit(int dtype, const float *src, size_t n, size_t begin, size_t end,
                            uint8_t *out) {
    uint8_t whole[SK_Q4_BYTES];
    size_t bytes = unit_bytes(dtype), unit = begin / bytes;
    encode_units(dtype, src, n, unit, unit + 1, whole, 1);
    memcpy(out, whole + (begin - unit * bytes), end - begin);
}

void sk_encode_range(int dtype, const float *src, size_t n, size_t begin, size_t end, uint8_t *out,
                     int threads) {
    size_t bytes = unit_bytes(dtype);
    size_t first = begin / bytes + (begin % bytes != 0), last = end / bytes; /* whole units */
    if (first > last) { /* begins and ends inside the same unit */
        encode_cut_unit(dtype, src, n, begin, end, out);
        return;
    }
    if (begin < first * bytes) {
        encode_cut_unit(dtype, src, n, begin, first * bytes, out);
        out += first * bytes - begin;
    }
    encode_units(dtype, src, n, first, last, out, threads);
    if (end > last * bytes)
        encode_cut_unit(dtype, src, n, last * bytes, end, out + (last - first) * bytes);
}

/* ------------------------------------------------------------------ blocked sums */

/* Block sums wait on the stack for their left-to-right addition, one window of blocks at a time:
 * 512 blocks are 8.4 million elements, so a window is long against a parallel region. */
#define WINDOW_BLOCKS 512
#define WINDOW ((size_t)WINDOW_BLOCKS * SK_BLOCK)

enum sum_kind { SUMSQ, DOT, THREE, ROTATED };

typedef struct {
    enum sum_kind kind;
    const float *x, *y;
    double wu, wv;
    double sums[3 * WINDOW_BLOCKS];
} sum_job;

/* What is defined for one block of one gradient. */
static void term_sums(const sum_job *job, size_t begin, size_t n, double *sums) {
    const sk_reduce_variant *reduce = sk_active.reduce;
    const sk_term term = {
        .d = job->x, .wu = job->wu, .wv = job->wv, .clip = 1.0f, .turn = SK_ROTATE};
    for (size_t end = begin + n, some; begin < end; begin += some, sums++) {
        some = end - begin < SK_BLOCK ? end - begin : SK_BLOCK;
        if (job->kind == THREE)
            reduce->measure(&term, 1, job->y, begin, some, sums, WINDOW_BLOCKS);
        else
            reduce->rotated(&term, 1, job->y, begin, some, sums, WINDOW_BLOCKS);
    }
}

static void sum_range(void *context, int part, size_t begin, size_t end) {
    (void)part;
    sum_job *job = context;
    const sk_reduce_variant *reduce = sk_active.reduce;
    double *sums = job->sums + begin / SK_BLOCK;
    size_t n = end - begin;
    switch (job->kind) {
    case SUMSQ: reduce->sumsq(job->x + begin, n, sums); break;
    case DOT: reduce->dot(job->x + begin, job->y + begin, n, sums); break;
    default: term_sums(job, begin, n, sums);
    }
}

static __attribute__((noinline)) void blocked_sums(sum_job *job, size_t n, int rows, double *totals,
                                                   int threads) {
    uint64_t mode = sk_mode_enter(); /* for the totals */
    for (int row = 0; row < rows; row++) totals[row] = 0.0;
    while (n) {
        size_t window = n < WINDOW ? n : WINDOW;
        size_t blocks = window / SK_BLOCK + (window % SK_BLOCK != 0);
        sk_ranges(threads, window, SK_BLOCK, sum_range, job);
        for (int row = 0; row < rows; row++)
            for (size_t i = 0; i < blocks; i++) totals[row] += job->sums[row * WINDOW_BLOCKS + i];
        job->x += window;
        if (job->y) job->y += window;
        n -= window;
    }
    sk_mode_leave(mode);
}

double sk_sumsq(const float *x, size_t n, int threads) {
    sum_job job;
    double total;
    job.kind = SUMSQ, job.x = x, job.y = NULL;
    blocked_sums(&job, n, 1, &total, threads);
    return total;
}

double sk_dot(const float *x, const float *y, size_t n, int threads) {
    sum_job job;
    double total;
    job.kind = DOT, job.x = x, job.y = y;
    blocked_sums(&job, n, 1, &total, threads);
    return total;
}

void sk_three(const float *x, const float *y, size_t n, double out[3], int threads) {
    sum_job job;
    job.kind = THREE, job.x = x, job.y = y, job.wu = job.wv = 0.0;
    blocked_sums(&job, n, 3, out, threads);
}

double sk_rotated_sumsq(const float *d, const float *m, double wu, double wv, size_t n,
                        int threads) {
    sum_job job;
    double total;
    job.kind = ROTATED, job.x = d, job.y = m, job.wu = wu, job.wv = wv;
    blocked_sums(&job, n, 1, &total, threads);
    return total;
}

/* ------------------------------------------------------------------ element-wise */

enum blend_kind { ACCUMULATE, FIRST, SCALE, BLEND, SHRINK, ROTATE };

typedef struct {
    enum blend_kind kind;
    float *out;
    const float *x, *y;
    float k, k2;
    double wu, wv;
} blend_job;

static void blend_range(void *context, int part, size_t begin, size_t end) {
    (void)part;
    const blend_job *job = context;
    const sk_blend_variant *blend = sk_active.blend;
    float *out = job->out + begin;
    size_t n = end - begin;
    switch (job->kind) {
    case ACCUMULATE: blend->accumulate(out, job->x + begin, job->k, n); break;
    case FIRST: blend->first(out, job->x + begin, job->k, n); break;
    case SCALE: blend->scale(out, job->k, n); break;
    case BLEND: blend->blend(out, job->x + begin, job->k, job->k2, n); break;
    case SHRINK: blend->shrink(out, job->x + begin, job->y + begin, job->k, n); break;
    case ROTATE:
        blend->rotate(out, job->x + begin, job->y + begin, job->wu, job->wv, job->k, n);
        break;
    }
}

void sk_accumulate(float *out, const float *g, float k, size_t n, int threads) {
    blend_job job = {.kind = ACCUMULATE, .out = out, .x = g, .k = k};
    sk_ranges(threads, n, GRAIN, blend_range, &job);
}

void sk_first(float *out, const float *g, float k, size_t n, int threads) {
    blend_job job = {.kind = FIRST, .out = out, .x = g, .k = k};
    sk_ranges(threads, n, GRAIN, blend_range, &job);
}

void sk_scale(float *out, float k, size_t n, int threads) {
    blend_job job = {.kind = SCALE, .out = out, .k = k};
    sk_ranges(threads, n, GRAIN, blend_range, &job);
}

void sk_blend(float *theta, const float *anchor, float a, float b, size_t n, int threads) {
    blend_job job = {.kind = BLEND, .out = theta, .x = anchor, .k = a, .k2 = b};
    sk_ranges(threads, n, GRAIN, blend_range, &job);
}

void sk_shrink(float *out, const float *d, const float *m, float q, size_t n, int threads) {
    blend_job job = {.kind = SHRINK, .out = out, .x = d, .y = m, .k = q};
    sk_ranges(threads, n, GRAIN, blend_range, &job);
}

void sk_rotate(float *out, const float *d, const float *m, double wu, double wv, float s, size_t n,
               int threads) {
    blend_job job = {.kind = ROTATE, .out = out, .x = d, .y = m, .k = s, .wu = wu, .wv = wv};
    sk_ranges(threads, n, GRAIN, blend_range, &job);
}

typedef struct {
    const float *x;
    int outer, stream;
    const sk_outer_scalars *scalars;
    const sk_outer_arrays *arrays;
    bad_parts bad;
} scan_job;

static void scan_range(void *context, int part, size_t begin, size_t end) {
    scan_job *job = context;
    size_t found = sk_active.blend->scan(job->x + begin, end - begin);
    bad_set(&job->bad, part, begin, found, end - begin);
}

int64_t sk_scan(const float *x, size_t n, int threads) {
    scan_job job = {.x = x};
    bad_init(&job.bad);
    sk_ranges(threads, n, GRAIN, scan_range, &job);
    return bad_result(&job.bad);
}

static void outer_range(void *context, int part, size_t begin, size_t end) {
    scan_job *job = context;
    size_t found = sk_active.blend->outer[job->outer](job->scalars, job->arrays, begin,
                                                      job->x + begin, end - begin, job->stream);
    sk_stores_done();
    bad_set(&job->bad, part, begin, found, end - begin);
}

int64_t sk_outer_step(int outer, const sk_outer_scalars *scalars, const sk_outer_arrays *arrays,
                      const float *g, size_t n, int threads) {
    scan_job job = {.x = g,
                    .outer = outer,
                    .stream = n * sizeof(float) >= STREAM_BYTES &&
                              arrays->params != arrays->params_out,
                    .scalars = scalars,
                    .arrays = arrays};
    bad_init(&job.bad);
    sk_ranges(threads, n, GRAIN, outer_range, &job);
    return bad_result(&job.bad);
}
