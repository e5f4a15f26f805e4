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
    const double norm = task->work->share[0].norm;
    if (job->fold.direction == NULL) return;
    job->fold.radial[task->tensor] += norm * job->weight;
    if (norm != 0.0) task->work->term[0].k = sm_unit_factor(job->factor, norm);
}

/* Both sums from one corrected strip: the correction is made once. */
static void pass_fold(void *context, const sm_task *task, size_t block) {
    const sm_fold_job *job = context;
    const sk_blend_variant *blend = sk_active.blend;
    const sm_work *work = task->work;
    const sm_fold_sums *fold = &job->fold;
    const size_t at = sm_element(task, block), n = sm_extent(task, block);
    for (size_t s = 0; s < n; s += SM_STRIP) {
        const size_t len = sm_smaller(SM_STRIP, n - s);
        const float *d = sm_corrected(&work->term[0], job->pushes.momentum, at + s, len,
                                      task->scratch);
        blend->accumulate(fold->sum + at + s, d, (float)job->factor, len);
        if (fold->direction != NULL && work->share[0].norm != 0.0)
            blend->accumulate(fold->direction + at + s, d, work->term[0].k, len);
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
