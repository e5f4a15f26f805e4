/* The plain loops that kernels are compared with. Must not be clever: -O3 is all the help they get.
 * bench_kernels.py compiles this file with the system compiler into a library of its own. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

void reference_copy(void *out, const void *in, size_t bytes) { memcpy(out, in, bytes); }

/* A copy whose stores go past the cache: it does not read what it overwrites, as memcpy does up to a
 * size of its own choosing. out: aligned to 16 bytes. The same as memcpy on other machines. */
void reference_copy_past(void *out, const void *in, size_t bytes) {
    size_t done = 0;
#if defined(__SSE2__)
    for (; done + 64 <= bytes; done += 64)
        for (size_t i = done; i < done + 64; i += 16)
            _mm_stream_si128((__m128i *)((char *)out + i),
                             _mm_loadu_si128((const __m128i *)((const char *)in + i)));
    _mm_sfence();
#endif
    memcpy((char *)out + done, (const char *)in + done, bytes - done);
}

/* Adds 32-bit words, which a compiler may do in any order: reads as fast as memory delivers. */
uint32_t reference_sum(const uint32_t *x, size_t n) {
    uint32_t sum = 0;
    for (size_t i = 0; i < n; i++) sum += x[i];
    return sum;
}
