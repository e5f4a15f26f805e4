/* SHA-256 compression with the ARMv8 SHA-2 instructions; one stream, or two interleaved: sha256h
 * waits for its own result, and a second stream fills the gaps. */
#include "syncer_kernels_impl.h"

#include <arm_neon.h>

typedef struct {
    uint32x4_t abcd, efgh, w[4];
} stream;

#define INLINE static inline __attribute__((always_inline))

INLINE void load_state(stream *s, const uint32_t state[8]) {
    s->abcd = vld1q_u32(state);
    s->efgh = vld1q_u32(state + 4);
}

INLINE void store_state(const stream *s, uint32_t state[8]) {
    vst1q_u32(state, s->abcd);
    vst1q_u32(state + 4, s->efgh);
}

/* Rounds 4i .. 4i+3; i is a constant of the unrolled loop. */
INLINE void four_rounds(stream *s, int i, const uint8_t *data) {
    if (i < 4) {
        s->w[i] = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(data + 16 * i)));
    } else { /* w[t] from w[t-16], w[t-15], w[t-7], w[t-2]: four at once */
        uint32x4_t sum = vsha256su0q_u32(s->w[i & 3], s->w[(i + 1) & 3]);
        s->w[i & 3] = vsha256su1q_u32(sum, s->w[(i + 2) & 3], s->w[(i + 3) & 3]);
    }
    uint32x4_t wk = vaddq_u32(s->w[i & 3], vld1q_u32(SK_SHA256_K + 4 * i));
    uint32x4_t abcd = s->abcd;
    s->abcd = vsha256hq_u32(abcd, s->efgh, wk);
    s->efgh = vsha256h2q_u32(s->efgh, abcd, wk);
}

// clang-format off
#define SIXTEEN(STEP) \
    STEP(0) STEP(1) STEP(2) STEP(3) STEP(4) STEP(5) STEP(6) STEP(7) \
    STEP(8) STEP(9) STEP(10) STEP(11) STEP(12) STEP(13) STEP(14) STEP(15)
// clang-format on

static void compress(uint32_t state[8], const uint8_t *data, size_t blocks) {
    stream s;
    load_state(&s, state);
    for (; blocks; blocks--, data += 64) {
        uint32x4_t abcd = s.abcd, efgh = s.efgh;
#define STEP(i) four_rounds(&s, i, data);
        SIXTEEN(STEP)
#undef STEP
        s.abcd = vaddq_u32(s.abcd, abcd);
        s.efgh = vaddq_u32(s.efgh, efgh);
    }
    store_state(&s, state);
}

static void compress2(uint32_t a[8], const uint8_t *data_a, uint32_t b[8], const uint8_t *data_b,
                      size_t blocks) {
    stream s, t;
    load_state(&s, a);
    load_state(&t, b);
    for (; blocks; blocks--, data_a += 64, data_b += 64) {
        uint32x4_t s_abcd = s.abcd, s_efgh = s.efgh, t_abcd = t.abcd, t_efgh = t.efgh;
#define STEP(i)                                                                                    \
    four_rounds(&s, i, data_a);                                                                    \
    four_rounds(&t, i, data_b);
        SIXTEEN(STEP)
#undef STEP
        s.abcd = vaddq_u32(s.abcd, s_abcd);
        s.efgh = vaddq_u32(s.efgh, s_efgh);
        t.abcd = vaddq_u32(t.abcd, t_abcd);
        t.efgh = vaddq_u32(t.efgh, t_efgh);
    }
    store_state(&s, a);
    store_state(&t, b);
}

const sk_sha256_variant sk_sha256_armv8 = {"sha2", SK_CPU_NEON | SK_CPU_SHA2, compress, compress2};
