/* Element-wise arithmetic of merge and optimizers as their definitions write it. */
#include "syncer_kernels_impl.h"

static void accumulate(float *out, const float *g, float k, size_t n) {
    for (size_t i = 0; i < n; i++) out[i] = out[i] + k * g[i];
}

static void first(float *out, const float *g, float k, size_t n) {
    for (size_t i = 0; i < n; i++) out[i] = 0.0f + k * g[i]; /* the sum turns -0 into +0 */
}

static void scale(float *out, float k, size_t n) {
    for (size_t i = 0; i < n; i++) out[i] = out[i] * k;
}

static void blend(float *theta, const float *anchor, float a, float b, size_t n) {
    for (size_t i = 0; i < n; i++) theta[i] = a * theta[i] + b * anchor[i];
}

static void shrink(float *out, const float *d, const float *m, float q, size_t n) {
    for (size_t i = 0; i < n; i++) out[i] = d[i] + q * m[i];
}

static void rotate(float *out, const float *d, const float *m, double wu, double wv, float s,
                   size_t n) {
    for (size_t i = 0; i < n; i++) out[i] = (float)(wu * (double)d[i] + wv * (double)m[i]) * s;
}

static inline int above(float x, uint32_t most) { return (sk_bits(x) & SK_ABS) > most; }

static size_t scan(const float *x, size_t n) {
    size_t i = 0;
    while (i < n && !above(x[i], SK_FINITE_MAX)) i++;
    return i;
}

static size_t nesterov(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at,
                       const float *g, size_t n, int stream) {
    (void)stream;
    size_t bad = n;
    for (size_t i = 0; i < n; i++) {
        float b = o->mu * a->state[0][at + i] + g[i];
        float p = a->params[at + i] - o->lr * (g[i] + o->mu * b);
        if ((above(b, o->most) || above(p, o->most)) && bad == n) bad = i;
        a->state_out[0][at + i] = b;
        a->params_out[at + i] = p;
    }
    return bad;
}

static size_t sgd(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at, const float *g,
                  size_t n, int stream) {
    (void)stream;
    size_t bad = n;
    for (size_t i = 0; i < n; i++) {
        float p = a->params[at + i] - o->lr * g[i];
        if (above(p, o->most) && bad == n) bad = i;
        a->params_out[at + i] = p;
    }
    return bad;
}

static size_t delayed_hold(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at,
                           const float *g, size_t n, int stream) {
    (void)stream;
    size_t bad = n;
    for (size_t i = 0; i < n; i++) {
        float b = a->state[0][at + i], sum = a->state[1][at + i] + g[i];
        float p = a->params[at + i] - o->lr * (o->k * b + g[i] / o->period);
        if ((above(b, o->most) || above(sum, o->most) || above(p, o->most)) && bad == n) bad = i;
        a->state_out[0][at + i] = b;
        a->state_out[1][at + i] = sum;
        a->params_out[at + i] = p;
    }
    return bad;
}

static size_t delayed_apply(const sk_outer_scalars *o, const sk_outer_arrays *a, size_t at,
                            const float *g, size_t n, int stream) {
    (void)stream;
    size_t bad = n;
    for (size_t i = 0; i < n; i++) {
        float sum = a->state[1][at + i] + g[i];
        float b = o->mu * a->state[0][at + i] + sum / o->period;
        float p = a->params[at + i] - o->lr * (o->k * b + g[i] / o->period);
        if ((above(b, o->most) || above(p, o->most)) && bad == n) bad = i;
        a->state_out[0][at + i] = b;
        a->state_out[1][at + i] = 0.0f;
        a->params_out[at + i] = p;
    }
    return bad;
}

// clang-format off: one line for the kernels, one for each optimizer
const sk_blend_variant sk_blend_portable = {
    "portable", 0, accumulate, first, scale, blend, shrink, rotate, scan,
    {[SK_OUTER_NESTEROV] = nesterov,
     [SK_OUTER_SGD] = sgd,
     [SK_OUTER_DELAYED_HOLD] = delayed_hold,
     [SK_OUTER_DELAYED_APPLY] = delayed_apply}};
// clang-format on
