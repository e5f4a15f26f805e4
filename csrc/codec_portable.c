/* Codecs as the wire format defines them, one element at a time. */
#include "syncer_kernels_impl.h"

const float SK_Q4_LEVELS[8] = {0.0f,     1.0f / 64, 1.0f / 32, 1.0f / 16,
                               1.0f / 8, 1.0f / 4,  1.0f / 2,  1.0f};
/* 2^-6.5 .. 2^-0.5, shifted by the few ulp where rint(log2f(x)) really steps. */
const uint32_t SK_Q4_THRESHOLDS[7] = {0x3C3504F2, 0x3CB504F6, 0x3D3504F2, 0x3DB504F5,
                                      0x3E3504F3, 0x3EB504F4, 0x3F3504F3};

static size_t decode_f32(const uint8_t *src, float *out, size_t n, uint32_t flip, int stream) {
    (void)stream;
    size_t bad = n;
    for (size_t i = 0; i < n; i++) {
        uint32_t u = sk_load32(src + 4 * i) ^ flip;
        if ((u & SK_ABS) > SK_FINITE_MAX && bad == n) bad = i;
        memcpy(out + i, &u, sizeof u);
    }
    return bad;
}

static size_t decode_bf16(const uint8_t *src, float *out, size_t n, uint32_t flip, int stream) {
    (void)stream;
    size_t bad = n;
    for (size_t i = 0; i < n; i++) {
        uint32_t u = ((uint32_t)sk_load16(src + 2 * i) << 16) ^ flip;
        if ((u & SK_ABS) > SK_FINITE_MAX && bad == n) bad = i;
        memcpy(out + i, &u, sizeof u);
    }
    return bad;
}

static void encode_bf16(const float *src, uint8_t *out, size_t n, int stream) {
    (void)stream;
    for (size_t i = 0; i < n; i++) sk_store16(out + 2 * i, sk_bf16(src[i]));
}

void sk_q4_decode_block(const uint8_t *src, float *out, size_t n, uint32_t flip) {
    float scale = sk_float(sk_load32(src));
    for (size_t i = 0; i < n; i++) {
        unsigned nibble = (src[4 + i / 2] >> (i % 2 ? 4 : 0)) & 15u;
        uint32_t u = sk_bits(SK_Q4_LEVELS[nibble & 7] * scale);
        u ^= (nibble & 8 ? SK_SIGN : 0) ^ flip;
        memcpy(out + i, &u, sizeof u);
    }
}

void sk_q4_encode_block(const float *src, size_t n, uint8_t *out) {
    uint32_t scale_bits = 0; /* the largest |x|, by bits: above 0x7F800000 there was a NaN */
    for (size_t i = 0; i < n; i++) {
        uint32_t u = sk_bits(src[i]) & SK_ABS;
        if (u > scale_bits) scale_bits = u;
    }
    if (scale_bits > 0x7F800000u) scale_bits = 0x7FC00000u;
    float scale = sk_float(scale_bits), safe = scale > 0.0f ? scale : 1.0f;
    sk_store32(out, scale_bits);
    memset(out + 4, 0, SK_Q4_BLOCK / 2);
    for (size_t i = 0; i < n; i++) {
        float ratio = sk_float(sk_bits(src[i]) & SK_ABS) / safe;
        unsigned level = 0;
        if (ratio > 0.0f) {
            for (int k = 0; k < 7; k++) level += SK_Q4_THRESHOLDS[k] <= sk_bits(ratio);
        }
        unsigned nibble = level | (src[i] < 0.0f && level ? 8u : 0u);
        out[4 + i / 2] |= (uint8_t)(nibble << (i % 2 ? 4 : 0));
    }
}

size_t sk_apply_block(const uint8_t *base, const uint8_t *change, uint8_t *out, size_t n) {
    float delta[SK_Q4_BLOCK];
    size_t bad = n;
    sk_q4_decode_block(change, delta, n, 0);
    for (size_t i = 0; i < n; i++) {
        float before = sk_float((uint32_t)sk_load16(base + 2 * i) << 16);
        uint16_t after = sk_bf16(before + delta[i]);
        if ((after & 0x7FFFu) >= 0x7F80u && bad == n) bad = i;
        sk_store16(out + 2 * i, after);
    }
    return bad;
}

void sk_q4_encode_zeros(uint8_t *out) { memset(out, 0, SK_Q4_BYTES); }

static size_t decode_q4(const uint8_t *src, float *out, size_t n, uint32_t flip, int stream) {
    (void)stream;
    size_t bad = n;
    for (size_t i = 0; i < n; i += SK_Q4_BLOCK, src += SK_Q4_BYTES) {
        if (sk_q4_scale_bad(sk_load32(src)) && bad == n) bad = i;
        sk_q4_decode_block(src, out + i, n - i < SK_Q4_BLOCK ? n - i : SK_Q4_BLOCK, flip);
    }
    return bad;
}

static void encode_q4(const float *src, uint8_t *out, size_t n) {
    for (size_t i = 0; i < n; i += SK_Q4_BLOCK, out += SK_Q4_BYTES)
        sk_q4_encode_block(src + i, n - i < SK_Q4_BLOCK ? n - i : SK_Q4_BLOCK, out);
}

const sk_codec_variant sk_codec_portable = {"portable", 0,           decode_f32, decode_bf16,
                                            decode_q4,  encode_bf16, encode_q4,  NULL};
