/* Golden results for faint values: subnormals, signed zeros, and what becomes one of these.
 *
 * A comparison of two variants cannot see a thread, or a build, that takes subnormals for zero: both
 * sides do. Known results can. Must not allocate by itself (check.c). The digests were computed
 * with NumPy; tests/golden/test_faint_golden.py does so again. */
#include "check_internal.h"

#define FAINT_N (SK_CHECK_GOLDEN_N)

/* n values: of every 8, one is a zero, three are subnormal, one is just above, and three are faint,
 * too, or ordinary ones in [2^-47, 2^3). */
static void faint(float *out, uint64_t seed, size_t n, int ordinary) {
    for (size_t i = 0; i < n; i++) {
        uint64_t r = sk_check_random((seed << 32) + i);
        uint32_t kind = r & 7, fraction = (r >> 8) & 0x7FFFFF, some = (r >> 32) & 0xFFFF, bits;
        if (kind == 0)
            bits = 0;
        else if (kind > 4 && ordinary)
            bits = (80 + some % 50) << 23 | fraction;
        else if (kind == 4)
            bits = (1 + some % 24) << 23 | fraction;
        else
            bits = fraction >> some % 23;
        out[i] = sk_float((uint32_t)(r >> 63) << 31 | bits);
    }
}

static void faint_sums(check *c, float **v, int threads) {
    double three[3];
    faint(v[0], 21, FAINT_N, 0);
    faint(v[1], 22, FAINT_N, 0);
    sk_three(v[0], v[1], FAINT_N, three, threads);
    if (sk_sumsq(v[0], FAINT_N, threads) != three[0] || three[0] != 0x1.dc74cc8e4d670p-197)
        sk_check_failed(c, "sumsq of faint values", FAINT_N);
    if (sk_dot(v[0], v[1], FAINT_N, threads) != three[1] || three[1] != -0x1.5bfd052aa9094p-204)
        sk_check_failed(c, "dot of faint values", FAINT_N);
    if (sk_rotated_sumsq(v[0], v[1], 0.8123, -0.2511, FAINT_N, threads) != 0x1.5a1ab38a07ffcp-197)
        sk_check_failed(c, "rotated sum of faint values", FAINT_N);
}

static void faint_codecs(check *c, float **v, int threads) {
    uint8_t *wire = (uint8_t *)v[1];
    size_t bytes = (FAINT_N + SK_Q4_BLOCK - 1) / SK_Q4_BLOCK * SK_Q4_BYTES;
    faint(v[0], 23, FAINT_N, 0);
    for (size_t i = 0; i < FAINT_N; i++) /* most blocks have a subnormal scale */
        if (i % 1024 > 255) v[0][i] = sk_float(sk_bits(v[0][i]) & 0x807FFFFFu);
    sk_encode_q4(v[0], wire, FAINT_N, threads);
    sk_check_digest(c, "q4 encode of faint values", wire, bytes,
                    "9bf6aa66662c20dc28cd2fc64b2b8a42b9b52474d4f66ce158dec03fb7e92e37");
    if (sk_decode(SK_DTYPE_Q4, wire, v[2], FAINT_N, FAINT_N, 0, threads) != -1)
        sk_check_failed(c, "q4 decode of faint values", FAINT_N);
    sk_check_digest(c, "q4 decode of faint values", v[2], FAINT_N * sizeof(float),
                    "0f940affc59ef60b33b81f27a55c4de220790144d8d991fa8a6cb7f1c7603742");
}

