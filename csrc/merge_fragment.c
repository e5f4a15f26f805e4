/* The passes over one tensor, and how tensors and blocks are shared out between threads.
 *
 * Must not: allocate, or read the number of threads anywhere but in the sharing out.
 *
 * A tensor takes up to five passes. Each pass reads blocks in any order and leaves one sum per block;
 * what needs the whole tensor (finish_*) runs between two passes, adding those sums left to right.
 *
 *   measure    d.d, d.m and m.m of every gradient         HeLoCo, or rda
 *   turned     the squares of t = wu*d + wv*m              only if HeLoCo rotates one
 *   remeasure  d.d of the corrected gradients              only rda after a correction
 *   direction  sum of k*d into params_out, and its square  only rda
 *   step       the merged gradient, its square, and the outer step
 *
 * Corrected gradients are never stored: each pass makes them again, strip by strip, in the cache.
 */
#include "syncer_merge.h"

#include <math.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#define NO_DIRECTION 1e-12 /* a mean direction shorter than this has no meaning: average instead */

typedef void (*pass_fn)(sm_job *job, sm_work *work, size_t tensor, size_t block, size_t blocks,
                        float *scratch);
typedef void (*finish_fn)(sm_job *job, sm_work *work, size_t tensor);

static inline size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

/* Elements of `blocks` blocks from `block` on. */
static inline size_t extent(const sm_job *job, size_t tensor, size_t block, size_t blocks) {
    size_t n = job->plan->offset[tensor + 1] - job->plan->offset[tensor];
    return smaller(blocks * SK_BLOCK, n - block * SK_BLOCK);
}

static inline size_t element(const sm_job *job, size_t tensor, size_t block) {
    return job->plan->offset[tensor] + block * SK_BLOCK;
}

static double total(const sm_job *job, size_t tensor, const double *row) {
    size_t blocks = job->plan->block[tensor + 1] - job->plan->block[tensor];
    double sum = 0.0;
    for (size_t b = 0; b < blocks; b++) sum += row[b];
    return sum;
}

/* The corrected gradient of [at, at+n), n <= SM_STRIP: the gradient itself, or `strip` filled. */
static const float *corrected(const sm_job *job, const sm_work *work, size_t learner, size_t at,
                              size_t n, float *strip) {
    const sm_share *share = &work->share[learner];
    const float *d = job->gradient[learner] + at;
    if (share->turn == SM_KEEP) return d;
    const float *m = job->arrays.state[0] + at;
    if (share->turn == SM_SHRINK)
        sk_active.blend->shrink(strip, d, m, share->q, n);
    else
        sk_active.blend->rotate(strip, d, m, share->wu, share->wv, share->q, n);
    return strip;
}

/* out = sum over learners of k*d for [at, at+n); a learner whose k was never set is left out. */
static void combine(const sm_job *job, const sm_work *work, size_t at, size_t n, float *out,
                    float *strip) {
    const sk_blend_variant *blend = sk_active.blend;
    for (size_t s = 0; s < n; s += SM_STRIP) {
        size_t len = smaller(SM_STRIP, n - s);
        int begun = 0;
        for (size_t l = 0; l < job->learners; l++) {
            if (work->share[l].norm == 0.0 && work->directed) continue;
            const float *d = corrected(job, work, l, at + s, len, strip);
            (begun++ ? blend->accumulate : blend->first)(out + s, d, work->share[l].k, len);
        }
        if (!begun) memset(out + s, 0, len * sizeof *out);
    }
}

/* ------------------------------------------------------------------ measure */

static void pass_measure(sm_job *job, sm_work *work, size_t tensor, size_t block, size_t blocks,
                         float *scratch) {
    (void)scratch;
    const sk_reduce_variant *reduce = sk_active.reduce;
    for (size_t b = block; b < block + blocks; b++) {
        size_t at = element(job, tensor, b), n = extent(job, tensor, b, 1);
        for (size_t l = 0; l < job->learners; l++) {
            const float *d = job->gradient[l] + at;
            double *sums = work->sums + 3 * l * work->stride + b;
            if (job->heloco == NULL)
                reduce->sumsq(d, n, sums);
            else
                reduce->three(d, job->arrays.state[0] + at, n, sums, work->stride);
        }
    }
}

/* HeLoCo: decides keep, shrink or rotate from the three sums of one gradient. */
static void turn(const sm_heloco *h, sm_share *share, double dm_dot, double dm) {
    double du = share->norm;
    share->turn = SM_KEEP;
    if (du < h->eps || dm < h->eps) return;
    double c = dm_dot / (du * dm);
    if (c >= h->c_ok) return;
    double conf = du / ((du + h->kappa * dm) + h->eps);
    if (c < 0.0) {
        double beta = (h->k_s * (-c)) * conf;
        if (beta > h->beta_max) beta = h->beta_max;
        share->q = (float)(((-beta * c) * du) / dm);
        share->turn = SM_SHRINK;
    } else {
        double lambda = (h->k_d * (1.0 - c)) * conf;
        if (lambda > 1.0) lambda = 1.0;
        share->wu = (1.0 - lambda) / du;
        share->wv = lambda / dm;
        share->turn = SM_ROTATE;
    }
}

