/* Numbers about gradients: norms for clipping, and statistics that explain a merge.
 *
 * Must not: change a result that a merge without them gives.
 *
 * All are blocked sums like those of the merge itself, so they too have the same bits for every
 * thread count. Statistics are taken inside the step, block by block, while the merged gradient is
 * in the cache; the norms need a pass of their own, before anything is merged: a limit that is the
 * median of the norms is known only when all of them are.
 */
#include "float_mode.h"
#include "merge_internal.h"

/* ------------------------------------------------------------------ norms of whole gradients */

static void pass_norms(void *context, const sm_task *task, size_t block) {
    const sm_norms_job *job = context;
    const sm_plan *plan = task->plan;
    for (size_t l = 0; l < job->learners; l++)
        sk_active.reduce->sumsq(job->gradient[l] + sm_element(task, block), sm_extent(task, block),
                                job->sums + l * plan->block[plan->tensors] +
                                    plan->block[task->tensor] + block);
}

static void norms_of_tensor(void *job, const sm_task *task) { sm_spread(pass_norms, job, task); }

void sm_norms(sm_norms_job *job) {
    const sm_plan *plan = job->crew.plan;
    sm_each_tensor(&job->crew, norms_of_tensor, job);
    uint64_t mode = sk_mode_enter(); /* for the roots */
    for (size_t l = 0; l < job->learners; l++)
        job->norms[l] = sqrt(sm_total(plan, job->sums + l * plan->block[plan->tensors]));
    sk_mode_leave(mode);
}

/* ------------------------------------------------------------------ statistics of a merge */

static double *stat_row(const sm_merge_job *job, size_t row, size_t block) {
    const sm_plan *plan = job->crew.plan;
    return job->stats + row * plan->block[plan->tensors] + block;
}

/* block: of the whole fragment. merged: [n], the merged gradient. */
void sm_note_stats(const sm_merge_job *job, size_t at, size_t n, size_t block, float *merged) {
    const sk_reduce_variant *reduce = sk_active.reduce;
    const float *m = job->arrays.state[0];
    size_t learners = job->pushes.learners;
    for (size_t l = 0; l < learners; l++) {
        const float *d = job->pushes.gradient[l] + at;
        reduce->sumsq(d, n, stat_row(job, 3 * l, block));
        reduce->dot(d, merged, n, stat_row(job, 3 * l + 1, block));
        if (m != NULL)
            reduce->dot(d, m + at, n, stat_row(job, 3 * l + 2, block));
        else
            *stat_row(job, 3 * l + 2, block) = 0.0;
    }
    double *momentum = stat_row(job, 3 * learners + SM_STAT_MOMENTUM, block);
    double *along = stat_row(job, 3 * learners + SM_STAT_ALONG, block);
    *momentum = *along = 0.0;
    if (m == NULL) return;
    reduce->sumsq(m + at, n, momentum);
    reduce->dot(m + at, merged, n, along);
}

/* After the outer step; difference: [n] working memory. */
void sm_stats_of_step(const sm_merge_job *job, size_t at, size_t n, size_t block,
                      float *difference) {
    const float *before = job->arrays.params + at, *after = job->arrays.params_out + at;
    for (size_t i = 0; i < n; i++) difference[i] = after[i] - before[i];
    sk_active.reduce->sumsq(difference, n,
                            stat_row(job, 3 * job->pushes.learners + SM_STAT_STEP, block));
}
