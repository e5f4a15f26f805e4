/* A program that checks the kernels on a host without Python: link it with the rest of csrc.
 *
 *   harness [--exhaustive] [family=variant | variant ...]
 *
 * Prints what the CPU offers, runs sk_check, and exits with 1 if a variant gives a wrong bit.
 * --exhaustive also encodes each of the 2^32 f32 bit patterns as bf16, with every variant. */
#include "syncer_kernels_impl.h"

#include <stdio.h>
#include <stdlib.h>

static void *lend(void *context, size_t bytes) {
    (void)context;
    void *p = malloc(bytes ? bytes : 1);
    if (!p) {
        fprintf(stderr, "harness: no memory for %zu bytes\n", bytes);
        exit(2);
    }
    return p;
}

static void give_back(void *context, void *p) {
    (void)context;
    free(p);
}

static void fail(void *context, const char *family, const char *variant, const char *what,
                 size_t n) {
    (void)context;
    printf("WRONG  %s %s: %s, length %zu\n", family, variant, what, n);
}

static void describe(void) {
    unsigned cpu = sk_cpu_detect();
    printf("compiler %s, openmp %s, cpu", sk_compiler(), sk_has_openmp() ? "yes" : "no");
    for (unsigned bit = 0; bit < SK_CPU_COUNT; bit++)
        if (cpu >> bit & 1) printf(" %s", sk_cpu_name(bit));
    printf("\n");
    for (int family = 0; family < SK_FAMILIES; family++) {
        printf("%-8s", sk_family_name(family));
        for (int i = 0; sk_variant_name(family, i); i++)
            printf(" %s%s", sk_variant_name(family, i),
                   sk_variant_supported(family, i) ? "" : " (not on this CPU)");
        printf("\n");
    }
}

/* Every f32 in steps of 2^16 values: the definition is spelled out here once more. */
static int exhaustive_bf16(void) {
    enum { STEP = 1 << 16 };
    static float x[STEP];
    static uint8_t out[2 * STEP];
    int wrong = 0;
    for (uint64_t high = 0; high < 65536; high++) {
        for (uint32_t low = 0; low < STEP; low++) x[low] = sk_float((uint32_t)(high << 16) | low);
        sk_active.codec->encode_bf16(x, out, STEP, 0);
        for (uint32_t low = 0; low < STEP; low++) {
            uint64_t u = high << 16 | low, nan = (u & SK_ABS) > 0x7F800000u;
            uint64_t up = low > 0x8000u || (low == 0x8000u && (high & 1));
            uint16_t expected = (uint16_t)(nan ? high | 0x40u : high + up);
            wrong += sk_load16(out + 2 * low) != expected;
        }
    }
    printf("bf16 encode, all 4294967296 inputs, %s: %d wrong\n", sk_active_name(SK_CODEC), wrong);
    return wrong;
}

static int apply(const char *argument) {
    char family[32];
    const char *equals = strchr(argument, '=');
    if (equals && (size_t)(equals - argument) < sizeof family) {
        memcpy(family, argument, (size_t)(equals - argument));
        family[equals - argument] = 0;
        return sk_select(family, equals + 1);
    }
    for (int f = 0; f < SK_FAMILIES; f++)
        if (sk_select(sk_family_name(f), argument) != SK_OK) return SK_UNKNOWN_VARIANT;
    return SK_OK;
}

int main(int argc, char **argv) {
    const sk_check_host host = {NULL, lend, give_back, fail};
    int exhaustive = 0, wrong = 0;
    sk_init();
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--exhaustive") == 0) {
            exhaustive = 1;
        } else if (apply(argv[i]) != SK_OK) {
            fprintf(stderr, "harness: no variant %s that this CPU can run\n", argv[i]);
            return 2;
        }
    }
    describe();
    wrong += sk_check(&host);
    if (exhaustive) wrong += exhaustive_bf16();
    printf(wrong ? "%d checks failed\n" : "all kernel checks passed\n", wrong);
    return wrong != 0;
}
