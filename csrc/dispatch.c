/* Variant tables, best first, portable last; one selection at start. The only state of csrc. */
#include "syncer_kernels_impl.h"

extern const sk_sha256_variant sk_sha256_portable, sk_sha256_shani, sk_sha256_armv8;
extern const sk_codec_variant sk_codec_portable, sk_codec_avx2, sk_codec_neon, sk_codec_arm_bf16;
extern const sk_blend_variant sk_blend_portable, sk_blend_avx2, sk_blend_avx2_faint, sk_blend_neon;
extern const sk_reduce_variant sk_reduce_portable, sk_reduce_avx2, sk_reduce_neon;

/* setup.py goes by the name of the platform. For one that it does not know it compiles portable
 * kernels alone, whatever the compiler calls that machine, and says so. */
#if defined(__x86_64__) && !defined(SK_PORTABLE_ONLY)
#define SK_X86_64 1
#elif defined(__aarch64__) && !defined(SK_PORTABLE_ONLY)
#define SK_AARCH64 1
#endif

/* Every table starts with a name and the CPU bits it needs, so one walk serves all families. */
typedef struct {
    const char *name;
    unsigned needs;
} variant_head;

static const void *const sha256_variants[] = {
#if defined(SK_X86_64)
    &sk_sha256_shani,
#elif defined(SK_AARCH64)
    &sk_sha256_armv8,
#endif
    &sk_sha256_portable, NULL};
static const void *const codec_variants[] = {
#if defined(SK_X86_64)
    &sk_codec_avx2,
#elif defined(SK_AARCH64)
    &sk_codec_arm_bf16, &sk_codec_neon,
#endif
    &sk_codec_portable, NULL};
static const void *const blend_variants[] = {
#if defined(SK_X86_64)
    &sk_blend_avx2_faint, &sk_blend_avx2,
#elif defined(SK_AARCH64)
    &sk_blend_neon,
#endif
    &sk_blend_portable, NULL};
static const void *const reduce_variants[] = {
#if defined(SK_X86_64)
    &sk_reduce_avx2,
#elif defined(SK_AARCH64)
    &sk_reduce_neon,
#endif
    &sk_reduce_portable, NULL};

static const struct {
    const char *name;
    const void *const *variants;
} families[SK_FAMILIES] = {
    [SK_SHA256] = {"sha256", sha256_variants},
    [SK_CODEC] = {"codec", codec_variants},
    [SK_BLEND] = {"blend", blend_variants},
    [SK_REDUCE] = {"reduce", reduce_variants},
};

sk_kernels sk_active = {&sk_sha256_portable, &sk_codec_portable, &sk_blend_portable,
                        &sk_reduce_portable};

static const void *active_of(int family) {
    switch (family) {
    case SK_SHA256: return sk_active.sha256;
    case SK_CODEC: return sk_active.codec;
    case SK_BLEND: return sk_active.blend;
    default: return sk_active.reduce;
    }
}

static void activate(int family, const void *variant) {
    switch (family) {
    case SK_SHA256: sk_active.sha256 = variant; break;
    case SK_CODEC: sk_active.codec = variant; break;
    case SK_BLEND: sk_active.blend = variant; break;
    default: sk_active.reduce = variant; break;
    }
}

/* Bits of `needs` that are no needs but reasons: without them a variant runs, and is not selected
 * unless somebody asks for it. */
#define REASONS ((unsigned)SK_CPU_ASSISTED)

static int has(const void *variant, unsigned but) {
    unsigned needs = ((const variant_head *)variant)->needs;
    return (needs & ~sk_cpu_detect() & ~but) == 0;
}

static int supported(const void *variant) { return has(variant, REASONS); }

void sk_init(void) {
    for (int family = 0; family < SK_FAMILIES; family++) {
        const void *const *variant = families[family].variants;
        while (!has(*variant, 0)) variant++; /* portable needs nothing, so this ends */
        activate(family, *variant);
    }
}

const char *sk_family_name(int family) {
    return family >= 0 && family < SK_FAMILIES ? families[family].name : NULL;
}

const char *sk_variant_name(int family, int i) {
    const void *variant = families[family].variants[i];
    return variant ? ((const variant_head *)variant)->name : NULL;
}

const void *sk_variant_table(int family, int i) { return families[family].variants[i]; }

int sk_variant_supported(int family, int i) { return supported(families[family].variants[i]); }

const char *sk_active_name(int family) { return ((const variant_head *)active_of(family))->name; }

int sk_select(const char *family, const char *name) {
    for (int f = 0; f < SK_FAMILIES; f++) {
        if (strcmp(families[f].name, family) != 0) continue;
        for (const void *const *variant = families[f].variants; *variant; variant++) {
            if (strcmp(((const variant_head *)*variant)->name, name) != 0) continue;
            if (!supported(*variant)) return SK_UNSUPPORTED_VARIANT;
            activate(f, *variant);
            return SK_OK;
        }
        return SK_UNKNOWN_VARIANT;
    }
    return SK_UNKNOWN_FAMILY;
}
