/* Inside of a merge: what its files share. Must not be included outside csrc/merge_*.c.
 *
 * The work is made of two kinds of function. A pass reads blocks of one tensor, in any order and on
 * any thread, and leaves one sum per block in a row. A finish function runs on one thread between
 * two passes, when the whole row is there, and draws from it what the next pass needs. So no result
 * depends on who took which block: the rows are added left to right, never by a reduction whose
 * order is that of the threads.
 *
 *   merge_threads.c   who takes which tensor and which block
 *   merge_places.c    on which cores, where that matters
 *   merge_correct.c   norms and HeLoCo: what each gradient is when it enters a sum
 *   merge_fragment.c  the merged gradient and the outer step
 *   merge_trim.c      the merged gradient without outliers
 *   merge_fold.c      one gradient into the sums of a fold
 *   merge_stats.c     norms for clipping, numbers that explain a merge
 */
#ifndef SYNCER_MERGE_INTERNAL_H
#define SYNCER_MERGE_INTERNAL_H

#include "syncer_kernels_impl.h"
#include "syncer_merge.h"

#include <math.h>

/* ------------------------------------------------------------------ who does what */

/* One tensor in the hands of one thread: alone with it, or as one of the team of all threads. */
typedef struct {
    const sm_plan *plan;
    sm_work *work; /* in a team every thread has the same */
    size_t tensor;
    float *scratch; /* this thread's own, like the counts */
    uint64_t (*moved)[SM_ARRAYS][2];
    int team;
} sm_task;

typedef void (*sm_pass_fn)(void *job, const sm_task *task, size_t block);
typedef void (*sm_finish_fn)(void *job, const sm_task *task);
/* All passes of one tensor. In a team every thread calls it. */
typedef void (*sm_tensor_fn)(void *job, const sm_task *task);

/* One pass by the calling thread alone, or by the team with a barrier at the end; one finish
 * function by one thread while the others wait; one function over all tensors of the plan. */
void sm_spread(sm_pass_fn pass, void *job, const sm_task *task);
void sm_once(sm_finish_fn finish, void *job, const sm_task *task);
void sm_each_tensor(sm_crew *crew, sm_tensor_fn fn, void *job);

/* ------------------------------------------------------------------ pieces of the jobs */

/* merge_correct.c. First of all, a finish function: no gradient (of the sm_pushes) is turned. */
void sm_begin(void *pushes, const sm_task *task);
/* All passes that decide what each gradient is. `mode` SM_RDA asks for their norms as well. */
void sm_correct(sm_pushes *pushes, const sm_task *task, int mode);

/* merge_trim.c */
void sm_trimmed(const sm_merge_job *job, const sm_work *work, size_t at, size_t n, float *out,
                float *strips);
double sm_trimmed_radius(const sm_merge_job *job, const sm_work *work);

/* merge_stats.c */
void sm_note_stats(const sm_merge_job *job, size_t at, size_t n, size_t block, float *merged);
void sm_stats_of_step(const sm_merge_job *job, size_t at, size_t n, size_t block,
                      float *difference);

static inline size_t sm_smaller(size_t a, size_t b) { return a < b ? a : b; }

/* First element of a block. */
static inline size_t sm_element(const sm_task *task, size_t block) {
    return task->plan->offset[task->tensor] + block * SK_BLOCK;
}

/* Elements of a block. */
static inline size_t sm_extent(const sm_task *task, size_t block) {
    const size_t *offset = task->plan->offset + task->tensor;
    return sm_smaller(SK_BLOCK, offset[1] - offset[0] - block * SK_BLOCK);
}

/* Notes what a pass moves for n elements: `arrays` arrays of a kind, each once. docs/merge.md and the
 * benchmarks are made from these counts, so every pass says it beside the kernel that does it. */
static inline void sm_reads(const sm_task *task, int pass, int kind, size_t arrays, size_t n) {
    task->moved[pass][kind][0] += arrays * n * sizeof(float);
}

static inline void sm_writes(const sm_task *task, int pass, int kind, size_t arrays, size_t n) {
    task->moved[pass][kind][1] += arrays * n * sizeof(float);
}

/* Gradients that are turned, or turned in one way. */
static inline size_t sm_count_turned(const sm_work *work, size_t learners, int only_rotated) {
    size_t count = 0;
    for (size_t l = 0; l < learners; l++)
        count += only_rotated ? work->term[l].turn == SK_ROTATE : work->term[l].turn != SK_KEEP;
    return count;
}

/* Step 4 of the blocked sum: the block sums of one tensor, left to right. */
static inline double sm_tensor_total(const sm_plan *plan, size_t tensor, const double *row) {
    size_t blocks = plan->block[tensor + 1] - plan->block[tensor];
    double sum = 0.0;
    for (size_t b = 0; b < blocks; b++) sum += row[b];
    return sum;
}

/* Factor that makes a unit vector of a gradient, times `weight`. One so short (all subnormal) that
 * the factor is no f32 has no direction that could be added: 0, which changes nothing in a sum. */
static inline float sm_unit_factor(double weight, double norm) {
    float k = (float)(weight / norm);
    return isfinite(k) ? k : 0.0f;
}

/* One gradient of [at, at+n) as it enters a sum, n <= SM_STRIP: as it came, or made in `strip`. */
static inline const float *sm_corrected(const sk_term *term, const float *momentum, size_t at,
                                        size_t n, float *strip) {
    const float *d = term->d + at;
    if (term->clip != 1.0f) {
        memcpy(strip, d, n * sizeof *d);
        sk_active.blend->scale(strip, term->clip, n);
        d = strip;
    }
    if (term->turn == SK_KEEP) return d;
    if (term->turn == SK_SHRINK)
        sk_active.blend->shrink(strip, d, momentum + at, term->q, n);
    else
        sk_active.blend->rotate(strip, d, momentum + at, term->wu, term->wv, term->q, n);
    return strip;
}

#endif
