/* Codecs with AVX2. Each loop handles whole vectors; ends go through the portable definition. */
#include "syncer_kernels_impl.h"

#include <immintrin.h>

extern const sk_codec_variant sk_codec_portable;

/* Elements between two looks at the running maximum of |bits|: a bad one is rare, so the loops only
 * keep the maximum, and the place is searched afterwards in the piece where it happened. */
#define PIECE 4096
#define INLINE static inline __attribute__((always_inline))

static inline int above_finite(__m256i max_abs) {
    __m256i limit = _mm256_set1_epi32((int)SK_FINITE_MAX);
    return _mm256_movemask_epi8(_mm256_cmpgt_epi32(max_abs, limit)) != 0;
}

static inline void put(float *out, __m256i v, int stream) {
    if (stream)
        _mm256_stream_si256((__m256i *)out, v);
    else
        _mm256_storeu_si256((__m256i *)out, v);
}

static size_t first_bad(const float *out, size_t n) {
    size_t i = 0;
    while (i < n && (sk_bits(out[i]) & SK_ABS) <= SK_FINITE_MAX) i++;
    return i;
}

/* Elements before `out` reaches a 32-byte boundary, which streaming stores need. */
static inline size_t elements_to_align(const float *out, size_t n) {
    size_t lead = (32 - ((uintptr_t)out & 31)) % 32 / sizeof(float);
    return lead < n ? lead : n;
}

/* One piece of f32: n is a multiple of 8. Returns whether something was not finite. */
INLINE int piece_f32(const uint8_t *src, float *out, size_t n, __m256i flip, int stream) {
    __m256i mask = _mm256_set1_epi32(SK_ABS), max = _mm256_setzero_si256();
    for (size_t i = 0; i < n; i += 8) {
        __m256i u = _mm256_loadu_si256((const __m256i *)(src + 4 * i));
        max = _mm256_max_epu32(max, _mm256_and_si256(u, mask));
        put(out + i, _mm256_xor_si256(u, flip), stream);
    }
    return above_finite(max);
}

INLINE int piece_bf16(const uint8_t *src, float *out, size_t n, __m256i flip, int stream) {
    __m256i mask = _mm256_set1_epi32(SK_ABS), max = _mm256_setzero_si256();
    for (size_t i = 0; i < n; i += 8) {
        __m128i half = _mm_loadu_si128((const __m128i *)(src + 2 * i));
        __m256i u = _mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16);
        max = _mm256_max_epu32(max, _mm256_and_si256(u, mask));
        put(out + i, _mm256_xor_si256(u, flip), stream);
    }
    return above_finite(max);
}

typedef int (*piece_fn)(const uint8_t *src, float *out, size_t n, __m256i flip, int stream);
typedef size_t (*element_fn)(const uint8_t *src, float *out, size_t n, uint32_t flip, int stream);

/* Lead to the boundary, pieces, tail; `width` is the bytes of one element on the wire. */
INLINE size_t decode(const uint8_t *src, float *out, size_t n, uint32_t flip, int stream,
                     size_t width, piece_fn piece, element_fn elements) {
    size_t bad = n, i = 0;
    if (stream) {
        i = elements_to_align(out, n);
        size_t found = elements(src, out, i, flip, 0);
        if (found < i) bad = found;
    }
    __m256i flips = _mm256_set1_epi32((int)flip);
    for (size_t length; (length = (n - i < PIECE ? n - i : PIECE) & ~(size_t)7); i += length) {
        int failed = stream ? piece(src + width * i, out + i, length, flips, 1)
                            : piece(src + width * i, out + i, length, flips, 0);
        if (failed && bad == n) bad = i + first_bad(out + i, length);
    }
    if (stream) _mm_sfence();
    size_t found = elements(src + width * i, out + i, n - i, flip, 0);
    return found < n - i && bad == n ? i + found : bad;
}

static size_t decode_f32(const uint8_t *src, float *out, size_t n, uint32_t flip, int stream) {
    return decode(src, out, n, flip, stream, 4, piece_f32, sk_codec_portable.decode_f32);
}

static size_t decode_bf16(const uint8_t *src, float *out, size_t n, uint32_t flip, int stream) {
    return decode(src, out, n, flip, stream, 2, piece_bf16, sk_codec_portable.decode_bf16);
}

