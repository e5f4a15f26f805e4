/* Codecs with NEON. Each loop handles whole vectors; ends go through the portable definition.
 *
 * `stream` is not used: stores of whole cache lines are recognised by the core itself (write
 * streaming), and AArch64 has no store that promises to bypass the cache. */
#include "syncer_kernels_impl.h"

#include <arm_neon.h>

extern const sk_codec_variant sk_codec_portable;

/* Elements between two looks at the running maximum of |bits|; see codec_x86_avx2.c. */
#define PIECE 4096

static inline int above_finite(uint32x4_t max_abs) { return vmaxvq_u32(max_abs) > SK_FINITE_MAX; }

static size_t first_bad(const float *out, size_t n) {
    size_t i = 0;
    while (i < n && (sk_bits(out[i]) & SK_ABS) <= SK_FINITE_MAX) i++;
    return i;
}

/* Writes one vector negated or not, and keeps the largest magnitude. */
static inline uint32x4_t finish(float *out, uint32x4_t u, uint32x4_t flip, uint32x4_t max) {
    vst1q_f32(out, vreinterpretq_f32_u32(veorq_u32(u, flip)));
    return vmaxq_u32(max, vandq_u32(u, vdupq_n_u32(SK_ABS)));
}

static size_t decode_f32(const uint8_t *src, float *out, size_t n, uint32_t flip, int stream) {
    size_t bad = n, i = 0;
    uint32x4_t flips = vdupq_n_u32(flip);
    for (size_t length; (length = (n - i < PIECE ? n - i : PIECE) & ~(size_t)7); i += length) {
        uint32x4_t a = vdupq_n_u32(0), b = a;
        for (size_t j = i; j < i + length; j += 8) {
            a = finish(out + j, vreinterpretq_u32_u8(vld1q_u8(src + 4 * j)), flips, a);
            b = finish(out + j + 4, vreinterpretq_u32_u8(vld1q_u8(src + 4 * j + 16)), flips, b);
        }
        if (bad == n && above_finite(vmaxq_u32(a, b))) bad = i + first_bad(out + i, length);
    }
    size_t found = sk_codec_portable.decode_f32(src + 4 * i, out + i, n - i, flip, stream);
    return found < n - i && bad == n ? i + found : bad;
}

static size_t decode_bf16(const uint8_t *src, float *out, size_t n, uint32_t flip, int stream) {
    size_t bad = n, i = 0;
    uint32x4_t flips = vdupq_n_u32(flip);
    for (size_t length; (length = (n - i < PIECE ? n - i : PIECE) & ~(size_t)7); i += length) {
        uint32x4_t a = vdupq_n_u32(0), b = a;
        for (size_t j = i; j < i + length; j += 8) {
            uint16x8_t half = vreinterpretq_u16_u8(vld1q_u8(src + 2 * j));
            a = finish(out + j, vshll_n_u16(vget_low_u16(half), 16), flips, a);
            b = finish(out + j + 4, vshll_high_n_u16(half, 16), flips, b);
        }
        if (bad == n && above_finite(vmaxq_u32(a, b))) bad = i + first_bad(out + i, length);
    }
    size_t found = sk_codec_portable.decode_bf16(src + 2 * i, out + i, n - i, flip, stream);
    return found < n - i && bad == n ? i + found : bad;
}

/* The sum whose upper half is the rounded value; wrong for NaN, which the caller looks for. */
static inline uint32x4_t bf16_sum(float32x4_t x) {
    uint32x4_t u = vreinterpretq_u32_f32(x);
    uint32x4_t odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    return vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7FFF)));
}

static void encode_bf16(const float *src, uint8_t *out, size_t n, int stream) {
    size_t i = 0;
    for (size_t length; (length = (n - i < PIECE ? n - i : PIECE) & ~(size_t)7); i += length) {
        uint32x4_t numbers = vdupq_n_u32(0xFFFFFFFFu);
        for (size_t j = i; j < i + length; j += 8) {
            float32x4_t low = vld1q_f32(src + j), high = vld1q_f32(src + j + 4);
            numbers = vandq_u32(numbers, vandq_u32(vceqq_f32(low, low), vceqq_f32(high, high)));
            uint16x4_t first = vshrn_n_u32(bf16_sum(low), 16);
            uint16x8_t both = vshrn_high_n_u32(first, bf16_sum(high), 16);
            vst1q_u8(out + 2 * j, vreinterpretq_u8_u16(both));
        }
        if (vminvq_u32(numbers) == 0) /* a NaN is unequal to itself */
            sk_codec_portable.encode_bf16(src + i, out + 2 * i, length, stream);
    }
    sk_codec_portable.encode_bf16(src + i, out + 2 * i, n - i, stream);
}

/* ------------------------------------------------------------------ q4 */

/* 4 nibbles in 32-bit lanes. A level above 0 is 2^(level-7): its exponent field is level + 120. */
static inline void q4_decode_four(float *out, uint32x4_t nibble, float32x4_t scale,
                                  uint32x4_t flip) {
    uint32x4_t level = vandq_u32(nibble, vdupq_n_u32(7));
    uint32x4_t power = vshlq_n_u32(vaddq_u32(level, vdupq_n_u32(120)), 23);
    power = vandq_u32(power, vtstq_u32(level, level)); /* level 0 is +0 */
    uint32x4_t value = vreinterpretq_u32_f32(vmulq_f32(vreinterpretq_f32_u32(power), scale));
    uint32x4_t sign = vshlq_n_u32(vshrq_n_u32(nibble, 3), 31);
    vst1q_f32(out, vreinterpretq_f32_u32(veorq_u32(value, veorq_u32(sign, flip))));
}