static void faint_blends(check *c, float **v, int threads) {
    const size_t bytes = FAINT_N * sizeof(float);
    faint(v[0], 24, FAINT_N, 1);
    faint(v[1], 25, FAINT_N, 1);
    memcpy(v[2], v[0], bytes);
    sk_accumulate(v[2], v[1], 0.75f, FAINT_N, threads);
    sk_check_digest(c, "average of faint values", v[2], bytes,
                    "65f03383c406cd8d0382013890c996843da85e2f6597a609d4416f3995035b72");
    sk_first(v[2], v[1], 0.3f, FAINT_N, threads);
    sk_check_digest(c, "first of faint values", v[2], bytes,
                    "76a65344b0cf9bb5da8c7aea83a95fdc5a380d969412307fb5c2b76abd86cc04");
    memcpy(v[2], v[0], bytes);
    sk_scale(v[2], -0.375f, FAINT_N, threads);
    sk_check_digest(c, "scale of faint values", v[2], bytes,
                    "2a8228305995b1ceaa61ca68f564d17ef88e7833b2e9dbb18e03e8be6db850d5");
    memcpy(v[2], v[0], bytes);
    sk_blend(v[2], v[1], 0.3f, (float)(1 - 0.3), FAINT_N, threads);
    sk_check_digest(c, "blend of faint values", v[2], bytes,
                    "cecac0c8994dc6956912d3b567b427d93fc27cab51f191b18fa0f9dab9b2ce81");
    sk_shrink(v[2], v[0], v[1], 0.375f, FAINT_N, threads);
    sk_check_digest(c, "shrink of faint values", v[2], bytes,
                    "2f23bca59d6788f8d0ffcd403167a1bdb9f910b86274d4ac4869a1c68af31781");
    sk_rotate(v[2], v[0], v[1], 0.8123, -0.2511, 1.37f, FAINT_N, threads);
    sk_check_digest(c, "rotate of faint values", v[2], bytes,
                    "d46b338dcd4521a97bbf0aa6b0d09d3a6e4e395adc2c6129d78185e1a83ee1a6");
}

static void faint_outer(check *c, float **v, int threads) {
    static const struct {
        const char *name, *params, *momentum, *sum;
    } expected[SK_OUTERS] = {
        [SK_OUTER_NESTEROV] = {"nesterov of faint values",
                               "8097262062f9174d2ec38f00a46656f55656c4306c214666692b28edeec818f8",
                               "65d5aa4fa5be868dd61360c0ba3954f5855cfe3d5585417b2e4cca08d69bc995",
                               NULL},
        [SK_OUTER_SGD] = {"sgd of faint values",
                          "588d8ef570e3af883240d2550d50e9fe4cde6cd52f229797cb3b1590a53e1755", NULL,
                          NULL},
        [SK_OUTER_DELAYED_HOLD] =
            {"delayed nesterov of faint values, hold",
             "ff55c2dc4331b3ffacb09718a250b9c60b95ff946d5b0cff0865314940d50606",
             "dfbab66c208b1f272f76d80ce3abe9c48ec72db2b05b4635bd4ce95316489726",
             "81fd007c301cb77a3a2f78e7f01735ea0dc586c8a68f48c8298ef798e47c7c23"},
        [SK_OUTER_DELAYED_APPLY] =
            {"delayed nesterov of faint values, apply",
             "fa3b0e14fe32ae6352931995adf27f20321e474834b2f0c71a13135bc830a4bb",
             "13ac8d595d4a27df78b6e7b782a9ab7a5124e23d0d42b77fd7edf85241fa4d21",
             "8a1ad45201cb5456292affebde63d8772b1d09fb7c218b88cf01f52ed25ed446"},
    };
    const size_t bytes = FAINT_N * sizeof(float);
    const sk_outer_scalars scalars = {0.7f, 0.9f, 3.0f, 0.225f, SK_FINITE_MAX};
    for (int outer = 0; outer < SK_OUTERS; outer++) {
        for (uint64_t i = 0; i < 4; i++) faint(v[i], 26 + i, FAINT_N, i != 1);
        const sk_outer_arrays arrays = {v[0], {v[1], v[2]}, v[4], {v[5], v[6]}};
        if (sk_outer_step(outer, &scalars, &arrays, v[3], FAINT_N, threads) != -1)
            sk_check_failed(c, expected[outer].name, FAINT_N);
        sk_check_digest(c, expected[outer].name, v[4], bytes, expected[outer].params);
        if (expected[outer].momentum)
            sk_check_digest(c, expected[outer].name, v[5], bytes, expected[outer].momentum);
        if (expected[outer].sum)
            sk_check_digest(c, expected[outer].name, v[6], bytes, expected[outer].sum);
    }
}

void sk_check_faint(check *c, int family, float **v, int threads) {
    if (family == SK_REDUCE) faint_sums(c, v, threads);
    if (family == SK_CODEC) faint_codecs(c, v, threads);
    if (family == SK_BLEND) faint_blends(c, v, threads), faint_outer(c, v, threads);
}
