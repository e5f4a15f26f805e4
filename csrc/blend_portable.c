/* Element-wise arithmetic of merge and optimizers as their definitions write it. */
#include "syncer_kernels_impl.h"

extern const sk_blend_variant sk_blend_portable;

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

/* ------------------------------------------------------------------ several gradients at once */

static void add_squares(const float *x, size_t n, double *lanes) {
    for (size_t j = 0; j < n; j++) lanes[j % SK_LANES] += (double)x[j] * (double)x[j];
}

#define STRIP 256 /* stays in the first-level cache */

/* [at, at+n) of one corrected gradient, n <= STRIP: in place, or in `strip`. */
static const float *corrected(const sk_blend_variant *parts, const sk_term *t, const float *m,
                              size_t at, size_t n, float *strip) {
    const float *d = t->d + at;
    if (t->clip != 1.0f) {
        memcpy(strip, d, n * sizeof *d);
        parts->scale(strip, t->clip, n);
        d = strip;
    }
    if (t->turn == SK_KEEP) return d;
    if (t->turn == SK_SHRINK)
        parts->shrink(strip, d, m + at, t->q, n);
    else
        parts->rotate(strip, d, m + at, t->wu, t->wv, t->q, n);
    return strip;
}

/* The first one is written (+0 + k*d, which turns -0 into +0 as a sum from zero does) and not added
 * to zeros. */
void sk_combine_by_parts(const sk_blend_variant *parts, const sk_term *terms, size_t count,
                         const float *m, size_t at, size_t n, float *out, double *lanes) {
    float strip[STRIP];
    for (size_t s = 0, len; s < n; s += len) {
        len = n - s < STRIP ? n - s : STRIP;
        for (size_t i = 0; i < count; i++) {
            const float *d = corrected(parts, &terms[i], m, at + s, len, strip);
            (i ? parts->accumulate : parts->first)(out + s, d, terms[i].k, len);
        }
        if (count == 0) memset(out + s, 0, len * sizeof *out);
        add_squares(out + s, len, lanes);
    }
}

void sk_length_by_parts(const sk_blend_variant *parts, const sk_term *term, const float *m,
                        size_t at, size_t n, double *lanes) {
    float strip[STRIP];
    for (size_t s = 0, len; s < n; s += len) {
        len = n - s < STRIP ? n - s : STRIP;
        add_squares(corrected(parts, term, m, at + s, len, strip), len, lanes);
    }
}

static void combine(const sk_term *terms, size_t count, const float *m, size_t at, size_t n,
                    float *out, int stream, double *lanes) {
    (void)stream;
    sk_combine_by_parts(&sk_blend_portable, terms, count, m, at, n, out, lanes);
}

static void scaled(float *out, const float *x, float k, size_t n, double *lanes) {
    for (size_t i = 0; i < n; i++) out[i] = x[i] * k;
    add_squares(out, n, lanes);
}

static void lengths(const sk_term *terms, size_t count, const float *m, size_t at, size_t n,
                    double *sums, size_t stride) {
    for (size_t i = 0; i < count; i++) {
        double lanes[SK_LANES] = {0};
        if (terms[i].turn == SK_KEEP) continue;
        sk_length_by_parts(&sk_blend_portable, &terms[i], m, at, n, lanes);
        sums[i * stride] = sk_fold_lanes(lanes);
    }
}

/* ------------------------------------------------------------------ finite scan and outer steps */

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
    "portable", 0, accumulate, first, scale, blend, shrink, rotate,
    combine, scaled, lengths, scan,
    {[SK_OUTER_NESTEROV] = nesterov,
     [SK_OUTER_SGD] = sgd,
     [SK_OUTER_DELAYED_HOLD] = delayed_hold,
     [SK_OUTER_DELAYED_APPLY] = delayed_apply}};
// clang-format on