/* Results in the low halves of the 32-bit lanes; wrong for NaN, which the caller looks for. */
static inline __m256i bf16_of_number(__m256 x) {
    __m256i u = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
    return _mm256_srli_epi32(_mm256_add_epi32(u, half), 16);
}

/* Elements that are fetched ahead, to read and to write. There is so much to compute between two
 * lines that a core has too few of them under way by itself: out of memory into the cache 0.19 to
 * 0.29 s for a GB of bf16, where reading takes 0.09, and 0.11 so (docs/performance.md). What lies
 * behind the end is what is encoded next, or does no harm: a fetch never faults. */
#define AHEAD 2048

/* One piece, n a multiple of 16; returns whether it held a NaN. */
INLINE int piece_encode_bf16(const float *src, uint8_t *out, size_t n, int stream) {
    __m256 nan = _mm256_setzero_ps();
    for (size_t i = 0; i < n; i += 16) {
        __builtin_prefetch((const void *)((uintptr_t)(src + i) + 4 * AHEAD));
        if (!stream) __builtin_prefetch((const void *)((uintptr_t)(out + 2 * i) + 2 * AHEAD), 1);
        __m256 low = _mm256_loadu_ps(src + i), high = _mm256_loadu_ps(src + i + 8);
        nan = _mm256_or_ps(nan, _mm256_cmp_ps(low, high, _CMP_UNORD_Q)); /* either one */
        __m256i both = _mm256_packus_epi32(bf16_of_number(low), bf16_of_number(high));
        both = _mm256_permute4x64_epi64(both, 0xD8); /* pack works in 128-bit halves */
        if (stream)
            _mm256_stream_si256((__m256i *)(out + 2 * i), both);
        else
            _mm256_storeu_si256((__m256i *)(out + 2 * i), both);
    }
    return _mm256_movemask_ps(nan) != 0;
}

static void encode_bf16(const float *src, uint8_t *out, size_t n, int stream) {
    size_t i = 0;
    stream = stream && ((uintptr_t)out & 1) == 0;
    if (stream) {
        size_t lead = (32 - ((uintptr_t)out & 31)) % 32 / 2;
        i = lead < n ? lead : n;
        sk_codec_portable.encode_bf16(src, out, i, 0);
    }
    for (size_t length; (length = (n - i < PIECE ? n - i : PIECE) & ~(size_t)15); i += length) {
        int nan = stream ? piece_encode_bf16(src + i, out + 2 * i, length, 1)
                         : piece_encode_bf16(src + i, out + 2 * i, length, 0);
        if (nan) sk_codec_portable.encode_bf16(src + i, out + 2 * i, length, 0);
    }
    if (stream) _mm_sfence();
    sk_codec_portable.encode_bf16(src + i, out + 2 * i, n - i, 0);
}

/* ------------------------------------------------------------------ q4 */

/* A block cannot be cut at a 32-byte boundary, so streaming goes by 16 bytes: every allocator gives
 * arrays that are aligned so. */
static inline void put_halves(float *out, __m256i v) {
    _mm_stream_si128((__m128i *)out, _mm256_castsi256_si128(v));
    _mm_stream_si128((__m128i *)(out + 4), _mm256_extracti128_si256(v, 1));
}

/* What each level of a block stands for. */
INLINE __m256i q4_table(uint32_t scale_bits, uint32_t flip) {
    __m256 scale = _mm256_set1_ps(sk_float(scale_bits));
    __m256i table = _mm256_castps_si256(_mm256_mul_ps(_mm256_loadu_ps(SK_Q4_LEVELS), scale));
    return _mm256_xor_si256(table, _mm256_set1_epi32((int)flip));
}

/* Bits of the values of 4 bytes, which hold 8 nibbles, lowest first. */
INLINE __m256i q4_eight(const uint8_t *src, __m256i table) {
    const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    const __m256i sign = _mm256_set1_epi32((int)SK_SIGN);
    __m256i nibbles = _mm256_srlv_epi32(_mm256_set1_epi32((int)sk_load32(src)), shifts);
    __m256i value = _mm256_permutevar8x32_epi32(table, nibbles); /* looks at 3 bits only */
    return _mm256_xor_si256(value, _mm256_and_si256(_mm256_slli_epi32(nibbles, 28), sign));
}

INLINE void q4_decode_whole(const uint8_t *src, float *out, uint32_t flip, int stream) {
    const __m256i table = q4_table(sk_load32(src), flip);
    for (int i = 0; i < SK_Q4_BLOCK; i += 8) {
        __m256i value = q4_eight(src + 4 + i / 2, table);
        if (stream)
            put_halves(out + i, value);
        else
            put(out + i, value, 0);
    }
}

