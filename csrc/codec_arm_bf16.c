/* The NEON codecs with the conversion instruction of FEAT_BF16, where the CPU has it.
 *
 * BFCVTN rounds to nearest even, keeps subnormals and quiets a NaN keeping its upper bits, as sk_bf16
 * has it, in the mode that every kernel sets (float_mode.h): under flush-to-zero, another rounding or
 * default NaNs it would give other bits. One instruction takes the place of six, and no NaN has to be
 * looked for. */
#include "syncer_kernels_impl.h"

#include <arm_neon.h>

extern const sk_codec_variant sk_codec_portable, sk_codec_neon;

static size_t decode_f32(const uint8_t *src, float *out, size_t n, uint32_t flip, int stream) {
    return sk_codec_neon.decode_f32(src, out, n, flip, stream);
}

static size_t decode_bf16(const uint8_t *src, float *out, size_t n, uint32_t flip, int stream) {
    return sk_codec_neon.decode_bf16(src, out, n, flip, stream);
}

static size_t decode_q4(const uint8_t *src, float *out, size_t n, uint32_t flip, int stream) {
    return sk_codec_neon.decode_q4(src, out, n, flip, stream);
}

static inline uint8x16_t rounded(const float *src) {
    bfloat16x8_t low = vcvtq_low_bf16_f32(vld1q_f32(src));
    return vreinterpretq_u8_bf16(vcvtq_high_bf16_f32(low, vld1q_f32(src + 4)));
}

static void encode_bf16(const float *src, uint8_t *out, size_t n, int stream) {
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        uint8x16_t a = rounded(src + i), b = rounded(src + i + 8);
        vst1q_u8(out + 2 * i, a);
        vst1q_u8(out + 2 * i + 16, b);
    }
    sk_codec_portable.encode_bf16(src + i, out + 2 * i, n - i, stream);
}

static void encode_q4(const float *src, uint8_t *out, size_t n) {
    sk_codec_neon.encode_q4(src, out, n);
}

const sk_codec_variant sk_codec_arm_bf16 = {
    "bf16", SK_CPU_NEON | SK_CPU_BF16, decode_f32, decode_bf16, decode_q4, encode_bf16, encode_q4,
    NULL};
