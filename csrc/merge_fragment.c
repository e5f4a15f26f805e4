/* The merged gradient of each tensor and the outer step: avg, rda, the close of a fold.
 *
 * Must not: allocate, or know how many threads there are.
 *
 * After the passes of merge_correct.c a tensor takes up to two more:
 *
 *   direction  sum of k*d into params_out, and its square               only rda
 *   step       the merged gradient, its square, and the outer step      always
 *
 * (the close of a fold in rda has `length`, the square of the direction it holds, in place of both
 * the corrections and the first). The least a merge can move is every gradient once, parameters and
 * state in, parameters and state out; avg without a correction moves just that.
 *
 * Why not sweep the arrays one operation at a time, a sum over the learners, its norm, the outer
 * step, as one would with a library of array operations: the sum would go to memory and come back
 * for every learner and again for the norm and the step. Here a block passes through all of them
 * while it is in the cache.
 *
 * Why blocks of SK_BLOCK elements: the blocked sum is defined by them, so a cut anywhere else would
 * put a part of its order into the hands of the thread count. 64 KiB for each array at hand also is
 * what the second-level cache of one core holds several times: merged gradient, momentum,
 * parameters, and the gradient that is being added. For what is read and written once per learner
 * that is too long: sums grow in strips of SM_STRIP elements (4 KiB), all learners for one strip, so
 * that the sum and the corrected gradient both stay in the first-level cache.
 *
 * Why two passes for rda, and not one that scales the parameters afterwards: the factor of the
 * direction depends on its length over the whole tensor, and the outer step rounds, so it cannot be
 * taken first and corrected later. The direction waits in params_out, memory that the result needs
 * anyway and that nobody reads before the step; each block of it is overwritten only after it was
 * read.
 */
#include "merge_internal.h"

#define NO_DIRECTION 1e-12 /* a mean direction shorter than this has no meaning: average instead */

/* ------------------------------------------------------------------ the sum over the learners */

/* out = sum over learners of k*d for [at, at+n); a learner whose k was never set is left out.
 *
 * The first one is written (+0 + k*d, which turns -0 into +0 as a sum from zero does) and not added
 * to zeros: that spares a round through the strip, with the same bits. Only turned gradients are
 * asked for ahead; see sm_expect. */
static void combine(const sm_pushes *pushes, const sm_work *work, size_t at, size_t n, float *out,
                    float *strip) {
    const sk_blend_variant *blend = sk_active.blend;
    for (size_t s = 0; s < n; s += SM_STRIP) {
        size_t len = sm_smaller(SM_STRIP, n - s);
        int begun = 0;
        for (size_t l = 0; l < pushes->learners; l++) {
            if (work->directed && work->share[l].norm == 0.0) continue;
            if (work->share[l].turn != SM_KEEP)
                sm_expect(pushes->gradient[l] + at + s + len, sm_smaller(SM_STRIP, n - s - len));
            const float *d = sm_corrected(pushes, work, l, at + s, len, strip);
            (begun++ ? blend->accumulate : blend->first)(out + s, d, work->share[l].k, len);
        }
        if (!begun) memset(out + s, 0, len * sizeof *out);
    }
}

/* Factors of an average: rounded to f32 once, here, and not per element. */
static void average(const sm_merge_job *job, sm_work *work) {
    work->directed = 0;
    for (size_t l = 0; l < job->pushes.learners; l++)
        work->share[l].k = (float)(job->weight[l] / job->weight_sum);
}

/* Factors of the mean direction: every gradient as a unit vector. One of norm 0 has none and keeps
 * no factor; it counts in the mean radius alone. Without outliers weights play no part, and one of
 * norm 0 is a vector of zeros: the rule needs as many values as there are learners. */
static void direct(const sm_merge_job *job, sm_work *work) {
    work->directed = 1;
    for (size_t l = 0; l < job->pushes.learners; l++) {
        sm_share *share = &work->share[l];
        double weight = job->trim >= 0 ? 1.0 : job->weight[l] / job->weight_sum;
        if (share->norm != 0.0)
            share->k = sm_unit_factor(weight, share->norm);
        else if (job->trim >= 0)
            share->k = 0.0f;
    }
}

/* Factors of the first sum over the learners. */
static void finish_factors(void *context, const sm_task *task) {
    const sm_merge_job *job = context;
    if (job->mode == SM_RDA)
        direct(job, task->work);
    else
        average(job, task->work);
}

/* ------------------------------------------------------------------ direction */

static void pass_direction(void *context, const sm_task *task, size_t block, size_t blocks) {
    const sm_merge_job *job = context;
    float *direction = job->arrays.params_out;
    for (size_t b = block; b < block + blocks; b++) {
        size_t at = sm_element(task, b), n = sm_extent(task, b);
        if (job->trim >= 0)
            sm_trimmed(job, task->work, at, n, direction + at, task->scratch + SK_BLOCK);
        else
            combine(&job->pushes, task->work, at, n, direction + at, task->scratch + SK_BLOCK);
        sk_active.reduce->sumsq(direction + at, n, task->work->sums + b);
    }
}

/* Learners that cancel each other leave a direction that is noise of the rounding: then the average
 * is taken, whose factors the step uses for a sum of its own. */
