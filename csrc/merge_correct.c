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
 * anyway and those of the momentum, which are in the cache from the learner before: what it costs
 * is arithmetic, strip by strip in the L1 cache. docs/merge.md has the figures.
 */
#include "merge_internal.h"

void sm_begin(void *context, const sm_task *task) {
    const sm_pushes *pushes = context;
    sm_work *work = task->work;
    work->turned = work->rotated = work->directed = 0;
    for (size_t l = 0; l < pushes->learners; l++) work->share[l].turn = SM_KEEP;
}

/* ------------------------------------------------------------------ measure */

/* One block after the other, all learners for each: the block of the momentum is read from memory
 * once and found in the cache by the other learners. */
static void pass_measure(void *context, const sm_task *task, size_t block, size_t blocks) {
    const sm_pushes *pushes = context;
    const sk_reduce_variant *reduce = sk_active.reduce;
    const sm_work *work = task->work;
    for (size_t b = block; b < block + blocks; b++) {
        size_t at = sm_element(task, b), n = sm_extent(task, b);
        for (size_t l = 0; l < pushes->learners; l++) {
            const float *d = sm_received(pushes, l, at, n, task->scratch);
            double *sums = work->sums + 3 * l * work->stride + b;
            if (pushes->heloco == NULL)
                reduce->sumsq(d, n, sums);
            else /* m.m comes with each; only the first is used */
                reduce->three(d, pushes->momentum + at, n, sums, work->stride);
        }
    }
}

/* HeLoCo: decides keep, shrink or rotate from the three sums of one gradient. All in f64, and each
 * factor rounded to f32 once, where it meets the elements. */
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

static void finish_measure(void *context, const sm_task *task) {
    const sm_pushes *pushes = context;
    const size_t *offset = task->plan->offset + task->tensor;
    sm_work *work = task->work;
    work->turned = work->rotated = 0;
    double dm = 0.0;
    for (size_t l = 0; l < pushes->learners; l++) {
        sm_share *share = &work->share[l];
        const double *sums = work->sums + 3 * l * work->stride;
        share->norm = sqrt(sm_tensor_total(task->plan, task->tensor, sums));
        share->turn = SM_KEEP;
        if (pushes->heloco == NULL) continue;
        if (l == 0) dm = sqrt(sm_tensor_total(task->plan, task->tensor, sums + 2 * work->stride));
        turn(pushes->heloco, share, sm_tensor_total(task->plan, task->tensor, sums + work->stride),
             dm);
        share->turned[share->turn] += offset[1] - offset[0];
        work->turned |= share->turn != SM_KEEP;
        work->rotated |= share->turn == SM_ROTATE;
    }
}

/* ------------------------------------------------------------------ rotated */

/* The squares are those of t in f64: the definition measures the rotation itself, and not what is
 * left of it when its elements are rounded to f32. */
static void pass_rotated(void *context, const sm_task *task, size_t block, size_t blocks) {
    const sm_pushes *pushes = context;
    const sm_work *work = task->work;
    for (size_t b = block; b < block + blocks; b++) {
        size_t at = sm_element(task, b), n = sm_extent(task, b);
        for (size_t l = 0; l < pushes->learners; l++) {
            const sm_share *share = &work->share[l];
            if (share->turn == SM_ROTATE)
                sk_active.reduce->rotated(sm_received(pushes, l, at, n, task->scratch),
                                          pushes->momentum + at, share->wu, share->wv, n,
                                          work->sums + 3 * l * work->stride + b);
        }
    }
}

static void finish_rotated(void *context, const sm_task *task) {
    const sm_pushes *pushes = context;
    const sm_work *work = task->work;
    for (size_t l = 0; l < pushes->learners; l++) {
        sm_share *share = &work->share[l];
        if (share->turn != SM_ROTATE) continue;
        const double *sums = work->sums + 3 * l * work->stride;
        double size = sqrt(sm_tensor_total(task->plan, task->tensor, sums));
        if (size < pushes->heloco->eps) size = pushes->heloco->eps;
        share->q = (float)(share->norm / size);
    }
}

/* ------------------------------------------------------------------ remeasure */

/* A rotation keeps the norm only up to the rounding of its elements, and a shrinking changes it, so
 * the mean direction needs the norms of what is really added. The whole block is made in the scratch
 * first: the blocked sum has lanes across the strips. */
static void pass_remeasure(void *context, const sm_task *task, size_t block, size_t blocks) {
    const sm_pushes *pushes = context;
    const sm_work *work = task->work;
    float *corrected = task->scratch;
    for (size_t b = block; b < block + blocks; b++) {
        size_t at = sm_element(task, b), n = sm_extent(task, b);
        for (size_t l = 0; l < pushes->learners; l++) {
            if (work->share[l].turn == SM_KEEP) continue;
            /* what is corrected next: the next learner, or the first one's next block */
            int last = l + 1 == pushes->learners;
            size_t ahead = last ? at + n : at;
            if (ahead + n > task->plan->offset[task->plan->tensors]) ahead = at;
            const float *next = pushes->gradient[last ? 0 : l + 1] + ahead;
            for (size_t s = 0; s < n; s += SM_STRIP) {
                size_t len = sm_smaller(SM_STRIP, n - s);
                sm_expect(next + s, len);
                sm_corrected(pushes, work, l, at + s, len, corrected + s);
            }
            sk_active.reduce->sumsq(corrected, n, work->sums + 3 * l * work->stride + b);
        }
    }
}

static void finish_remeasure(void *context, const sm_task *task) {
    const sm_pushes *pushes = context;
    const sm_work *work = task->work;
    for (size_t l = 0; l < pushes->learners; l++) {
        const double *sums = work->sums + 3 * l * work->stride;
        if (work->share[l].turn != SM_KEEP)
            work->share[l].norm = sqrt(sm_tensor_total(task->plan, task->tensor, sums));
    }
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
