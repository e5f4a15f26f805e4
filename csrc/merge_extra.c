/* Passes that a plain merge does not take: trimmed means, norms for clipping, statistics.
 *
 * Must not: share anything out by itself, or change a result that a plain merge gives.
 */
#include "merge_passes.h"

/* ------------------------------------------------------------------ trimmed mean */

static void exchange(float *low, float *high, size_t n) {
    for (size_t i = 0; i < n; i++) {
        float a = low[i], b = high[i];
        low[i] = a < b ? a : b;
        high[i] = a < b ? b : a;
    }
}

/* Each element: its values are sorted over the learners, and the mean of all but the `trim` lowest
 * and highest is added ascending in f64, divided there, and rounded once. Weights play no part.
 * strips: [learners][SM_SORTED]. */
void sm_trimmed(const sm_job *job, const sm_work *work, size_t at, size_t n, float *out,
                float *strips) {
    size_t first = (size_t)job->trim, end = job->learners - first;
    double sum[SM_SORTED];
    for (size_t s = 0; s < n; s += SM_SORTED) {
        size_t len = sm_smaller(SM_SORTED, n - s);
        for (size_t l = 0; l < job->learners; l++) {
            float *strip = strips + l * SM_SORTED;
            const float *d = sm_corrected(job, work, l, at + s, len, strip);
            if (d != strip) memcpy(strip, d, len * sizeof *d);
            for (size_t j = l; j > 0; j--)
                exchange(strips + (j - 1) * SM_SORTED, strips + j * SM_SORTED, len);
        }
        for (size_t i = 0; i < len; i++) sum[i] = 0.0;
        for (size_t l = first; l < end; l++)
            for (size_t i = 0; i < len; i++) sum[i] += (double)strips[l * SM_SORTED + i];
        for (size_t i = 0; i < len; i++) out[s + i] = (float)(sum[i] / (double)(end - first));
    }
}

/* ------------------------------------------------------------------ norms of whole gradients */

static void pass_norms(sm_job *job, sm_work *work, size_t tensor, size_t block, size_t blocks,
                       float *scratch) {
    (void)work;
    (void)scratch;
    const sm_plan *plan = job->plan;
    for (size_t b = block; b < block + blocks; b++)
        for (size_t l = 0; l < job->learners; l++)
            sk_active.reduce->sumsq(
                job->gradient[l] + sm_element(job, tensor, b), sm_extent(job, tensor, b),
                job->stats + l * plan->block[plan->tensors] + plan->block[tensor] + b);
}

static void norms_of_tensor(sm_job *job, sm_work *work, size_t tensor, float *scratch, int team) {
    sm_spread(pass_norms, job, work, tensor, scratch, team);
}

void sm_norms(sm_job *job, double *sums, double *norms) {
    double *stats = job->stats;
    size_t blocks = job->plan->block[job->plan->tensors];
    job->stats = sums;
    sm_each_tensor(job, norms_of_tensor);
    job->stats = stats;
    for (size_t l = 0; l < job->learners; l++) norms[l] = sqrt(sm_total(job->plan, sums + l * blocks));
}

/* ------------------------------------------------------------------ statistics */

static double *stat_row(const sm_job *job, size_t row, size_t block) {
    return job->stats + row * job->plan->block[job->plan->tensors] + block;
}

/* block: of the whole fragment. merged: [n], the merged gradient. */
void sm_note_stats(const sm_job *job, size_t at, size_t n, size_t block, float *merged) {
    const sk_reduce_variant *reduce = sk_active.reduce;
    const float *m = job->arrays.state[0];
    for (size_t l = 0; l < job->learners; l++) {
        const float *d = job->gradient[l] + at;
        reduce->sumsq(d, n, stat_row(job, 3 * l, block));
        reduce->dot(d, merged, n, stat_row(job, 3 * l + 1, block));
        if (m != NULL)
            reduce->dot(d, m + at, n, stat_row(job, 3 * l + 2, block));
        else
            *stat_row(job, 3 * l + 2, block) = 0.0;
    }
    double *momentum = stat_row(job, 3 * job->learners + SM_STAT_MOMENTUM, block);
    double *along = stat_row(job, 3 * job->learners + SM_STAT_ALONG, block);
    *momentum = *along = 0.0;
    if (m == NULL) return;
    reduce->sumsq(m + at, n, momentum);
    reduce->dot(m + at, merged, n, along);
}

/* After the outer step; difference: [n] working memory. */
void sm_stats_of_step(const sm_job *job, size_t at, size_t n, size_t block, float *difference) {
    const float *before = job->arrays.params + at, *after = job->arrays.params_out + at;
    for (size_t i = 0; i < n; i++) difference[i] = after[i] - before[i];
    sk_active.reduce->sumsq(difference, n,
                            stat_row(job, 3 * job->learners + SM_STAT_STEP, block));
}