static void finish_direction(void *context, const sm_task *task) {
    const sm_merge_job *job = context;
    sm_work *work = task->work;
    double length = sqrt(sm_tensor_total(task->plan, task->tensor, work->sums)), radial = 0.0;
    if (length < NO_DIRECTION) {
        average(job, work);
        return;
    }
    if (job->trim >= 0) {
        work->rescale = (float)(sm_trimmed_radius(job, work) / length);
        return;
    }
    for (size_t l = 0; l < job->pushes.learners; l++)
        radial += work->share[l].norm * job->weight[l];
    work->rescale = (float)((radial / job->weight_sum) / length);
}

/* The same for a fold, whose direction is there already. */
static void pass_length(void *context, const sm_task *task, size_t block, size_t blocks) {
    const sm_merge_job *job = context;
    for (size_t b = block; b < block + blocks; b++)
        sk_active.reduce->sumsq(job->fold->direction + sm_element(task, b), sm_extent(task, b),
                                task->work->sums + b);
}

static void finish_length(void *context, const sm_task *task) {
    const sm_merge_job *job = context;
    sm_work *work = task->work;
    double length = sqrt(sm_tensor_total(task->plan, task->tensor, work->sums));
    work->directed = !(length < NO_DIRECTION);
    work->rescale = (float)((job->fold->radial[task->tensor] / job->weight_sum) / length);
}

/* ------------------------------------------------------------------ step */

/* Several threads may find one; the lowest is told, so that it is the same for every thread count. A
 * lock is no cost where it is taken at most once per broken block. */
static void note_bad(sm_merge_job *job, size_t element) {
#ifdef _OPENMP
#pragma omp critical(sm_note_bad)
#endif
    if (element < job->bad) job->bad = element;
}

/* The merged gradient of [at, at+n), n <= SK_BLOCK, into `merged`.
 *
 * What is an array already is copied, although the outer step could read it in place: the scaling
 * must not write to it (a fold that is refused stays as it was), and in rda the array is params_out,
 * which the step writes. */
static void merged_block(const sm_merge_job *job, const sm_work *work, size_t at, size_t n,
                         float *merged, float *strip) {
    const float *source = NULL;
    float factor = 1.0f;
    if (job->merged != NULL) {
        source = job->merged;
    } else if (!(job->weight_sum > 0.0)) {
        memset(merged, 0, n * sizeof *merged);
    } else if (work->directed) {
        source = job->fold != NULL ? job->fold->direction : job->arrays.params_out;
        factor = work->rescale;
    } else if (job->fold != NULL) {
        source = job->fold->sum;
        factor = job->fold_scale;
    } else if (job->trim >= 0) {
        sm_trimmed(job, work, at, n, merged, strip);
    } else {
        combine(&job->pushes, work, at, n, merged, strip);
    }
    if (source == NULL) return;
    memcpy(merged, source + at, n * sizeof *merged);
    if (factor != 1.0f) sk_active.blend->scale(merged, factor, n);
}

/* The outer step tells in the same pass whether all it wrote is finite, instead of a scan of the
 * results afterwards that would read them from memory again. */
static void pass_step(void *context, const sm_task *task, size_t block, size_t blocks) {
    sm_merge_job *job = context;
    const sk_blend_variant *blend = sk_active.blend;
    float *merged = task->scratch, *strip = task->scratch + SK_BLOCK;
    for (size_t b = block; b < block + blocks; b++) {
        size_t at = sm_element(task, b), n = sm_extent(task, b);
        size_t row = task->plan->block[task->tensor] + b, good;
        merged_block(job, task->work, at, n, merged, strip);
        sk_active.reduce->sumsq(merged, n, job->merged_sums + row);
        if (job->stats != NULL) sm_note_stats(job, at, n, row, merged);
        if (job->outer < 0) {
            memcpy(job->arrays.params_out + at, merged, n * sizeof *merged);
            good = blend->scan(merged, n);
        } else {
            good = blend->outer[job->outer](&job->scalars, &job->arrays, at, merged, n,
                                            job->stream);
        }
        if (good != n) note_bad(job, at + good);
        if (job->stats != NULL) sm_stats_of_step(job, at, n, row, merged);
    }
}

/* ------------------------------------------------------------------ one tensor */

static void merge_tensor(void *context, const sm_task *task) {
    sm_merge_job *job = context;
    int rda = job->mode == SM_RDA;
    sm_once(sm_begin, &job->pushes, task);
    if (job->fold != NULL) {
        if (rda) {
            sm_spread(pass_length, job, task);
            sm_once(finish_length, job, task);
        }
    } else if (job->merged == NULL && job->weight_sum > 0.0) {
        if (job->pushes.heloco != NULL || rda) sm_correct(&job->pushes, task, job->mode);
        sm_once(finish_factors, job, task);
        if (rda) {
            sm_spread(pass_direction, job, task);
            sm_once(finish_direction, job, task);
        }
    }
    sm_spread(pass_step, job, task);
}

void sm_merge(sm_merge_job *job) {
    job->bad = SIZE_MAX;
    sm_each_tensor(&job->crew, merge_tensor, job);
    job->sumsq = sm_total(job->crew.plan, job->merged_sums);
}
