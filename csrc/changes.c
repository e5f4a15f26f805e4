/* What is told of a version to a peer that has the one before it: the difference, in q4.
 *
 * Both sides compute what the peer has afterwards, from what it had and from the same q4 bytes, so
 * that they agree to the bit; what q4 has left out is in the next difference. Made of the codecs,
 * piece by piece in the cache. Must not know which peer has what.
 */
#include "parallel.h"
#include "syncer_kernels_impl.h"

#define PIECE 2048 /* elements: whole q4 blocks, and two scratch arrays of 8 KiB */
_Static_assert(PIECE % SK_Q4_BLOCK == 0 && SK_BLOCK % PIECE == 0, "pieces are whole blocks");

typedef struct {
    int dtype;
    const float *values; /* NULL: the change is there, and is applied */
    const uint8_t *base;
    uint8_t *change, *out;
    int64_t first[SK_THREADS_MAX]; /* of each part, the first element that is not finite; or -1 */
} change_job;

static size_t decode_bulk(int dtype, const uint8_t *src, float *out, size_t n) {
    const sk_codec_variant *codec = sk_active.codec;
    return dtype == SK_DTYPE_F32 ? codec->decode_f32(src, out, n, 0, 0)
                                 : codec->decode_bf16(src, out, n, 0, 0);
}

static void encode_bulk(int dtype, const float *src, uint8_t *out, size_t n) {
    if (dtype == SK_DTYPE_BF16)
        sk_active.codec->encode_bf16(src, out, n, 0);
    else
        for (size_t i = 0; i < n; i++) sk_store32(out + 4 * i, sk_bits(src[i]));
}

/* out = base + change; the first index where that is not finite, or n, which who only applies does not
 * ask for. anchor: memory, which holds the base already where the change was made of it. */
static size_t apply_piece(const change_job *job, const uint8_t *base, const uint8_t *change,
                          float *anchor, uint8_t *out, size_t n) {
    const sk_codec_variant *codec = sk_active.codec;
    float delta[PIECE];
    if (job->dtype == SK_DTYPE_BF16 && codec->apply_bf16)
        return codec->apply_bf16(base, change, out, n);
    if (!job->values) decode_bulk(job->dtype, base, anchor, n);
    codec->decode_q4(change, delta, n, 0, 0);
    for (size_t i = 0; i < n; i++) anchor[i] += delta[i];
    encode_bulk(job->dtype, anchor, out, n);
    return job->values ? decode_bulk(job->dtype, out, delta, n) : n;
}

static void change_range(void *context, int part, size_t begin, size_t end) {
    change_job *job = context;
    size_t width = job->dtype == SK_DTYPE_F32 ? 4 : 2;
    float anchor[PIECE], delta[PIECE];
    for (size_t at = begin, n; at < end; at += n) {
        n = end - at < PIECE ? end - at : PIECE;
        uint8_t *change = job->change + at / SK_Q4_BLOCK * SK_Q4_BYTES,
                *out = job->out + width * at;
        const uint8_t *base = job->base + width * at;
        if (job->values) {
            decode_bulk(job->dtype, base, anchor, n);
            for (size_t i = 0; i < n; i++) delta[i] = job->values[at + i] - anchor[i];
            sk_active.codec->encode_q4(delta, change, n);
        }
        size_t found = apply_piece(job, base, change, anchor, out, n);
        if (found < n && job->first[part] < 0) job->first[part] = (int64_t)(at + found);
    }
}

static int64_t run(change_job *job, size_t n, int threads) {
    for (int i = 0; i < SK_THREADS_MAX; i++) job->first[i] = -1;
    sk_ranges(threads, n, SK_BLOCK, change_range, job);
    for (int i = 0; i < SK_THREADS_MAX; i++)
        if (job->first[i] >= 0) return job->first[i];
    return -1;
}

int64_t sk_encode_change(int dtype, const float *values, const uint8_t *base, uint8_t *change,
                         uint8_t *out, size_t n, int threads) {
    change_job job = {.dtype = dtype, .values = values, .base = base, .change = change, .out = out};
    return run(&job, n, threads);
}

void sk_apply_change(int dtype, const uint8_t *base, const uint8_t *change, uint8_t *out, size_t n,
                     int threads) {
    change_job job = {.dtype = dtype, .base = base, .change = (uint8_t *)change, .out = out};
    run(&job, n, threads);
}