static size_t decode_q4(const uint8_t *src, float *out, size_t n, uint32_t flip, int stream) {
    size_t bad = n, i = 0;
    stream = stream && ((uintptr_t)out & 15) == 0;
    for (; i + SK_Q4_BLOCK <= n; i += SK_Q4_BLOCK, src += SK_Q4_BYTES) {
        if (sk_q4_scale_bad(sk_load32(src)) && bad == n) bad = i;
        if (stream)
            q4_decode_whole(src, out + i, flip, 1);
        else
            q4_decode_whole(src, out + i, flip, 0);
    }
    if (stream) _mm_sfence();
    if (i < n) {
        if (sk_q4_scale_bad(sk_load32(src)) && bad == n) bad = i;
        sk_q4_decode_block(src, out + i, n - i, flip);
    }
    return bad;
}

/* Signed levels (-7 .. 7) of 8 values, without a division.
 *
 * The thresholds of a block, level 1 to 7, are one binade apart up to a few ulp. `base` is such
 * that adding it to the bits of |x| puts threshold k at k*2^23 + SK_Q4_NEAR, up to those few ulp:
 * the level is then the sum shifted down, unless x lies within SK_Q4_NEAR of a threshold. `nearest`
 * keeps the smallest distance to the places where that happens; the caller redoes such a block. */
static inline __m256i q4_levels(const float *src, __m256i base, __m256i *nearest) {
    __m256i bits = _mm256_loadu_si256((const __m256i *)src);
    __m256i sum = _mm256_add_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(SK_ABS)), base);
    sum = _mm256_max_epi32(sum, _mm256_set1_epi32(1 << 22)); /* below level 1, and far from it */
    __m256i distance = _mm256_and_si256(sum, _mm256_set1_epi32((1 << 23) - 1));
    *nearest = _mm256_min_epu32(*nearest, distance);
    return _mm256_sign_epi32(_mm256_srli_epi32(sum, 23), bits);
}

static inline uint32_t q4_max_bits(const float *src) {
    const __m256i mask = _mm256_set1_epi32(SK_ABS);
    __m256i a = _mm256_setzero_si256(), b = a;
    for (int i = 0; i < SK_Q4_BLOCK; i += 16) {
        __m256i u = _mm256_loadu_si256((const __m256i *)(src + i));
        __m256i v = _mm256_loadu_si256((const __m256i *)(src + i + 8));
        a = _mm256_max_epu32(a, _mm256_and_si256(u, mask));
        b = _mm256_max_epu32(b, _mm256_and_si256(v, mask));
    }
    a = _mm256_max_epu32(a, b);
    __m128i m = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4E));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0xB1));
    return (uint32_t)_mm_cvtsi128_si32(m);
}

static inline uint32_t lowest(__m256i v) {
    __m128i m = _mm_min_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    m = _mm_min_epu32(m, _mm_shuffle_epi32(m, 0x4E));
    m = _mm_min_epu32(m, _mm_shuffle_epi32(m, 0xB1));
    return (uint32_t)_mm_cvtsi128_si32(m);
}

/* One whole block of an ordinary scale; returns 0 if a value was too near to a threshold. */
static inline int q4_encode_whole(const float *src, uint32_t scale_bits, uint8_t *out) {
    /* packs works in 128-bit halves; this puts the 4-byte groups in order. */
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    /* level & 15 -> nibble: 0..7 stay, -7..-1 become 15..9 */
    const __m256i nibble_of = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 0, 15, 14, 13, 12, 11, 10, 9));
    const __m256i base = _mm256_set1_epi32((int)sk_q4_base(scale_bits));
    __m256i nearest = _mm256_set1_epi32(-1);
    sk_store32(out, scale_bits);
    for (int j = 0; j < SK_Q4_BLOCK; j += 32) {
        __m256i a = q4_levels(src + j, base, &nearest);
        __m256i b = q4_levels(src + j + 8, base, &nearest);
        __m256i c = q4_levels(src + j + 16, base, &nearest);
        __m256i d = q4_levels(src + j + 24, base, &nearest);
        __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
        bytes = _mm256_and_si256(bytes, _mm256_set1_epi8(15));
        bytes = _mm256_shuffle_epi8(nibble_of, bytes);
        bytes = _mm256_permutevar8x32_epi32(bytes, order);
        __m256i pairs = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(0x1001)); /* low + 16*high */
        __m128i packed = _mm_packus_epi16(_mm256_castsi256_si128(pairs),
                                          _mm256_extracti128_si256(pairs, 1));
        _mm_storeu_si128((__m128i *)(out + 4 + j / 2), packed);
    }
    return lowest(nearest) >= 2 * SK_Q4_NEAR;
}