static inline void q4_decode_sixteen(float *out, uint8x16_t nibbles, float32x4_t scale,
                                     uint32x4_t flip) {
    uint16x8_t low = vmovl_u8(vget_low_u8(nibbles)), high = vmovl_high_u8(nibbles);
    q4_decode_four(out, vmovl_u16(vget_low_u16(low)), scale, flip);
    q4_decode_four(out + 4, vmovl_high_u16(low), scale, flip);
    q4_decode_four(out + 8, vmovl_u16(vget_low_u16(high)), scale, flip);
    q4_decode_four(out + 12, vmovl_high_u16(high), scale, flip);
}

static size_t decode_q4(const uint8_t *src, float *out, size_t n, uint32_t flip, int stream) {
    (void)stream;
    size_t bad = n, i = 0;
    uint32x4_t flips = vdupq_n_u32(flip);
    for (; i + SK_Q4_BLOCK <= n; i += SK_Q4_BLOCK, src += SK_Q4_BYTES) {
        uint32_t scale_bits = sk_load32(src);
        if (sk_q4_scale_bad(scale_bits) && bad == n) bad = i;
        float32x4_t scale = vdupq_n_f32(sk_float(scale_bits));
        for (int j = 0; j < SK_Q4_BLOCK; j += 32) {
            uint8x16_t bytes = vld1q_u8(src + 4 + j / 2);
            uint8x16_t even = vandq_u8(bytes, vdupq_n_u8(15)), odd = vshrq_n_u8(bytes, 4);
            q4_decode_sixteen(out + i + j, vzip1q_u8(even, odd), scale, flips);
            q4_decode_sixteen(out + i + j + 16, vzip2q_u8(even, odd), scale, flips);
        }
    }
    if (i < n) {
        if (sk_q4_scale_bad(sk_load32(src)) && bad == n) bad = i;
        sk_q4_decode_block(src, out + i, n - i, flip);
    }
    return bad;
}

static inline uint32_t q4_max_bits(const float *src) {
    const uint32x4_t mask = vdupq_n_u32(SK_ABS);
    uint32x4_t a = vdupq_n_u32(0), b = a;
    for (int i = 0; i < SK_Q4_BLOCK; i += 8) {
        a = vmaxq_u32(a, vandq_u32(vreinterpretq_u32_f32(vld1q_f32(src + i)), mask));
        b = vmaxq_u32(b, vandq_u32(vreinterpretq_u32_f32(vld1q_f32(src + i + 4)), mask));
    }
    return vmaxvq_u32(vmaxq_u32(a, b));
}

/* Nibbles of 4 values without a division; see sk_q4_base. */
static inline uint32x4_t q4_nibbles(const float *src, uint32x4_t base, uint32x4_t *nearest) {
    uint32x4_t bits = vreinterpretq_u32_f32(vld1q_f32(src));
    int32x4_t raw = vreinterpretq_s32_u32(vaddq_u32(vandq_u32(bits, vdupq_n_u32(SK_ABS)), base));
    uint32x4_t sum = vreinterpretq_u32_s32(vmaxq_s32(raw, vdupq_n_s32(1 << 22)));
    *nearest = vminq_u32(*nearest, vandq_u32(sum, vdupq_n_u32((1u << 23) - 1)));
    uint32x4_t level = vshrq_n_u32(sum, 23);
    uint32x4_t sign = vandq_u32(vshrq_n_u32(bits, 28), vdupq_n_u32(8));
    return vorrq_u32(level, vandq_u32(sign, vtstq_u32(level, level)));
}

static inline int q4_encode_whole(const float *src, uint32_t scale_bits, uint8_t *out) {
    uint32x4_t base = vdupq_n_u32(sk_q4_base(scale_bits)), nearest = vdupq_n_u32(0xFFFFFFFFu);
    sk_store32(out, scale_bits);
    for (int j = 0; j < SK_Q4_BLOCK; j += 16) {
        uint32x4_t a = q4_nibbles(src + j, base, &nearest);
        uint32x4_t b = q4_nibbles(src + j + 4, base, &nearest);
        uint32x4_t c = q4_nibbles(src + j + 8, base, &nearest);
        uint32x4_t d = q4_nibbles(src + j + 12, base, &nearest);
        uint16x8_t low = vmovn_high_u32(vmovn_u32(a), b), high = vmovn_high_u32(vmovn_u32(c), d);
        uint16x8_t pairs = vreinterpretq_u16_u8(vmovn_high_u16(vmovn_u16(low), high));
        vst1_u8(out + 4 + j / 2, vmovn_u16(vorrq_u16(pairs, vshrq_n_u16(pairs, 4))));
    }
    return vminvq_u32(nearest) >= 2 * SK_Q4_NEAR;
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

const sk_codec_variant sk_codec_neon = {"neon",    SK_CPU_NEON, decode_f32, decode_bf16,
                                        decode_q4, encode_bf16, encode_q4,  NULL};
