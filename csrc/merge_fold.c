/* Adding one push to the sums of an open round, and nothing else; must not take an outer step.
 *
 * A fold trades the order of the sum for memory: a batch merge adds all gradients of a block while
 * the sum is in the L1 cache, but needs them all at once; a fold reads and writes its sums once per
 * push (8 bytes per parameter, 16 for rda) and keeps no push at all. The sums are those of a batch
 * merge in the order of adding, so an exact fold, which adds in roster order, gives its bits.
 */
#include "merge_internal.h"

static void finish_fold(void *context, const sm_task *task) {
    sm_fold_job *job = context;
    sm_share *share = &task->work->share[0];
    if (job->fold.direction == NULL) return;
    job->fold.radial[task->tensor] += share->norm * job->weight;
    if (share->norm != 0.0) share->k = sm_unit_factor(job->factor, share->norm);
}

/* Both sums from one corrected strip: the correction is made once. */
static void pass_fold(void *context, const sm_task *task, size_t block, size_t blocks) {
    const sm_fold_job *job = context;
    const sk_blend_variant *blend = sk_active.blend;
    const sm_share *share = &task->work->share[0];
    const sm_fold_sums *fold = &job->fold;
    for (size_t b = block; b < block + blocks; b++) {
        size_t at = sm_element(task, b), n = sm_extent(task, b);
        for (size_t s = 0; s < n; s += SM_STRIP) {
            size_t len = sm_smaller(SM_STRIP, n - s);
            const float *d = sm_corrected(&job->pushes, task->work, 0, at + s, len, task->scratch);
            blend->accumulate(fold->sum + at + s, d, (float)job->factor, len);
            if (fold->direction != NULL && share->norm != 0.0)
                blend->accumulate(fold->direction + at + s, d, share->k, len);
        }
    }
}

static void fold_tensor(void *context, const sm_task *task) {
    sm_fold_job *job = context;
    int mode = job->fold.direction != NULL ? SM_RDA : SM_AVG;
    sm_once(sm_begin, &job->pushes, task);
    if (job->pushes.heloco != NULL || mode == SM_RDA) sm_correct(&job->pushes, task, mode);
    sm_once(finish_fold, job, task);
    sm_spread(pass_fold, job, task);
}

void sm_fold_add(sm_fold_job *job) { sm_each_tensor(&job->crew, fold_tensor, job); }