static void finish_measure(sm_job *job, sm_work *work, size_t tensor) {
    work->turned = work->rotated = 0;
    double dm = 0.0;
    for (size_t l = 0; l < job->learners; l++) {
        sm_share *share = &work->share[l];
        const double *sums = work->sums + 3 * l * work->stride;
        share->norm = sqrt(total(job, tensor, sums));
        share->turn = SM_KEEP;
        if (job->heloco == NULL) continue;
        if (l == 0) dm = sqrt(total(job, tensor, sums + 2 * work->stride));
        turn(job->heloco, share, total(job, tensor, sums + work->stride), dm);
        work->turned |= share->turn != SM_KEEP;
        work->rotated |= share->turn == SM_ROTATE;
    }
}

/* ------------------------------------------------------------------ corrected gradients */

static void pass_rotated(sm_job *job, sm_work *work, size_t tensor, size_t block, size_t blocks,
                         float *scratch) {
    (void)scratch;
    for (size_t b = block; b < block + blocks; b++) {
        size_t at = element(job, tensor, b), n = extent(job, tensor, b, 1);
        for (size_t l = 0; l < job->learners; l++) {
            const sm_share *share = &work->share[l];
            if (share->turn == SM_ROTATE)
                sk_active.reduce->rotated(job->gradient[l] + at, job->arrays.state[0] + at,
                                          share->wu, share->wv, n,
                                          work->sums + 3 * l * work->stride + b);
        }
    }
}

static void finish_rotated(sm_job *job, sm_work *work, size_t tensor) {
    for (size_t l = 0; l < job->learners; l++) {
        sm_share *share = &work->share[l];
        if (share->turn != SM_ROTATE) continue;
        double size = sqrt(total(job, tensor, work->sums + 3 * l * work->stride));
        if (size < job->heloco->eps) size = job->heloco->eps;
        share->q = (float)(share->norm / size);
    }
}

static void pass_remeasure(sm_job *job, sm_work *work, size_t tensor, size_t block, size_t blocks,
                           float *scratch) {
    for (size_t b = block; b < block + blocks; b++) {
        size_t at = element(job, tensor, b), n = extent(job, tensor, b, 1);
        for (size_t l = 0; l < job->learners; l++) {
            if (work->share[l].turn == SM_KEEP) continue;
            for (size_t s = 0; s < n; s += SM_STRIP)
                corrected(job, work, l, at + s, smaller(SM_STRIP, n - s), scratch + s);
            sk_active.reduce->sumsq(scratch, n, work->sums + 3 * l * work->stride + b);
        }
    }
}

static void finish_remeasure(sm_job *job, sm_work *work, size_t tensor) {
    for (size_t l = 0; l < job->learners; l++)
        if (work->share[l].turn != SM_KEEP)
            work->share[l].norm = sqrt(total(job, tensor, work->sums + 3 * l * work->stride));
}

/* ------------------------------------------------------------------ factors and direction */

static void average(const sm_job *job, sm_work *work) {
    work->directed = 0;
    for (size_t l = 0; l < job->learners; l++)
        work->share[l].k = (float)(job->weight[l] / job->weight_sum);
}

static void direct(const sm_job *job, sm_work *work) {
    work->directed = 1;
    for (size_t l = 0; l < job->learners; l++)
        if (work->share[l].norm != 0.0)
            work->share[l].k = (float)((job->weight[l] / job->weight_sum) / work->share[l].norm);
}

static void pass_direction(sm_job *job, sm_work *work, size_t tensor, size_t block, size_t blocks,
                           float *scratch) {
    for (size_t b = block; b < block + blocks; b++) {
        size_t at = element(job, tensor, b), n = extent(job, tensor, b, 1);
        combine(job, work, at, n, job->arrays.params_out + at, scratch + SK_BLOCK);
        sk_active.reduce->sumsq(job->arrays.params_out + at, n, work->sums + b);
    }
}

static void finish_direction(sm_job *job, sm_work *work, size_t tensor) {
    double length = sqrt(total(job, tensor, work->sums)), radial = 0.0;
    if (length < NO_DIRECTION) {
        average(job, work);
        return;
    }
    for (size_t l = 0; l < job->learners; l++) radial += work->share[l].norm * job->weight[l];
    work->rescale = (float)((radial / job->weight_sum) / length);
}

/* ------------------------------------------------------------------ step */

static void note_bad(sm_job *job, size_t tensor) {
#ifdef _OPENMP
#pragma omp critical(sm_note_bad)
#endif
    if (tensor < job->bad_tensor) job->bad_tensor = tensor;
}

