/* CPU features. Must not decide anything: dispatch.c does. */
#include "syncer_kernels.h"

#if defined(SK_PORTABLE_ONLY) /* of nothing, and without headers that a system may lack */

unsigned sk_cpu_detect(void) { return 0; }

#elif defined(__x86_64__)
#include <cpuid.h>

static uint64_t xcr0(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return ((uint64_t)high << 32) | low;
}

/* Intel's multiplications, conversions and divisions; AMD's take a few cycles longer at most. */
static int assisted(void) {
    unsigned a, b, c, d;
    return __get_cpuid(0, &a, &b, &c, &d) && b == signature_INTEL_ebx && c == signature_INTEL_ecx &&
           d == signature_INTEL_edx;
}

unsigned sk_cpu_detect(void) {
    unsigned a, b, c, d, found = 0;
    if (assisted()) found |= SK_CPU_ASSISTED;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return found;
    int sse41 = (c >> 19) & 1, avx = (c >> 28) & 1, osxsave = (c >> 27) & 1, fma = (c >> 12) & 1;
    if (sse41) found |= SK_CPU_SSE41;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
    if ((b >> 29) & 1) found |= SK_CPU_SHANI;
    /* AVX2 counts only with FMA, which every CPU since has, and if the system saves the wide
     * registers: XCR0 bits 1 (SSE) and 2 (AVX). */
    if (((b >> 5) & 1) && avx && fma && osxsave && (xcr0() & 6) == 6) found |= SK_CPU_AVX2;
    return found;
}

#elif defined(__aarch64__)
#include <sys/auxv.h> /* Linux and FreeBSD */

#define HWCAP_BIT_ASIMD (1ul << 1)
#define HWCAP_BIT_SHA2 (1ul << 6)
#define HWCAP2_BIT_BF16 (1ul << 14)

unsigned sk_cpu_detect(void) {
    unsigned long caps = getauxval(AT_HWCAP);
    unsigned found = 0;
    if (caps & HWCAP_BIT_ASIMD) found |= SK_CPU_NEON;
    if (caps & HWCAP_BIT_SHA2) found |= SK_CPU_SHA2;
    if (getauxval(AT_HWCAP2) & HWCAP2_BIT_BF16) found |= SK_CPU_BF16;
    return found;
}

#else

unsigned sk_cpu_detect(void) { return 0; }

#endif

const char *sk_cpu_name(unsigned bit) {
    static const char *const names[SK_CPU_COUNT] = {
        "sse4.1", "sha-ni", "avx2", "neon", "sha2", "assisted subnormals", "bf16"};
    return bit < SK_CPU_COUNT ? names[bit] : "";
}
