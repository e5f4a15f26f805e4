/* Inside of the self-check: what check.c and check_faint.c share. Must not be included elsewhere. */
#ifndef SYNCER_CHECK_INTERNAL_H
#define SYNCER_CHECK_INTERNAL_H

#include "syncer_kernels_impl.h"

#define SK_CHECK_GOLDEN_N ((size_t)40003 + 16384 + 7) /* full blocks, a ragged tail, both */
#define SK_CHECK_ARRAYS 9                             /* of that length, lent to golden checks */

typedef struct {
    const sk_check_host *host;
    const char *family, *variant;
    uint64_t seed;
    int failures;
} check;

void sk_check_failed(check *c, const char *what, size_t n);
/* Fails unless the SHA-256 of `data` is `hex`. */
void sk_check_digest(check *c, const char *what, const void *data, size_t bytes, const char *hex);
uint64_t sk_check_random(uint64_t z); /* splitmix64 */

/* check_faint.c: the golden results of one family's selected variant; v: SK_CHECK_ARRAYS arrays. */
void sk_check_faint(check *c, int family, float **v, int threads);

#endif
