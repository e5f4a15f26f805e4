/* The passes over one tensor: HeLoCo, avg, rda, the folds and the outer step.
 *
 * Must not: allocate, or know how many threads there are.
 *
 * A tensor takes up to five passes:
 *
 *   measure    d.d, d.m and m.m of every gradient         HeLoCo, or rda
 *   rotated    the squares of t = wu*d + wv*m              only if HeLoCo rotates one
 *   remeasure  d.d of the corrected gradients              only rda after a correction
 *   direction  sum of k*d into params_out, and its square  only rda
 *   step       the merged gradient, its square, and the outer step
 *
 * Corrected gradients are never stored: each pass makes them again, strip by strip, in the cache.
 */
#include "merge_passes.h"

#define NO_DIRECTION 1e-12 /* a mean direction shorter than this has no meaning: average instead */

/* out = sum over learners of k*d for [at, at+n); a learner whose k was never set is left out. */
static void combine(const sm_job *job, const sm_work *work, size_t at, size_t n, float *out,
                    float *strip) {
    const sk_blend_variant *blend = sk_active.blend;
    for (size_t s = 0; s < n; s += SM_STRIP) {
        size_t len = sm_smaller(SM_STRIP, n - s);
        int begun = 0;
        for (size_t l = 0; l < job->learners; l++) {
            if (work->share[l].norm == 0.0 && work->directed) continue;
            if (work->share[l].turn != SM_KEEP)
                sm_expect(job->gradient[l] + at + s + len, sm_smaller(SM_STRIP, n - s - len));
            const float *d = sm_corrected(job, work, l, at + s, len, strip);
            (begun++ ? blend->accumulate : blend->first)(out + s, d, work->share[l].k, len);
        }
        if (!begun) memset(out + s, 0, len * sizeof *out);
    }
}

/* ------------------------------------------------------------------ measure */