static void pass_step(sm_job *job, sm_work *work, size_t tensor, size_t block, size_t blocks,
                      float *scratch) {
    const sk_blend_variant *blend = sk_active.blend;
    for (size_t b = block; b < block + blocks; b++) {
        size_t at = element(job, tensor, b), n = extent(job, tensor, b, 1);
        float *merged = scratch;
        if (job->learners == 0) {
            memcpy(merged, job->merged + at, n * sizeof *merged);
        } else if (!(job->weight_sum > 0.0)) {
            memset(merged, 0, n * sizeof *merged);
        } else if (work->directed) {
            memcpy(merged, job->arrays.params_out + at, n * sizeof *merged);
            blend->scale(merged, work->rescale, n);
        } else {
            combine(job, work, at, n, merged, scratch + SK_BLOCK);
        }
        sk_active.reduce->sumsq(merged, n, job->merged_sums + job->plan->block[tensor] + b);
        size_t good;
        if (job->outer < 0) {
            memcpy(job->arrays.params_out + at, merged, n * sizeof *merged);
            good = blend->scan(merged, n);
        } else {
            good = blend->outer[job->outer](&job->scalars, &job->arrays, at, merged, n, 0);
        }
        if (good != n) note_bad(job, tensor);
    }
}

/* ------------------------------------------------------------------ sharing out */

/* One pass over a tensor: by the calling thread alone, or with the team and a barrier at the end. */
static void spread(pass_fn pass, sm_job *job, sm_work *work, size_t tensor, float *scratch,
                   int team) {
    size_t blocks = job->plan->block[tensor + 1] - job->plan->block[tensor];
    if (!team) {
        pass(job, work, tensor, 0, blocks, scratch);
        return;
    }
#ifdef _OPENMP
#pragma omp for schedule(dynamic, 2)
#endif
    for (size_t b = 0; b < blocks; b++) pass(job, work, tensor, b, 1, scratch);
}

/* One thread of the team does it, and the others wait. */
static void once(finish_fn finish, sm_job *job, sm_work *work, size_t tensor, int team) {
    if (!team) {
        finish(job, work, tensor);
        return;
    }
#ifdef _OPENMP
#pragma omp single
#endif
    finish(job, work, tensor);
}

/* The coefficients of the first sum: runs between two passes, like the other finish functions. */
static void finish_factors(sm_job *job, sm_work *work, size_t tensor) {
    (void)tensor;
    if (job->mode == SM_RDA)
        direct(job, work);
    else
        average(job, work);
}

static void begin(sm_job *job, sm_work *work, size_t tensor) {
    (void)tensor;
    work->turned = work->rotated = work->directed = 0;
    for (size_t l = 0; l < job->learners; l++) work->share[l].turn = SM_KEEP;
}

/* All passes of one tensor. In a team every thread runs this with the same `work`; the conditions
 * read only what `once` wrote, and a barrier lies between that and the next `once`. */
static void merge_tensor(sm_job *job, sm_work *work, size_t tensor, float *scratch, int team) {
    int sums_to_something = job->learners != 0 && job->weight_sum > 0.0;
    once(begin, job, work, tensor, team);
    if (sums_to_something) {
        if (job->heloco != NULL || job->mode == SM_RDA) {
            spread(pass_measure, job, work, tensor, scratch, team);
            once(finish_measure, job, work, tensor, team);
            int rotated = work->rotated, remeasured = work->turned && job->mode == SM_RDA;
            if (rotated) {
                spread(pass_rotated, job, work, tensor, scratch, team);
                once(finish_rotated, job, work, tensor, team);
            }
            if (remeasured) {
                spread(pass_remeasure, job, work, tensor, scratch, team);
                once(finish_remeasure, job, work, tensor, team);
            }
        }
        once(finish_factors, job, work, tensor, team);
        if (job->mode == SM_RDA) {
            spread(pass_direction, job, work, tensor, scratch, team);
            once(finish_direction, job, work, tensor, team);
        }
    }
    spread(pass_step, job, work, tensor, scratch, team);
}

static void serve(sm_job *job, int thread) {
    float *scratch = job->scratch + (size_t)thread * (SK_BLOCK + SM_STRIP);
    const sm_plan *plan = job->plan;
    for (size_t i = 0; i < plan->shared_count; i++)
        merge_tensor(job, &job->shared, plan->shared[i], scratch, 1);
#ifdef _OPENMP
#pragma omp for schedule(dynamic, 1) nowait
#endif
    for (size_t i = 0; i < plan->whole_count; i++)
        for (size_t t = plan->whole[2 * i]; t < plan->whole[2 * i + 1]; t++)
            merge_tensor(job, &job->own[thread], t, scratch, 0);
}

void sm_merge(sm_job *job) {
    const sm_plan *plan = job->plan;
    job->bad_tensor = SIZE_MAX;
#ifdef _OPENMP
    if (job->threads > 1) {
#pragma omp parallel num_threads(job->threads)
        serve(job, omp_get_thread_num());
    } else
#endif
        for (size_t t = 0; t < plan->tensors; t++)
            merge_tensor(job, &job->shared, t, job->scratch, 0);
    job->sumsq = 0.0;
    for (size_t t = 0; t < plan->tensors; t++)
        job->sumsq += total(job, t, job->merged_sums + plan->block[t]);
}
