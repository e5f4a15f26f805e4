/* Static ranges over threads: OpenMP when the compiler has it, the same calls one by one when not.
 *
 * Must not be included by anything but arrays.c and changes.c. One part never enters a parallel
 * region, so that a process that forks later (a trainer with data workers) is safe with threads = 1.
 */
#ifndef SYNCER_PARALLEL_H
#define SYNCER_PARALLEL_H

#include "float_mode.h"
#include "syncer_kernels.h"

typedef void (*sk_range_fn)(void *context, int part, size_t begin, size_t end);

/* Number of parts: at most `threads`, and none smaller than `grain` but the last. */
static inline int sk_parts(int threads, size_t n, size_t grain) {
    size_t most = n / grain + (n % grain != 0);
    if (threads > SK_THREADS_MAX) threads = SK_THREADS_MAX;
    return most < (size_t)threads ? (int)most : threads;
}

/* First index of `part`; parts differ by at most one grain, and start at multiples of it. */
static inline size_t sk_part_begin(size_t n, size_t grain, int part, int parts) {
    size_t grains = n / grain + (n % grain != 0);
    size_t begin = (grains / (size_t)parts) * (size_t)part;
    size_t spare = grains % (size_t)parts;
    begin += (size_t)part < spare ? (size_t)part : spare;
    begin *= grain;
    return begin < n ? begin : n;
}

/* One range on the thread it fell to, which may be in any float mode. */
static inline void sk_range(sk_range_fn fn, void *context, int part, size_t begin, size_t end) {
    uint64_t mode = sk_mode_enter();
    fn(context, part, begin, end);
    sk_mode_leave(mode);
}

/* Calls fn for disjoint ranges that cover [0, n), at most `threads` of them at a time. */
static inline void sk_ranges(int threads, size_t n, size_t grain, sk_range_fn fn, void *context) {
    int parts = sk_parts(threads, n, grain);
    if (parts <= 1) {
        if (n) sk_range(fn, context, 0, 0, n);
        return;
    }
#ifdef _OPENMP
#pragma omp parallel for num_threads(parts) schedule(static)
#endif
    for (int part = 0; part < parts; part++)
        sk_range(fn, context, part, sk_part_begin(n, grain, part, parts),
                 sk_part_begin(n, grain, part + 1, parts));
}

#endif