static void pass_measure(sm_job *job, sm_work *work, size_t tensor, size_t block, size_t blocks,
                         float *scratch) {
    const sk_reduce_variant *reduce = sk_active.reduce;
    for (size_t b = block; b < block + blocks; b++) {
        size_t at = sm_element(job, tensor, b), n = sm_extent(job, tensor, b);
        for (size_t l = 0; l < job->learners; l++) {
            const float *d = sm_received(job, l, at, n, scratch);
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
        share->norm = sqrt(sm_tensor_total(job->plan, tensor, sums));
        share->turn = SM_KEEP;
        if (job->heloco == NULL) continue;
        if (l == 0) dm = sqrt(sm_tensor_total(job->plan, tensor, sums + 2 * work->stride));
        turn(job->heloco, share, sm_tensor_total(job->plan, tensor, sums + work->stride), dm);
        share->turned[share->turn] += job->plan->offset[tensor + 1] - job->plan->offset[tensor];
        work->turned |= share->turn != SM_KEEP;
        work->rotated |= share->turn == SM_ROTATE;
    }
}

/* ------------------------------------------------------------------ corrected gradients */

static void pass_rotated(sm_job *job, sm_work *work, size_t tensor, size_t block, size_t blocks,
                         float *scratch) {
    for (size_t b = block; b < block + blocks; b++) {
        size_t at = sm_element(job, tensor, b), n = sm_extent(job, tensor, b);
        for (size_t l = 0; l < job->learners; l++) {
            const sm_share *share = &work->share[l];
            if (share->turn == SM_ROTATE)
                sk_active.reduce->rotated(sm_received(job, l, at, n, scratch),
                                          job->arrays.state[0] + at, share->wu, share->wv, n,
                                          work->sums + 3 * l * work->stride + b);
        }
    }
}

static void finish_rotated(sm_job *job, sm_work *work, size_t tensor) {
    for (size_t l = 0; l < job->learners; l++) {
        sm_share *share = &work->share[l];
        if (share->turn != SM_ROTATE) continue;
        double size = sqrt(sm_tensor_total(job->plan, tensor, work->sums + 3 * l * work->stride));
        if (size < job->heloco->eps) size = job->heloco->eps;
        share->q = (float)(share->norm / size);
    }
}

static void pass_remeasure(sm_job *job, sm_work *work, size_t tensor, size_t block, size_t blocks,
                           float *scratch) {
    for (size_t b = block; b < block + blocks; b++) {
        size_t at = sm_element(job, tensor, b), n = sm_extent(job, tensor, b);
        for (size_t l = 0; l < job->learners; l++) {
            if (work->share[l].turn == SM_KEEP) continue;
            /* what is corrected next: the next learner, or the first one's next block */
            int last = l + 1 == job->learners;
            size_t ahead = last ? at + n : at;
            if (ahead + n > job->plan->offset[job->plan->tensors]) ahead = at;
            const float *next = job->gradient[last ? 0 : l + 1] + ahead;
            for (size_t s = 0; s < n; s += SM_STRIP) {
                size_t len = sm_smaller(SM_STRIP, n - s);
                sm_expect(next + s, len);
                sm_corrected(job, work, l, at + s, len, scratch + s);
            }
            sk_active.reduce->sumsq(scratch, n, work->sums + 3 * l * work->stride + b);
        }
    }
}

static void finish_remeasure(sm_job *job, sm_work *work, size_t tensor) {
    for (size_t l = 0; l < job->learners; l++)
        if (work->share[l].turn != SM_KEEP)
            work->share[l].norm = sqrt(sm_tensor_total(job->plan, tensor, work->sums + 3 * l * work->stride));
}

/* ------------------------------------------------------------------ factors and direction */

static void average(const sm_job *job, sm_work *work) {
    work->directed = 0;
    for (size_t l = 0; l < job->learners; l++)
        work->share[l].k = (float)(job->weight[l] / job->weight_sum);
}

/* Factor that makes a unit vector of a gradient, times `weight`. One so short (all subnormal) that the
 * factor is no f32 has no direction that could be added: 0, which changes nothing in a sum. */
static float unit_factor(double weight, double norm) {
    float k = (float)(weight / norm);
    return isfinite(k) ? k : 0.0f;
}

static void direct(const sm_job *job, sm_work *work) {
    work->directed = 1;
    for (size_t l = 0; l < job->learners; l++)
        if (work->share[l].norm != 0.0)
            work->share[l].k = unit_factor(job->weight[l] / job->weight_sum, work->share[l].norm);
}

static void pass_direction(sm_job *job, sm_work *work, size_t tensor, size_t block, size_t blocks,
                           float *scratch) {
    for (size_t b = block; b < block + blocks; b++) {
        size_t at = sm_element(job, tensor, b), n = sm_extent(job, tensor, b);
        combine(job, work, at, n, job->arrays.params_out + at, scratch + SK_BLOCK);
        sk_active.reduce->sumsq(job->arrays.params_out + at, n, work->sums + b);
    }
}

static void finish_direction(sm_job *job, sm_work *work, size_t tensor) {
    double length = sqrt(sm_tensor_total(job->plan, tensor, work->sums)), radial = 0.0;
    if (length < NO_DIRECTION) {
        average(job, work);
        return;
    }
    for (size_t l = 0; l < job->learners; l++) radial += work->share[l].norm * job->weight[l];
    work->rescale = (float)((radial / job->weight_sum) / length);
}

/* Factors of the first sum over the learners. */
static void finish_factors(sm_job *job, sm_work *work, size_t tensor) {
    (void)tensor;
    if (job->mode == SM_RDA)
        direct(job, work);
    else
        average(job, work);
}

/* ------------------------------------------------------------------ step */

static void note_bad(sm_job *job, size_t tensor) {
#ifdef _OPENMP
#pragma omp critical(sm_note_bad)
#endif
    if (tensor < job->bad_tensor) job->bad_tensor = tensor;
}

/* The merged gradient of [at, at+n), n <= SK_BLOCK, into `merged`. */
static void merged_block(const sm_job *job, const sm_work *work, size_t at, size_t n, float *merged,
                         float *strip) {
    const float *source = NULL;
    float factor = 1.0f;
    if (job->merged != NULL) {
        source = job->merged;
    } else if (!(job->weight_sum > 0.0)) {
        memset(merged, 0, n * sizeof *merged);
    } else if (work->directed) {
        source = job->fold.sum != NULL ? job->fold.direction : job->arrays.params_out;
        factor = work->rescale;
    } else if (job->fold.sum != NULL) {
        source = job->fold.sum;
        factor = job->fold.scale;
    } else if (job->trim >= 0) {
        sm_trimmed(job, work, at, n, merged, strip);
    } else {
        combine(job, work, at, n, merged, strip);
    }
    if (source == NULL) return;
    memcpy(merged, source + at, n * sizeof *merged);
    if (factor != 1.0f) sk_active.blend->scale(merged, factor, n);
}

static void pass_step(sm_job *job, sm_work *work, size_t tensor, size_t block, size_t blocks,
                      float *scratch) {
    const sk_blend_variant *blend = sk_active.blend;
    for (size_t b = block; b < block + blocks; b++) {
        size_t at = sm_element(job, tensor, b), n = sm_extent(job, tensor, b);
        size_t row = job->plan->block[tensor] + b, good;
        float *merged = scratch;
        merged_block(job, work, at, n, merged, scratch + SK_BLOCK);
        sk_active.reduce->sumsq(merged, n, job->merged_sums + row);
        if (job->stats != NULL) sm_note_stats(job, at, n, row, merged);
        if (job->outer < 0) {
            memcpy(job->arrays.params_out + at, merged, n * sizeof *merged);
            good = blend->scan(merged, n);
        } else {
            good = blend->outer[job->outer](&job->scalars, &job->arrays, at, merged, n,
                                             job->stream);
        }
        if (good != n) note_bad(job, tensor);
        if (job->stats != NULL) sm_stats_of_step(job, at, n, row, merged);
    }
}

/* ------------------------------------------------------------------ folds */

static void finish_fold(sm_job *job, sm_work *work, size_t tensor) {
    sm_share *share = &work->share[0];
    if (job->fold.direction == NULL) return;
    job->fold.radial[tensor] += share->norm * job->fold.weight;
    if (share->norm != 0.0) share->k = unit_factor(job->fold.factor, share->norm);
}

static void pass_fold(sm_job *job, sm_work *work, size_t tensor, size_t block, size_t blocks,
                      float *scratch) {
    const sk_blend_variant *blend = sk_active.blend;
    const sm_fold *fold = &job->fold;
    for (size_t b = block; b < block + blocks; b++) {
        size_t at = sm_element(job, tensor, b), n = sm_extent(job, tensor, b);
        for (size_t s = 0; s < n; s += SM_STRIP) {
            size_t len = sm_smaller(SM_STRIP, n - s);
            const float *d = sm_corrected(job, work, 0, at + s, len, scratch);
            blend->accumulate(fold->sum + at + s, d, (float)fold->factor, len);
            if (fold->direction != NULL && work->share[0].norm != 0.0)
                blend->accumulate(fold->direction + at + s, d, work->share[0].k, len);
        }
    }
}

static void pass_length(sm_job *job, sm_work *work, size_t tensor, size_t block, size_t blocks,
                        float *scratch) {
    (void)scratch;
    for (size_t b = block; b < block + blocks; b++)
        sk_active.reduce->sumsq(job->fold.direction + sm_element(job, tensor, b),
                                sm_extent(job, tensor, b), work->sums + b);
}

static void finish_length(sm_job *job, sm_work *work, size_t tensor) {
    double length = sqrt(sm_tensor_total(job->plan, tensor, work->sums));
    work->directed = !(length < NO_DIRECTION);
    work->rescale = (float)((job->fold.radial[tensor] / job->weight_sum) / length);
}

/* ------------------------------------------------------------------ one tensor */

static void begin(sm_job *job, sm_work *work, size_t tensor) {
    (void)tensor;
    work->turned = work->rotated = work->directed = 0;
    for (size_t l = 0; l < job->learners; l++) work->share[l].turn = SM_KEEP;
}

/* Measures and corrects all gradients. The conditions of a team read only what `sm_once` wrote, and
 * a barrier lies between that and the next `sm_once` that writes it. */
static void correct_tensor(sm_job *job, sm_work *work, size_t tensor, float *scratch, int team) {
    sm_spread(pass_measure, job, work, tensor, scratch, team);
    sm_once(finish_measure, job, work, tensor, team);
    int rotated = work->rotated, remeasured = work->turned && job->mode == SM_RDA;
    if (rotated) {
        sm_spread(pass_rotated, job, work, tensor, scratch, team);
        sm_once(finish_rotated, job, work, tensor, team);
    }
    if (remeasured) {
        sm_spread(pass_remeasure, job, work, tensor, scratch, team);
        sm_once(finish_remeasure, job, work, tensor, team);
    }
}

static void merge_tensor(sm_job *job, sm_work *work, size_t tensor, float *scratch, int team) {
    sm_once(begin, job, work, tensor, team);
    if (job->fold.sum != NULL) {
        if (job->mode == SM_RDA) {
            sm_spread(pass_length, job, work, tensor, scratch, team);
            sm_once(finish_length, job, work, tensor, team);
        }
    } else if (job->merged == NULL && job->weight_sum > 0.0) {
        if (job->heloco != NULL || job->mode == SM_RDA)
            correct_tensor(job, work, tensor, scratch, team);
        sm_once(finish_factors, job, work, tensor, team);
        if (job->mode == SM_RDA) {
            sm_spread(pass_direction, job, work, tensor, scratch, team);
            sm_once(finish_direction, job, work, tensor, team);
        }
    }
    sm_spread(pass_step, job, work, tensor, scratch, team);
}

static void fold_tensor(sm_job *job, sm_work *work, size_t tensor, float *scratch, int team) {
    sm_once(begin, job, work, tensor, team);
    if (job->heloco != NULL || job->mode == SM_RDA)
        correct_tensor(job, work, tensor, scratch, team);
    sm_once(finish_fold, job, work, tensor, team);
    sm_spread(pass_fold, job, work, tensor, scratch, team);
}

void sm_merge(sm_job *job) {
    job->bad_tensor = SIZE_MAX;
    sm_each_tensor(job, merge_tensor);
    job->sumsq = sm_total(job->plan, job->merged_sums);
}

void sm_fold_add(sm_job *job) { sm_each_tensor(job, fold_tensor); }