static void q4_encode_faint(const float *src, uint32_t scale_bits, uint8_t *out) {
    float large[SK_Q4_BLOCK];
    sk_q4_enlarge(src, large);
    if (!q4_encode_whole(large, q4_max_bits(large), out))
        sk_q4_encode_block(large, SK_Q4_BLOCK, out);
    sk_store32(out, scale_bits);
}

static void encode_q4(const float *src, uint8_t *out, size_t n) {
    size_t i = 0;
    for (; i + SK_Q4_BLOCK <= n; i += SK_Q4_BLOCK, out += SK_Q4_BYTES) {
        uint32_t scale_bits = q4_max_bits(src + i);
        if (scale_bits == 0)
            sk_q4_encode_zeros(out);
        else if (scale_bits < SK_Q4_ORDINARY)
            q4_encode_faint(src + i, scale_bits, out);
        else if (!sk_q4_ordinary(scale_bits) || !q4_encode_whole(src + i, scale_bits, out))
            sk_q4_encode_block(src + i, SK_Q4_BLOCK, out);
    }
    if (i < n) sk_q4_encode_block(src + i, n - i, out);
}

/* ------------------------------------------------------------------ changes of bf16 */

static inline __m256i eight_sums(const uint8_t *base, const uint8_t *nibbles, __m256i table,
                                 __m256 *nan) {
    __m128i half = _mm_loadu_si128((const __m128i *)base);
    __m256 x = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    __m256 sum = _mm256_add_ps(x, _mm256_castsi256_ps(q4_eight(nibbles, table)));
    *nan = _mm256_or_ps(*nan, _mm256_cmp_ps(sum, sum, _CMP_UNORD_Q));
    return bf16_of_number(sum);
}

/* One whole block; returns whether something of it is not finite, or was a NaN and is wrong. */
static inline int apply_whole(const uint8_t *base, const uint8_t *change, uint8_t *out) {
    const __m256i table = q4_table(sk_load32(change), 0), abs = _mm256_set1_epi16(0x7FFF);
    __m256i max = _mm256_setzero_si256();
    __m256 nan = _mm256_setzero_ps();
    for (int i = 0; i < SK_Q4_BLOCK; i += 16) {
        __builtin_prefetch((const void *)((uintptr_t)(base + 2 * i) + 2 * AHEAD));
        __builtin_prefetch((const void *)((uintptr_t)(out + 2 * i) + 2 * AHEAD), 1);
        __m256i low = eight_sums(base + 2 * i, change + 4 + i / 2, table, &nan);
        __m256i high = eight_sums(base + 2 * i + 16, change + 8 + i / 2, table, &nan);
        __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xD8);
        max = _mm256_max_epu16(max, _mm256_and_si256(both, abs));
        _mm256_storeu_si256((__m256i *)(out + 2 * i), both);
    }
    __m256i limit = _mm256_set1_epi16(0x7F7F); /* the largest bf16 that is finite */
    return _mm256_movemask_epi8(_mm256_cmpgt_epi16(max, limit)) || _mm256_movemask_ps(nan);
}

static size_t apply_bf16(const uint8_t *base, const uint8_t *change, uint8_t *out, size_t n) {
    size_t bad = n;
    for (size_t i = 0, some; i < n; i += some, change += SK_Q4_BYTES) {
        some = n - i < SK_Q4_BLOCK ? n - i : SK_Q4_BLOCK;
        if (some < SK_Q4_BLOCK || apply_whole(base + 2 * i, change, out + 2 * i)) {
            size_t found = sk_apply_block(base + 2 * i, change, out + 2 * i, some);
            if (found < some && bad == n) bad = i + found;
        }
    }
    return bad;
}

const sk_codec_variant sk_codec_avx2 = {"avx2",    SK_CPU_AVX2, decode_f32, decode_bf16,
                                        decode_q4, encode_bf16, encode_q4,  apply_bf16};
