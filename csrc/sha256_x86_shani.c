/* SHA-256 compression with the x86 SHA instructions; one stream, or two interleaved.
 *
 * sha256rnds2 waits for its own result, so one stream leaves the unit idle most of the time: two
 * independent streams in one loop take little longer than one. */
#include "syncer_kernels_impl.h"

#include <immintrin.h>

/* One stream: the two halves of the state in the order the instructions want, and the window of
 * the last 16 message words. */
typedef struct {
    __m128i abef, cdgh, w[4];
} stream;

static inline __attribute__((always_inline)) void load_state(stream *s, const uint32_t state[8]) {
    __m128i low = _mm_loadu_si128((const __m128i *)state);        /* a b c d, a lowest */
    __m128i high = _mm_loadu_si128((const __m128i *)(state + 4)); /* e f g h */
    low = _mm_shuffle_epi32(low, 0xB1);                           /* b a d c */
    high = _mm_shuffle_epi32(high, 0x1B);                         /* h g f e */
    s->abef = _mm_alignr_epi8(low, high, 8);
    s->cdgh = _mm_blend_epi16(high, low, 0xF0);
}

static inline __attribute__((always_inline)) void store_state(const stream *s, uint32_t state[8]) {
    __m128i low = _mm_shuffle_epi32(s->abef, 0x1B);
    __m128i high = _mm_shuffle_epi32(s->cdgh, 0xB1);
    _mm_storeu_si128((__m128i *)state, _mm_blend_epi16(low, high, 0xF0));
    _mm_storeu_si128((__m128i *)(state + 4), _mm_alignr_epi8(high, low, 8));
}

/* Rounds 4i .. 4i+3; i is a constant of the unrolled loop. */
static inline __attribute__((always_inline)) void four_rounds(stream *s, int i, const uint8_t *data,
                                                              __m128i byte_swap) {
    if (i < 4) {
        __m128i words = _mm_loadu_si128((const __m128i *)(data + 16 * i));
        s->w[i] = _mm_shuffle_epi8(words, byte_swap);
    } else { /* w[t] from w[t-16], w[t-15], w[t-7], w[t-2]: four at once */
        __m128i back7 = _mm_alignr_epi8(s->w[(i + 3) & 3], s->w[(i + 2) & 3], 4);
        __m128i sum = _mm_sha256msg1_epu32(s->w[i & 3], s->w[(i + 1) & 3]);
        s->w[i & 3] = _mm_sha256msg2_epu32(_mm_add_epi32(sum, back7), s->w[(i + 3) & 3]);
    }
    __m128i wk = _mm_add_epi32(s->w[i & 3], _mm_load_si128((const __m128i *)(SK_SHA256_K + 4 * i)));
    s->cdgh = _mm_sha256rnds2_epu32(s->cdgh, s->abef, wk);
    s->abef = _mm_sha256rnds2_epu32(s->abef, s->cdgh, _mm_shuffle_epi32(wk, 0x0E));
}

// clang-format off
#define SIXTEEN(STEP) \
    STEP(0) STEP(1) STEP(2) STEP(3) STEP(4) STEP(5) STEP(6) STEP(7) \
    STEP(8) STEP(9) STEP(10) STEP(11) STEP(12) STEP(13) STEP(14) STEP(15)
// clang-format on

static void compress(uint32_t state[8], const uint8_t *data, size_t blocks) {
    const __m128i byte_swap = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
    stream s;
    load_state(&s, state);
    for (; blocks; blocks--, data += 64) {
        __m128i abef = s.abef, cdgh = s.cdgh;
#define STEP(i) four_rounds(&s, i, data, byte_swap);
        SIXTEEN(STEP)
#undef STEP
        s.abef = _mm_add_epi32(s.abef, abef);
        s.cdgh = _mm_add_epi32(s.cdgh, cdgh);
    }
    store_state(&s, state);
}

static void compress2(uint32_t a[8], const uint8_t *data_a, uint32_t b[8], const uint8_t *data_b,
                      size_t blocks) {
    const __m128i byte_swap = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
    stream s, t;
    load_state(&s, a);
    load_state(&t, b);
    for (; blocks; blocks--, data_a += 64, data_b += 64) {
        __m128i s_abef = s.abef, s_cdgh = s.cdgh, t_abef = t.abef, t_cdgh = t.cdgh;
#define STEP(i)                                                                                    \
    four_rounds(&s, i, data_a, byte_swap);                                                         \
    four_rounds(&t, i, data_b, byte_swap);
        SIXTEEN(STEP)
#undef STEP
        s.abef = _mm_add_epi32(s.abef, s_abef);
        s.cdgh = _mm_add_epi32(s.cdgh, s_cdgh);
        t.abef = _mm_add_epi32(t.abef, t_abef);
        t.cdgh = _mm_add_epi32(t.cdgh, t_cdgh);
    }
    store_state(&s, a);
    store_state(&t, b);
}

const sk_sha256_variant sk_sha256_shani = {"shani", SK_CPU_SSE41 | SK_CPU_SHANI, compress,
                                           compress2};
