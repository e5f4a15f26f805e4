/* Self-check of every variant that this CPU runs: golden results, and comparison with portable.
 *
 * Must not allocate by itself: the host lends memory, so that a sanitizer sees every access past an
 * end. Selects variants while it runs, and restores the selection. The expected
 * values were computed with the NumPy oracle (tests/golden/merge_reference.py). */
#include "check_internal.h"
#include "float_mode.h"

#define GOLDEN_N SK_CHECK_GOLDEN_N
#define WORDS 10 /* arrays of one comparison */

void sk_check_failed(check *c, const char *what, size_t n) {
    c->failures++;
    c->host->fail(c->host->context, c->family, c->variant, what, n);
}

static void expect_bytes(check *c, const char *what, size_t n, const void *a, const void *b,
                         size_t bytes) {
    if (bytes && memcmp(a, b, bytes) != 0) sk_check_failed(c, what, n);
}

static int hex_equal(const uint8_t *digest, const char *hex) {
    static const char digits[] = "0123456789abcdef";
    for (int i = 0; i < 32; i++)
        if (hex[2 * i] != digits[digest[i] >> 4] || hex[2 * i + 1] != digits[digest[i] & 15])
            return 0;
    return 1;
}

void sk_check_digest(check *c, const char *what, const void *data, size_t bytes, const char *hex) {
    sk_sha256 s;
    uint8_t digest[32];
    sk_sha256_init(&s);
    sk_sha256_update(&s, data, bytes);
    sk_sha256_digest(&s, digest);
    if (!hex_equal(digest, hex)) sk_check_failed(c, what, bytes);
}

