/* The float mode of a thread, for callers; must not be changed for longer than they ask for. */
#include "float_mode.h"
#include "syncer_kernels.h"

unsigned sk_float_faults(void) {
    uint64_t mode = sk_mode_read();
    unsigned faults = 0;
    if (mode & SK_MODE_FLUSH) faults |= SK_FLOAT_FLUSHES;
    if (mode & SK_MODE_ROUND) faults |= SK_FLOAT_ROUNDS;
    if (!sk_mode_usual(mode) && !faults) faults |= SK_FLOAT_OTHER;
    return faults;
}

uint64_t sk_float_exact(void) { return sk_mode_enter(); }

void sk_float_back(uint64_t mode) { sk_mode_leave(mode); }

static __attribute__((noinline)) void narrow(const double *x, float *out) { *out = (float)*x; }

float sk_float_of(double x) {
    float out;
    uint64_t mode = sk_mode_enter();
    narrow(&x, &out);
    sk_mode_leave(mode);
    return out;
}
