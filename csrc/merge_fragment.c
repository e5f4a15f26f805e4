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
 * put a part of its order into the hands of the thread count.
 *
 * Why strips of SM_STRIP elements inside of them: what is merged stays in the first-level cache until
 * the outer step has read it, and the streams of parameters and state are never far from those of the
 * gradients, so that memory is busy with all of them. Measured: 0.80 ns per parameter, whole blocks
 * 0.99; prefetching by hand is slower than the core's own (1.0 and more), and a fence after each strip
 * takes what streaming gives, so there is one after each block.
 *
 * Why two passes for rda, and not one that scales the parameters afterwards: the factor of the
 * direction depends on its length over the whole tensor, and the outer step rounds, so it cannot be
 * taken first and corrected later. The direction waits in params_out, memory that the result needs
 * anyway and that nobody reads before the step; each strip of it is overwritten only after it was
 * read. Why it is written at all: making it again in the step reads all gradients instead of 4 bytes,
 * and was slower even with a single learner, for which it moves fewer bytes.
 */
#include "merge_internal.h"

#define NO_DIRECTION 1e-12 /* a mean direction shorter than this has no meaning: average instead */

/* ------------------------------------------------------------------ the sum over the learners */

/* Factors of an average: rounded to f32 once, here, and not per element. */
static void average(const sm_merge_job *job, sm_work *work) {
    work->directed = 0;
    work->summed_count = job->pushes.learners;
    for (size_t l = 0; l < job->pushes.learners; l++) {
        work->term[l].k = (float)(job->weight[l] / job->weight_sum);
        work->summed[l] = work->term[l];
    }
}

/* Factors of the mean direction: every gradient as a unit vector. One of norm 0 has none and keeps
 * no factor; it counts in the mean radius alone. Without outliers weights play no part, and one of
 * norm 0 is a vector of zeros: the rule needs as many values as there are learners. */
