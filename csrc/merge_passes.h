/* Pieces shared by the passes of a merge; must not be included by anything else.
 *
 * A pass reads blocks of one tensor in any order and on any thread, and leaves one sum per block.
 * What needs the whole tensor (a finish function) runs between two passes, on one thread.
 */
#ifndef SYNCER_MERGE_PASSES_H
#define SYNCER_MERGE_PASSES_H

#include "syncer_merge.h"

#include <math.h>

typedef void (*sm_pass_fn)(sm_job *job, sm_work *work, size_t tensor, size_t block, size_t blocks,
                           float *scratch);
typedef void (*sm_finish_fn)(sm_job *job, sm_work *work, size_t tensor);
/* All passes of one tensor. In a team every thread calls it with the same `work`. */
typedef void (*sm_tensor_fn)(sm_job *job, sm_work *work, size_t tensor, float *scratch, int team);

/* merge_share.c: one pass by the calling thread alone, or by the team with a barrier at the end;
 * one finish function by one thread while the others wait; one function over all tensors. */
void sm_spread(sm_pass_fn pass, sm_job *job, sm_work *work, size_t tensor, float *scratch, int team);
void sm_once(sm_finish_fn finish, sm_job *job, sm_work *work, size_t tensor, int team);
void sm_each_tensor(sm_job *job, sm_tensor_fn fn);

/* merge_extra.c */
void sm_trimmed(const sm_job *job, const sm_work *work, size_t at, size_t n, float *out,
                float *strips);
void sm_note_stats(const sm_job *job, size_t at, size_t n, size_t block, float *merged);
void sm_stats_of_step(const sm_job *job, size_t at, size_t n, size_t block, float *difference);

static inline size_t sm_smaller(size_t a, size_t b) { return a < b ? a : b; }

/* Asks for n elements that will be read soon: the memory works while this core computes on what it
 * has. Worth it where a correction computes much per byte (measured: 15 % for rotations, 12 % for
 * shrinking); a plain sum is faster without. */
static inline void sm_expect(const float *x, size_t n) {
    for (size_t i = 0; i < n; i += 16) __builtin_prefetch(x + i, 0, 2);
}

static inline size_t sm_element(const sm_job *job, size_t tensor, size_t block) {
    return job->plan->offset[tensor] + block * SK_BLOCK;
}

/* Elements of one block. */
static inline size_t sm_extent(const sm_job *job, size_t tensor, size_t block) {
    size_t n = job->plan->offset[tensor + 1] - job->plan->offset[tensor];
    return sm_smaller(SK_BLOCK, n - block * SK_BLOCK);
}

/* Step 4 of the blocked sum: the block sums of one tensor, left to right. */
static inline double sm_tensor_total(const sm_plan *plan, size_t tensor, const double *row) {
    size_t blocks = plan->block[tensor + 1] - plan->block[tensor];
    double sum = 0.0;
    for (size_t b = 0; b < blocks; b++) sum += row[b];
    return sum;
}

/* A gradient of [at, at+n) before the correction: itself, or clipped into `buffer`. */
static inline const float *sm_received(const sm_job *job, size_t learner, size_t at, size_t n,
                                       float *buffer) {
    const float *d = job->gradient[learner] + at;
    if (job->clip == NULL || job->clip[learner] == 1.0f) return d;
    memcpy(buffer, d, n * sizeof *d);
    sk_active.blend->scale(buffer, job->clip[learner], n);
    return buffer;
}

/* The gradient of [at, at+n) that is merged: as received, or corrected into `strip`. */
static inline const float *sm_corrected(const sm_job *job, const sm_work *work, size_t learner,
                                        size_t at, size_t n, float *strip) {
    const sm_share *share = &work->share[learner];
    const float *d = sm_received(job, learner, at, n, strip);
    if (share->turn == SM_KEEP) return d;
    const float *m = job->arrays.state[0] + at;
    if (share->turn == SM_SHRINK)
        sk_active.blend->shrink(strip, d, m, share->q, n);
    else
        sk_active.blend->rotate(strip, d, m, share->wu, share->wv, share->q, n);
    return strip;
}

#endif
