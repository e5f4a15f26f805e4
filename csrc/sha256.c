/* SHA-256 streams over the selected compression function: buffering, padding, the pair. */
#include "syncer_kernels_impl.h"

void sk_sha256_init(sk_sha256 *s) {
    static const uint32_t initial[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                        0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    memcpy(s->state, initial, sizeof initial);
    s->bytes = 0;
}

void sk_sha256_update(sk_sha256 *s, const uint8_t *data, size_t n) {
    if (n == 0) return;
    size_t held = s->bytes % 64;
    s->bytes += n;
    if (held) {
        size_t wanted = 64 - held;
        if (n < wanted) {
            memcpy(s->tail + held, data, n);
            return;
        }
        memcpy(s->tail + held, data, wanted);
        sk_active.sha256->compress(s->state, s->tail, 1);
        data += wanted;
        n -= wanted;
    }
    if (n >= 64) sk_active.sha256->compress(s->state, data, n / 64);
    if (n % 64) memcpy(s->tail, data + n / 64 * 64, n % 64);
}

/* Writes the one or two closing blocks; returns how many. */
static size_t closing_blocks(const sk_sha256 *s, uint8_t last[128]) {
    size_t held = s->bytes % 64, blocks = held < 56 ? 1 : 2;
    memset(last, 0, 128);
    memcpy(last, s->tail, held);
    last[held] = 0x80;
    uint64_t length_bits = s->bytes * 8;
    for (int i = 0; i < 8; i++) last[blocks * 64 - 1 - i] = (uint8_t)(length_bits >> (8 * i));
    return blocks;
}

static void write_digest(const uint32_t state[8], uint8_t out[32]) {
    for (int i = 0; i < 8; i++) {
        out[4 * i] = (uint8_t)(state[i] >> 24);
        out[4 * i + 1] = (uint8_t)(state[i] >> 16);
        out[4 * i + 2] = (uint8_t)(state[i] >> 8);
        out[4 * i + 3] = (uint8_t)state[i];
    }
}

void sk_sha256_digest(const sk_sha256 *s, uint8_t out[32]) {
    uint32_t state[8];
    uint8_t last[128];
    size_t blocks = closing_blocks(s, last);
    memcpy(state, s->state, sizeof state);
    sk_active.sha256->compress(state, last, blocks);
    write_digest(state, out);
}

void sk_sha256_update_pair(sk_sha256 *a, const uint8_t *data_a, size_t na, sk_sha256 *b,
                           const uint8_t *data_b, size_t nb) {
    /* Bytes held back in a stream shift it against its data, so such a pair goes one by one. */
    size_t together = a->bytes % 64 || b->bytes % 64 ? 0 : (na < nb ? na : nb) / 64;
    if (together) {
        sk_active.sha256->compress2(a->state, data_a, b->state, data_b, together);
        a->bytes += (uint64_t)together * 64;
        b->bytes += (uint64_t)together * 64;
        data_a += together * 64;
        data_b += together * 64;
    }
    sk_sha256_update(a, data_a, na - together * 64);
    sk_sha256_update(b, data_b, nb - together * 64);
}

void sk_sha256_pair(const uint8_t *a, size_t na, const uint8_t *b, size_t nb, uint8_t out_a[32],
                    uint8_t out_b[32]) {
    sk_sha256 sa, sb;
    sk_sha256_init(&sa);
    sk_sha256_init(&sb);
    sk_sha256_update_pair(&sa, a, na, &sb, b, nb);
    sk_sha256_digest(&sa, out_a);
    sk_sha256_digest(&sb, out_b);
}