static void direct(const sm_merge_job *job, sm_work *work) {
    work->directed = 1;
    work->summed_count = 0;
    for (size_t l = 0; l < job->pushes.learners; l++) {
        double norm = work->share[l].norm;
        double weight = job->trim >= 0 ? 1.0 : job->weight[l] / job->weight_sum;
        work->term[l].k = norm != 0.0 ? sm_unit_factor(weight, norm) : 0.0f;
        if (norm != 0.0) work->summed[work->summed_count++] = work->term[l];
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

static void pass_direction(void *context, const sm_task *task, size_t block) {
    const sm_merge_job *job = context;
    const sm_work *work = task->work;
    const sk_blend_variant *blend = sk_active.blend;
    const size_t at = sm_element(task, block), n = sm_extent(task, block);
    float *direction = job->arrays.params_out + at;
    double lanes[SK_LANES] = {0};
    if (job->trim >= 0)
        for (size_t s = 0; s < n; s += SM_STRIP) {
            const size_t len = sm_smaller(SM_STRIP, n - s);
            sm_trimmed(job, work, at + s, len, direction + s, task->scratch + SK_BLOCK);
            blend->scaled(direction + s, direction + s, 1.0f, len, lanes);
        }
    else
        blend->combine(work->summed, work->summed_count, job->pushes.momentum, at, n, direction,
                       job->stream, lanes);
    sk_stores_done();
    work->sums[block] = sk_fold_lanes(lanes);
    sm_reads(task, SM_DIRECTION, SM_GRADIENTS,
             job->trim >= 0 ? job->pushes.learners : work->summed_count, n);
    sm_reads(task, SM_DIRECTION, SM_STATE, work->turned != 0, n);
    sm_writes(task, SM_DIRECTION, SM_RESULT, 1, n);
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
static void pass_length(void *context, const sm_task *task, size_t block) {
    const sm_merge_job *job = context;
    const size_t at = sm_element(task, block), n = sm_extent(task, block);
    sk_active.reduce->sumsq(job->fold->direction + at, n, task->work->sums + block);
    sm_reads(task, SM_LENGTH, SM_MERGED, 1, n);
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

/* The merged gradient of [at, at+n), n <= SM_STRIP, into `merged`; its squares to the lanes.
 *
 * What is an array already is copied, although the outer step could read it in place: the scaling
 * must not write to it (a fold that is refused stays as it was), and in rda the array is params_out,
 * which the step writes. */
static void merged_strip(const sm_merge_job *job, const sm_task *task, size_t at, size_t n,
                         float *merged, double *lanes) {
    const sk_blend_variant *blend = sk_active.blend;
    const sm_work *work = task->work;
    if (job->merged != NULL) {
        blend->scaled(merged, job->merged + at, 1.0f, n, lanes);
    } else if (!(job->weight_sum > 0.0)) {
        memset(merged, 0, n * sizeof *merged);
    } else if (work->directed) {
        const float *source = job->fold != NULL ? job->fold->direction : job->arrays.params_out;
        blend->scaled(merged, source + at, work->rescale, n, lanes);
    } else if (job->fold != NULL) {
        blend->scaled(merged, job->fold->sum + at, job->fold_scale, n, lanes);
    } else if (job->trim >= 0) {
        sm_trimmed(job, work, at, n, merged, task->scratch + SK_BLOCK);
        blend->scaled(merged, merged, 1.0f, n, lanes);
    } else {
        blend->combine(work->summed, work->summed_count, job->pushes.momentum, at, n, merged, 0,
                       lanes);
    }
}

/* What merged_strip reads, and the outer step reads and writes. A momentum that a correction reads is
 * in the cache when the step reads it. */
static void count_step(const sm_merge_job *job, const sm_task *task, size_t n) {
    const sm_work *work = task->work;
    const size_t states = (job->arrays.state[0] != NULL) + (size_t)(job->arrays.state[1] != NULL);
    const int stepped = job->outer >= 0;
    if (job->merged != NULL || (job->fold != NULL && job->weight_sum > 0.0))
        sm_reads(task, SM_STEP, SM_MERGED, 1, n);
    else if (job->weight_sum > 0.0 && work->directed)
        sm_reads(task, SM_STEP, SM_RESULT, 1, n);
    else if (job->weight_sum > 0.0)
        sm_reads(task, SM_STEP, SM_GRADIENTS, job->pushes.learners, n);
    sm_reads(task, SM_STEP, SM_STATE, stepped ? states : (size_t)(work->turned != 0), n);
    sm_reads(task, SM_STEP, SM_PARAMS, (size_t)stepped, n);
    sm_writes(task, SM_STEP, SM_NEW_STATE, stepped ? states : 0, n);
    sm_writes(task, SM_STEP, SM_RESULT, 1, n);
}

/* The outer step tells in the same pass whether all it wrote is finite, instead of a scan of the
 * results afterwards that would read them from memory again. Statistics need the whole block. */
static void pass_step(void *context, const sm_task *task, size_t block) {
    sm_merge_job *job = context;
    const sk_blend_variant *blend = sk_active.blend;
    const size_t at = sm_element(task, block), n = sm_extent(task, block);
    const size_t row = task->plan->block[task->tensor] + block;
    double lanes[SK_LANES] = {0};
    for (size_t s = 0; s < n; s += SM_STRIP) {
        const size_t len = sm_smaller(SM_STRIP, n - s);
        float *merged = task->scratch + (job->stats != NULL ? s : 0);
        size_t good;
        merged_strip(job, task, at + s, len, merged, lanes);
        if (job->outer < 0) {
            memcpy(job->arrays.params_out + at + s, merged, len * sizeof *merged);
            good = blend->scan(merged, len);
        } else {
            good = blend->outer[job->outer](&job->scalars, &job->arrays, at + s, merged, len,
                                            job->stream);
        }
        if (good != len) note_bad(job, at + s + good);
    }
    sk_stores_done();
    count_step(job, task, n);
    job->merged_sums[row] = sk_fold_lanes(lanes);
    if (job->stats == NULL) return;
    sm_note_stats(job, at, n, row, task->scratch);
    sm_stats_of_step(job, at, n, row, task->scratch);
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
