/* What each gradient is when it enters a sum: its norm, and the HeLoCo correction.
 *
 * Must not: store a corrected gradient, or know what it is added to (a merge or a fold).
 *
 * A tensor takes up to three passes here:
 *
 *   measure    d.d, d.m and m.m of every gradient   HeLoCo, or rda
 *   rotated    the squares of t = wu*d + wv*m        only if HeLoCo rotates one
 *   remeasure  d.d of the corrected gradients        only rda after a correction
 *
 * Why three: each asks for a sum over the whole tensor that the next one needs before its first
 * element. Whether a gradient is turned depends on its norm and its cosine; how far it is scaled
 * after a rotation, on the norm of the rotation; its share in a mean direction, on its norm after
 * both. Blocks cannot decide that for themselves, or the cut would be part of the result.
 *
 * Why corrected gradients are not kept: they would have to be written to memory and read back in
 * each later pass, 8 bytes per parameter and learner, and the server would need room for a second
 * copy of all pushes. Making them again reads the 4 bytes of the gradient that a later pass reads
 * anyway and those of the momentum, once for all learners: what it costs is arithmetic, in registers.
 * docs/merge.md has the figures.
 */
#include "merge_internal.h"

void sm_begin(void *context, const sm_task *task) {
    const sm_pushes *pushes = context;
    sm_work *work = task->work;
    work->turned = work->rotated = work->directed = 0;
    for (size_t l = 0; l < pushes->learners; l++)
        work->term[l] = (sk_term){.d = pushes->gradient[l],
                                  .clip = pushes->clip != NULL ? pushes->clip[l] : 1.0f,
                                  .turn = SK_KEEP};
}

/* ------------------------------------------------------------------ measure */

static void pass_measure(void *context, const sm_task *task, size_t block) {
    const sm_pushes *pushes = context;
    const sm_work *work = task->work;
    const float *momentum = pushes->heloco != NULL ? pushes->momentum : NULL;
    const size_t at = sm_element(task, block), n = sm_extent(task, block);
    sk_active.reduce->measure(work->term, pushes->learners, momentum, at, n, work->sums + block,
                              work->stride);
    sm_reads(task, SM_MEASURE, SM_GRADIENTS, pushes->learners, n);
    sm_reads(task, SM_MEASURE, SM_STATE, momentum != NULL, n);
}

/* HeLoCo: decides keep, shrink or rotate from the three sums of one gradient. All in f64, and each
 * factor rounded to f32 once, where it meets the elements. */
static void turn(const sm_heloco *h, double du, double dm_dot, double dm, sk_term *term) {
    if (du < h->eps || dm < h->eps) return;
    double c = dm_dot / (du * dm);
    if (c >= h->c_ok) return;
    double conf = du / ((du + h->kappa * dm) + h->eps);
    if (c < 0.0) {
        double beta = (h->k_s * (-c)) * conf;
        if (beta > h->beta_max) beta = h->beta_max;
        term->q = (float)(((-beta * c) * du) / dm);
        term->turn = SK_SHRINK;
    } else {
        double lambda = (h->k_d * (1.0 - c)) * conf;
        if (lambda > 1.0) lambda = 1.0;
        term->wu = (1.0 - lambda) / du;
        term->wv = lambda / dm;
        term->turn = SK_ROTATE;
    }
}

static void finish_measure(void *context, const sm_task *task) {
    const sm_pushes *pushes = context;
    const size_t *offset = task->plan->offset + task->tensor;
    sm_work *work = task->work;
    double dm = 0.0;
    for (size_t l = 0; l < pushes->learners; l++) {
        sm_share *share = &work->share[l];
        sk_term *term = &work->term[l];
        const double *sums = work->sums + 3 * l * work->stride;
        share->norm = sqrt(sm_tensor_total(task->plan, task->tensor, sums));
        if (pushes->heloco == NULL) continue;
        if (l == 0) dm = sqrt(sm_tensor_total(task->plan, task->tensor, sums + 2 * work->stride));
        turn(pushes->heloco, share->norm,
             sm_tensor_total(task->plan, task->tensor, sums + work->stride), dm, term);
        share->turned[term->turn] += offset[1] - offset[0];
        work->turned |= term->turn != SK_KEEP;
        work->rotated |= term->turn == SK_ROTATE;
    }
}

/* ------------------------------------------------------------------ rotated */

/* The squares are those of t in f64: the definition measures the rotation itself, and not what is
 * left of it when its elements are rounded to f32. */
static void pass_rotated(void *context, const sm_task *task, size_t block) {
    const sm_pushes *pushes = context;
    const sm_work *work = task->work;
    const size_t at = sm_element(task, block), n = sm_extent(task, block);
    sk_active.reduce->rotated(work->term, pushes->learners, pushes->momentum, at, n,
                              work->sums + block, work->stride);
    sm_reads(task, SM_ROTATED, SM_GRADIENTS, sm_count_turned(work, pushes->learners, 1), n);
    sm_reads(task, SM_ROTATED, SM_STATE, 1, n);
}

static void finish_rotated(void *context, const sm_task *task) {
    const sm_pushes *pushes = context;
    const sm_work *work = task->work;
    for (size_t l = 0; l < pushes->learners; l++) {
        if (work->term[l].turn != SK_ROTATE) continue;
        double size = sqrt(
            sm_tensor_total(task->plan, task->tensor, work->sums + l * work->stride));
        if (size < pushes->heloco->eps) size = pushes->heloco->eps;
        work->term[l].q = (float)(work->share[l].norm / size);
    }
}

/* ------------------------------------------------------------------ remeasure */

/* A rotation keeps the norm only up to the rounding of its elements, and a shrinking changes it, so
 * the mean direction needs the norms of what is really added. */
static void pass_remeasure(void *context, const sm_task *task, size_t block) {
    const sm_pushes *pushes = context;
    const sm_work *work = task->work;
    const size_t at = sm_element(task, block), n = sm_extent(task, block);
    sk_active.blend->lengths(work->term, pushes->learners, pushes->momentum, at, n,
                             work->sums + block, work->stride);
    sm_reads(task, SM_REMEASURE, SM_GRADIENTS, sm_count_turned(work, pushes->learners, 0), n);
    sm_reads(task, SM_REMEASURE, SM_STATE, 1, n);
}

static void finish_remeasure(void *context, const sm_task *task) {
    const sm_pushes *pushes = context;
    const sm_work *work = task->work;
    for (size_t l = 0; l < pushes->learners; l++)
        if (work->term[l].turn != SK_KEEP)
            work->share[l].norm = sqrt(
                sm_tensor_total(task->plan, task->tensor, work->sums + l * work->stride));
}

/* ------------------------------------------------------------------ one tensor */

/* The conditions of a team read only what `sm_once` wrote, and a barrier lies between that and the
 * next `sm_once` that writes it: so all threads take the same branch. */
void sm_correct(sm_pushes *pushes, const sm_task *task, int mode) {
    sm_spread(pass_measure, pushes, task);
    sm_once(finish_measure, pushes, task);
    int rotated = task->work->rotated, remeasured = task->work->turned && mode == SM_RDA;
    if (rotated) {
        sm_spread(pass_rotated, pushes, task);
        sm_once(finish_rotated, pushes, task);
    }
    if (remeasured) {
        sm_spread(pass_remeasure, pushes, task);
        sm_once(finish_remeasure, pushes, task);
    }
}
