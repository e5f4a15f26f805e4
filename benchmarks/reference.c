/* The plain loops that kernels are compared with. Must not be clever: -O3 is all the help they get.
 * bench_kernels.py compiles this file with the system compiler into a library of its own. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

void reference_copy(void *out, const void *in, size_t bytes) { memcpy(out, in, bytes); }

/* Adds 32-bit words, which a compiler may do in any order: reads as fast as memory delivers. */
uint32_t reference_sum(const uint32_t *x, size_t n) {
    uint32_t sum = 0;
    for (size_t i = 0; i < n; i++) sum += x[i];
    return sum;
}