uint64_t sk_check_random(uint64_t z) {
    z += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* n values in [-1, 1): the top 24 bits of splitmix64(seed * 2^32 + i). */
static void noise(float *out, uint64_t seed, size_t n) {
    for (size_t i = 0; i < n; i++)
        out[i] = (float)((double)(sk_check_random((seed << 32) + i) >> 40) / 8388608.0 - 1.0);
}

/* ------------------------------------------------------------------ golden results */

enum { G0, G1, G2, MOM, PARAMS, AVG, OUT, OUT2, OUT3 };

static void golden_inputs(float **v) {
    noise(v[MOM], 9, GOLDEN_N);
    noise(v[PARAMS], 10, GOLDEN_N);
    noise(v[G0], 1, GOLDEN_N);
    noise(v[G1], 2, GOLDEN_N);
    noise(v[G2], 3, GOLDEN_N);
    sk_accumulate(v[G0], v[MOM], 0.5f, GOLDEN_N, 1);
    sk_accumulate(v[G1], v[MOM], -0.5f, GOLDEN_N, 1);
}

static void golden_sums(check *c, float **v, int threads) {
    double three[3];
    sk_three(v[G0], v[MOM], GOLDEN_N, three, threads);
    if (sk_sumsq(v[G0], GOLDEN_N, threads) != 0x1.6daef1018fb35p+14)
        sk_check_failed(c, "sumsq", GOLDEN_N);
    if (three[0] != 0x1.6daef1018fb35p+14) sk_check_failed(c, "three sums", GOLDEN_N);
    if (sk_dot(v[G1], v[MOM], GOLDEN_N, threads) != -0x1.25e0756a93a8fp+13)
        sk_check_failed(c, "dot", GOLDEN_N);
    if (sk_rotated_sumsq(v[G2], v[MOM], 0.8123, -0.2511, GOLDEN_N, threads) !=
        0x1.a94335dc3d294p+13)
        sk_check_failed(c, "rotated sum", GOLDEN_N);
}

static void golden_blends(check *c, float **v, int threads) {
    static const double weight[3] = {0x1.0000000000000p+21, 0x1.39e5249249249p+20,
                                     0x1.fca0555555555p+21};
    const double total = weight[0] + weight[1] + weight[2];
    const size_t bytes = GOLDEN_N * sizeof(float);
    for (int l = 0; l < 3; l++)
        (l ? sk_accumulate : sk_first)(v[AVG], v[G0 + l], (float)(weight[l] / total), GOLDEN_N,
                                       threads);
    sk_check_digest(c, "average", v[AVG], bytes,
                    "d6c3dddbe9531d7dd6614de7dc2fb3fc1feb7dd18f46a128a53adcf07d87f9a5");
    memcpy(v[OUT], v[AVG], bytes);
    sk_scale(v[OUT], -1.7f, GOLDEN_N, threads);
    sk_check_digest(c, "scale", v[OUT], bytes,
                    "db2ffd0e00d1d81c2a3efdac7cd51faf1af741dd13c68f62351e3133c66bc2c0");
    memcpy(v[OUT], v[AVG], bytes);
    sk_blend(v[OUT], v[G0], 0.3f, (float)(1 - 0.3), GOLDEN_N, threads);
    sk_check_digest(c, "blend", v[OUT], bytes,
                    "88b3ae7914bd67b88f3165e173cc7268c3a254bdc8e0395cc7b9f329aec4d98e");
    sk_shrink(v[OUT], v[G1], v[MOM], 0.375f, GOLDEN_N, threads);
    sk_check_digest(c, "shrink", v[OUT], bytes,
                    "7ed24955a81e608acf510e7d09698828db40346254b8678856cd8d6063801d7f");
    sk_rotate(v[OUT], v[G2], v[MOM], 0.8123, -0.2511, 1.37f, GOLDEN_N, threads);
    sk_check_digest(c, "rotate", v[OUT], bytes,
                    "96907f26198e034fe5b22370b22592e9110eac90e10519fbca87b33916107da5");
}

static void golden_outer(check *c, float **v, int threads) {
    static const char *const expected[SK_OUTERS][3] = {
        [SK_OUTER_NESTEROV] = {"7cf313d7bb8027072c223e8a30625b6b94afcf1c91f7ca6bc1dc9063bf500b00",
                               "07a14a402667f4aa7f5df9e6cff40f7fe0acd1813369b76361927ed61ae5ffd0",
                               NULL},
        [SK_OUTER_SGD] = {"2012aa83972abbc66858745f453bb5ae80c5324fd306e86ae7725ea34cfc17e0", NULL,
                          NULL},
        [SK_OUTER_DELAYED_HOLD] =
            {"027c19af040d0de32f86c4f7e8be02b94549176b825c0df0927b57c9f2d49c65",
             "b797a89caa4a5c49725a75d7071baa2a4ad9add79fa2ba2e3cb3bc403e4f1fd2",
             "1bf0804e65689aee02b41956da65b53cd9449918c33d1601ef82e82ff0bc7a12"},
        [SK_OUTER_DELAYED_APPLY] = {
            "c3401048ed81ed006f5a4e1de4bf0161a5c660a7a2cd23a485d99a325cd2c55f",
            "a90ef3f7141a706ec35185091697f241d9b59e007b05dad766f193013367d7db",
            "8a1ad45201cb5456292affebde63d8772b1d09fb7c218b88cf01f52ed25ed446"}};
    static const char *const names[SK_OUTERS] = {"nesterov", "sgd", "delayed nesterov, hold",
                                                 "delayed nesterov, apply"};
    for (int outer = 0; outer < SK_OUTERS; outer++) {
        const float mu = 0.9f;
        double factor = outer == SK_OUTER_DELAYED_APPLY ? 1.0 - 0.25 * 2 + 0.25 : 0.25;
        sk_outer_scalars scalars = {0.7f, mu, 2.0f, (float)(factor * (double)mu), SK_FINITE_MAX};
        noise(v[OUT3], 4, GOLDEN_N); /* the accumulator, updated in place */
        sk_outer_arrays arrays = {v[PARAMS], {v[MOM], v[OUT3]}, v[OUT], {v[OUT2], v[OUT3]}};
        if (sk_outer_step(outer, &scalars, &arrays, v[AVG], GOLDEN_N, threads) != -1)
            sk_check_failed(c, names[outer], GOLDEN_N);
        for (int i = 0; i < 3; i++)
            if (expected[outer][i])
                sk_check_digest(c, names[outer], v[OUT + i], GOLDEN_N * sizeof(float),
                                expected[outer][i]);
    }
}

static void golden_codecs(check *c, float **v, int threads) {
    uint8_t *wire = (uint8_t *)v[OUT2];
    size_t q4_bytes = (GOLDEN_N + SK_Q4_BLOCK - 1) / SK_Q4_BLOCK * SK_Q4_BYTES;
    sk_encode_bf16(v[G0], wire, GOLDEN_N, threads);
    sk_check_digest(c, "bf16 encode", wire, GOLDEN_N * 2,
                    "ef392d6172ffc1b988f3f125274ae340e8b1c54984c64f10d1fcce127f8925fc");
    sk_encode_q4(v[G0], wire, GOLDEN_N, threads);
    sk_check_digest(c, "q4 encode", wire, q4_bytes,
                    "acb4ca6a450b1c497dad16f9fe7cbe32ea73649ea34d33c0dfb6cb14baf8fa9d");
    if (sk_decode(SK_DTYPE_Q4, wire, v[OUT], GOLDEN_N, GOLDEN_N, 0, threads) != -1)
        sk_check_failed(c, "q4 decode", GOLDEN_N);
    sk_check_digest(c, "q4 decode", v[OUT], GOLDEN_N * sizeof(float),
                    "95c11212e7a448b6b0c872b906b7510fc7d11df3f563dfb1cd74e03862514c68");
    sk_encode_range(SK_DTYPE_F32, v[G0], GOLDEN_N, 0, 4 * GOLDEN_N, wire, threads);
    if (sk_decode(SK_DTYPE_F32, wire, v[OUT], GOLDEN_N, GOLDEN_N, 1, threads) != -1)
        sk_check_failed(c, "f32 decode", GOLDEN_N);
    sk_check_digest(c, "f32 decode", v[OUT], GOLDEN_N * sizeof(float),
                    "52cad6f442d87d797e364e7eed168dc0e28f9bd7379bf2c6d02edc7d1a7ba11e");
}

static void golden_sha256(check *c, float **v) {
    static const struct {
        const char *message, *digest;
    } nist[] = {{"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
                {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
                {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
                 "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"}};
    for (size_t i = 0; i < sizeof nist / sizeof *nist; i++)
        sk_check_digest(c, "sha256", nist[i].message, strlen(nist[i].message), nist[i].digest);
    memset(v[OUT], 'a', 100000);
    sk_sha256 s;
    uint8_t digest[32], other[32];
    sk_sha256_init(&s);
    for (int i = 0; i < 10; i++) sk_sha256_update(&s, (uint8_t *)v[OUT], 100000);
    sk_sha256_digest(&s, digest);
    if (!hex_equal(digest, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"))
        sk_check_failed(c, "sha256", 1000000);
    sk_sha256_pair((const uint8_t *)"abc", 3, (const uint8_t *)v[OUT], 0, digest, other);
    if (!hex_equal(digest, nist[1].digest) || !hex_equal(other, nist[0].digest))
        sk_check_failed(c, "sha256 pair", 3);
}

static void golden(check *c, int family, float **v) {
    static const int threads[] = {1, 2, 3, 8};
    if (family == SK_SHA256) {
        golden_sha256(c, v);
        return;
    }
    for (size_t i = 0; i < sizeof threads / sizeof *threads; i++) {
        golden_inputs(v);
        if (family == SK_REDUCE) golden_sums(c, v, threads[i]);
        if (family == SK_CODEC) golden_codecs(c, v, threads[i]);
        if (family == SK_BLEND) golden_blends(c, v, threads[i]), golden_outer(c, v, threads[i]);
        sk_check_faint(c, family, v, threads[i]);
    }
}

/* ------------------------------------------------------------------ against portable */

static const size_t lengths[] = {
    0,    1,    2,    3,    4,    5,    7,     8,     9,     15,    16,    17,    23,   31,
    32,   33,   63,   64,   65,   127,  128,   255,   256,   257,   509,   511,   512,  513,
    1021, 4095, 4096, 4097, 4103, 8191, 16383, 16384, 16385, 32767, 32768, 32777, 65543};
#define LONGEST 65543

/* Special values strewn into random ones: zeros, subnormals, bf16 ties, largest, not finite. */
static const uint32_t special[] = {0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000,
                                   0x3F808000, 0x3F818000, 0xBF808000, 0x7F7F7FFF, 0x7F7F8000,
                                   0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC12345, 0xFF800001};
#define FINITE_SPECIALS 11

static uint64_t next(check *c) { return sk_check_random(c->seed++); }

/* kind 0: any bits; 1: values that sums and products can take; 2: 1 with non-finite ones. */
static void fill(check *c, float *out, size_t n, int kind) {
    for (size_t i = 0; i < n; i++) {
        uint64_t r = next(c);
        uint32_t bits = (uint32_t)r;
        if (kind) bits = (bits & 0x807FFFFFu) | ((100 + (uint32_t)((r >> 32) % 45)) << 23);
        unsigned which = (unsigned)((r >> 40) % 400);
        if (which < (kind == 1 ? FINITE_SPECIALS - 6 : sizeof special / sizeof *special))
            bits = special[which];
        memcpy(out + i, &bits, sizeof bits);
    }
}

static void fill_bytes(check *c, uint8_t *out, size_t n) {
    for (size_t i = 0; i < n; i++) out[i] = (uint8_t)next(c);
}

/* Exact-size memory: a read or write past its end is one past the host's allocation. */
static void *lend(check *c, size_t bytes) { return c->host->lend(c->host->context, bytes); }
static void give_back(check *c, void *p) { c->host->give_back(c->host->context, p); }

static void compare_sha256(check *c, const sk_sha256_variant *v, const sk_sha256_variant *ref) {
    for (size_t blocks = 0; blocks < 9; blocks++) {
        uint8_t *a = lend(c, blocks * 64), *b = lend(c, blocks * 64);
        uint32_t found[16], expected[16];
        fill_bytes(c, a, blocks * 64);
        fill_bytes(c, b, blocks * 64);
        fill_bytes(c, (uint8_t *)found, sizeof found);
        memcpy(expected, found, sizeof found);
        v->compress(found, a, blocks);
        ref->compress(expected, a, blocks);
        expect_bytes(c, "compress", blocks, found, expected, sizeof found);
        v->compress2(found, a, found + 8, b, blocks);
        ref->compress2(expected, a, expected + 8, b, blocks);
        expect_bytes(c, "compress2", blocks, found, expected, sizeof found);
        give_back(c, a);
        give_back(c, b);
    }
}

typedef size_t (*decode_fn)(const uint8_t *, float *, size_t, uint32_t, int);

static void compare_decode(check *c, const char *what, decode_fn ours, decode_fn ref, size_t n,
                           size_t bytes, size_t unit) {
    uint8_t *wire = lend(c, bytes);
    float *found = lend(c, 4 * n), *expected = lend(c, 4 * n);
    for (int round = 0; round < 3; round++) { /* bytes at random, ordinary values, and streamed */
        fill_bytes(c, wire, bytes);
        if (round)
            for (size_t i = unit == SK_Q4_BYTES ? 3 : unit - 1; i < bytes; i += unit)
                wire[i] &= 0x3F; /* exponents below the non-finite ones, scales >= 0 */
        uint32_t flip = round == 1 ? 0 : SK_SIGN;
        size_t bad = ours(wire, found, n, flip, round == 2);
        size_t bad_ref = ref(wire, expected, n, flip, 0);
        if (bad != bad_ref) sk_check_failed(c, what, n);
        expect_bytes(c, what, n, found, expected, 4 * n);
    }
    give_back(c, wire);
    give_back(c, found);
    give_back(c, expected);
}

/* Of bf16 at `base`, by a q4 of n values: against the definition, block by block. */
static void compare_apply(check *c, const sk_codec_variant *v, const uint8_t *base,
                          const uint8_t *q4, uint8_t *expected, size_t n) {
    uint8_t *found = lend(c, 2 * n);
    size_t bad = n;
    for (size_t i = 0, some; i < n; i += some) {
        some = n - i < SK_Q4_BLOCK ? n - i : SK_Q4_BLOCK;
        size_t at = sk_apply_block(base + 2 * i, q4 + i / SK_Q4_BLOCK * SK_Q4_BYTES,
                                   expected + 2 * i, some);
        if (at < some && bad == n) bad = i + at;
    }
    if (v->apply_bf16(base, q4, found, n) != bad) sk_check_failed(c, "change, first bad index", n);
    expect_bytes(c, "change of bf16", n, found, expected, 2 * n);
    give_back(c, found);
}

static void compare_codec(check *c, const sk_codec_variant *v, const sk_codec_variant *ref,
                          size_t n) {
    size_t q4 = (n + SK_Q4_BLOCK - 1) / SK_Q4_BLOCK * SK_Q4_BYTES;
    compare_decode(c, "f32 decode", v->decode_f32, ref->decode_f32, n, 4 * n, 4);
    compare_decode(c, "bf16 decode", v->decode_bf16, ref->decode_bf16, n, 2 * n, 2);
    compare_decode(c, "q4 decode", v->decode_q4, ref->decode_q4, n, q4, SK_Q4_BYTES);
    float *x = lend(c, 4 * n);
    uint8_t *found = lend(c, q4), *expected = lend(c, q4);
    uint8_t *halves = lend(c, 2 * n), *halves_ref = lend(c, 2 * n);
    for (int kind = 0; kind < 2; kind++) {
        fill(c, x, n, kind);
        for (int stream = 0; stream < 2; stream++) {
            v->encode_bf16(x, halves, n, stream);
            ref->encode_bf16(x, halves_ref, n, 0);
            expect_bytes(c, "bf16 encode", n, halves, halves_ref, 2 * n);
        }
        v->encode_q4(x, found, n);
        ref->encode_q4(x, expected, n);
        expect_bytes(c, "q4 encode", n, found, expected, q4);
        if (v->apply_bf16) compare_apply(c, v, halves, found, halves_ref, n);
    }
    give_back(c, x);
    give_back(c, found);
    give_back(c, expected);
    give_back(c, halves);
    give_back(c, halves_ref);
}

/* w: 0 params, 1 momentum, 2 accumulator, 3..5 outputs, 6 gradient, 7..9 outputs of portable. */
static void compare_outer(check *c, const sk_blend_variant *v, const sk_blend_variant *ref,
                          size_t n, float **w, uint32_t most) {
    const sk_outer_scalars scalars = {0.7f, 0.9f, 3.0f, 0.225f, most};
    const sk_outer_arrays ours = {w[0], {w[1], w[2]}, w[3], {w[4], w[5]}};
    const sk_outer_arrays theirs = {w[0], {w[1], w[2]}, w[7], {w[8], w[9]}};
    for (int outer = 0; outer < SK_OUTERS; outer++) {
        for (int stream = 0; stream < 2; stream++) {
            for (int i = 3; i < WORDS; i++)
                if (i != 6) memset(w[i], 0, 4 * n);
            size_t bad = v->outer[outer](&scalars, &ours, 0, w[6], n, stream);
            size_t bad_ref = ref->outer[outer](&scalars, &theirs, 0, w[6], n, 0);
            if (bad != bad_ref) sk_check_failed(c, "outer step, first bad index", n);
            for (int i = 0; i < 3; i++) expect_bytes(c, "outer step", n, w[3 + i], w[7 + i], 4 * n);
        }
    }
}

/* Ten gradients, more than are walked together: kept, shrunk and rotated ones, some of them clipped;
 * of `arrays` different arrays. */
#define TERMS 10

static void make_terms(sk_term *terms, float **d, size_t arrays) {
    for (size_t i = 0; i < TERMS; i++)
        terms[i] = (sk_term){.d = d[i % arrays],
                             .wu = 0.7312 + 0.01 * (double)i,
                             .wv = -1.1e-3,
                             .clip = i % 4 == 3 ? 0.81f : 1.0f,
                             .q = -0.21f + 0.1f * (float)i,
                             .k = 0.37f - 0.05f * (float)i,
                             .turn = (int)((i + 1) % 3)};
}

/* w: 0 and 1 outputs, 2..4 gradients, 5 the momentum. */
static void compare_terms(check *c, const sk_blend_variant *v, const sk_blend_variant *ref,
                          size_t n, float **w) {
    double found[TERMS][3], expected[TERMS][3], lanes[2][SK_LANES];
    sk_term terms[TERMS];
    make_terms(terms, w + 2, 3);
    for (size_t count = 0; count <= TERMS; count += TERMS / 2) {
        for (int stream = 0; stream < 2; stream++) {
            for (int i = 0; i < SK_LANES; i++) lanes[0][i] = lanes[1][i] = i;
            v->combine(terms, count, w[5], 0, n, w[0], stream, lanes[0]);
            ref->combine(terms, count, w[5], 0, n, w[1], 0, lanes[1]);
            expect_bytes(c, "combine", n, w[0], w[1], 4 * n);
            expect_bytes(c, "squares of a sum", n, lanes[0], lanes[1], sizeof lanes[0]);
        }
        for (size_t at = 0; at < n; at += SK_BLOCK) {
            size_t len = n - at < SK_BLOCK ? n - at : SK_BLOCK;
            memset(found, 0, sizeof found);
            memset(expected, 0, sizeof expected);
            v->lengths(terms, count, w[5], at, len, found[0], 3);
            ref->lengths(terms, count, w[5], at, len, expected[0], 3);
            expect_bytes(c, "lengths", len, found, expected, sizeof found);
        }
    }
    v->scaled(w[0], w[2], 1.25f, n, lanes[0]);
    ref->scaled(w[1], w[2], 1.25f, n, lanes[1]);
    expect_bytes(c, "scaled", n, w[0], w[1], 4 * n);
    v->scaled(w[0], w[0], -0.3f, n, lanes[0]);
    ref->scaled(w[1], w[1], -0.3f, n, lanes[1]);
    expect_bytes(c, "scaled in place", n, w[0], w[1], 4 * n);
    expect_bytes(c, "squares of what is scaled", n, lanes[0], lanes[1], sizeof lanes[0]);
}

static void compare_blend(check *c, const sk_blend_variant *v, const sk_blend_variant *ref,
                          size_t n) {
    float *w[WORDS];
    for (int i = 0; i < WORDS; i++) fill(c, w[i] = lend(c, 4 * n), n, 1);
#define SAME(what, CALL)                                                                           \
    do {                                                                                           \
        memcpy(w[0], w[7], 4 * n);                                                                 \
        memcpy(w[1], w[7], 4 * n);                                                                 \
        {                                                                                          \
            const sk_blend_variant *k = v;                                                         \
            float *out = w[0];                                                                     \
            CALL;                                                                                  \
        }                                                                                          \
        {                                                                                          \
            const sk_blend_variant *k = ref;                                                       \
            float *out = w[1];                                                                     \
            CALL;                                                                                  \
        }                                                                                          \
        expect_bytes(c, what, n, w[0], w[1], 4 * n);                                               \
    } while (0)
    SAME("accumulate", k->accumulate(out, w[2], 0.37f, n));
    SAME("first", k->first(out, w[2], 0.37f, n));
    SAME("scale", k->scale(out, -1.7f, n));
    SAME("blend", k->blend(out, w[2], 0.3f, 0.7f, n));
    SAME("shrink", k->shrink(out, w[2], w[3], -0.21f, n));
    SAME("rotate", k->rotate(out, w[2], w[3], 0.8123, -0.2511, 1.37f, n));
    SAME("shrink in place", k->shrink(out, out, w[3], -0.21f, n));
    SAME("rotate in place", k->rotate(out, out, w[3], 0.8123, -0.2511, 1.37f, n));
#undef SAME
    compare_terms(c, v, ref, n, w);
    fill(c, w[0], n, 1);
    fill(c, w[1], n, 1);
    compare_outer(c, v, ref, n, w, SK_FINITE_MAX);
    if (n) { /* what f32 holds and bf16 does not: untouched by the step, and just above */
        size_t i = next(c) % n;
        w[0][i] = sk_float(SK_BF16_MAX + 1);
        w[1][i] = w[2][i] = w[6][i] = 0.0f;
    }
    compare_outer(c, v, ref, n, w, SK_FINITE_MAX);
    compare_outer(c, v, ref, n, w, SK_BF16_MAX);
    if (n) w[6][next(c) % n] = sk_float(SK_FINITE_MAX); /* 0.9*b overflows only with this one */
    compare_outer(c, v, ref, n, w, SK_FINITE_MAX);
    fill(c, w[0], n, 2);
    if (v->scan(w[0], n) != ref->scan(w[0], n)) sk_check_failed(c, "finite scan", n);
    for (int i = 0; i < WORDS; i++) give_back(c, w[i]);
}

static void compare_reduce(check *c, const sk_reduce_variant *v, const sk_reduce_variant *ref,
                           size_t n) {
    enum { BLOCKS = LONGEST / SK_BLOCK + 1, ROWS = 3 * TERMS };
    double found[2][ROWS], expected[2][ROWS], sums[4 * BLOCKS];
    float *x[4];
    sk_term terms[TERMS];
    for (int i = 0; i < 4; i++) fill(c, x[i] = lend(c, 4 * n), n, 1);
    memset(sums, 0, sizeof sums);
    v->sumsq(x[0], n, sums), ref->sumsq(x[0], n, sums + BLOCKS);
    v->dot(x[0], x[1], n, sums + 2 * BLOCKS), ref->dot(x[0], x[1], n, sums + 3 * BLOCKS);
    expect_bytes(c, "block sums", n, sums, sums + BLOCKS, BLOCKS * sizeof *sums);
    expect_bytes(c, "block products", n, sums + 2 * BLOCKS, sums + 3 * BLOCKS,
                 BLOCKS * sizeof *sums);
    make_terms(terms, x, 3);
    for (size_t at = 0; at < n; at += SK_BLOCK) {
        size_t len = n - at < SK_BLOCK ? n - at : SK_BLOCK;
        for (size_t count = 1; count <= TERMS; count += TERMS - 1) {
            memset(found, 0, sizeof found);
            memset(expected, 0, sizeof expected);
            v->measure(terms, count, NULL, at, len, found[0], 1);
            ref->measure(terms, count, NULL, at, len, expected[0], 1);
            expect_bytes(c, "squares", len, found, expected, sizeof found);
            v->measure(terms, count, x[3], at, len, found[0], 1);
            ref->measure(terms, count, x[3], at, len, expected[0], 1);
            v->rotated(terms, count, x[3], at, len, found[1], 3);
            ref->rotated(terms, count, x[3], at, len, expected[1], 3);
            expect_bytes(c, "measures of gradients", len, found, expected, sizeof found);
        }
    }
    for (int i = 0; i < 4; i++) give_back(c, x[i]);
}

static void compare(check *c, int family, const void *variant, const void *portable) {
    if (family == SK_SHA256) {
        compare_sha256(c, variant, portable);
        return;
    }
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        if (family == SK_CODEC) compare_codec(c, variant, portable, lengths[i]);
        if (family == SK_BLEND) compare_blend(c, variant, portable, lengths[i]);
        if (family == SK_REDUCE) compare_reduce(c, variant, portable, lengths[i]);
    }
}

int sk_check(const sk_check_host *host) {
    check c = {.host = host, .family = "", .variant = "", .seed = 1, .failures = 0};
    const sk_kernels before = sk_active;
    const uint64_t mode = sk_mode_enter(); /* the comparisons call the variants themselves */
    float *v[SK_CHECK_ARRAYS];
    for (int i = 0; i < SK_CHECK_ARRAYS; i++) v[i] = lend(&c, GOLDEN_N * sizeof(float));
    for (int family = 0; family < SK_FAMILIES; family++) {
        int last = 0;
        while (sk_variant_name(family, last + 1)) last++;
        for (int i = 0; i <= last; i++) {
            if (!sk_variant_supported(family, i)) continue;
            c.family = sk_family_name(family);
            c.variant = sk_variant_name(family, i);
            sk_select(c.family, c.variant);
            golden(&c, family, v);
            if (i != last)
                compare(&c, family, sk_variant_table(family, i), sk_variant_table(family, last));
            sk_active = before;
        }
    }
    for (int i = 0; i < SK_CHECK_ARRAYS; i++) give_back(&c, v[i]);
    sk_mode_leave(mode);
    return c.failures;
}
