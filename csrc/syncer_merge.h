/* One merge of one fragment: HeLoCo, avg or rda, the outer step, in cache-sized pieces.
 *
 * Must not: allocate, lock, include Python.h, or know what a learner, a round or a version is.
 *
 * The fragment is cut into blocks of SK_BLOCK elements from the start of each tensor: the unit of
 * the blocked sum, of the work of one thread, and of what stays in its cache. A tensor is either
 * shared (all threads take blocks of it, with a barrier between passes) or whole (one thread takes
 * it through all passes). Which of the two changes no bit.
 */
#ifndef SYNCER_MERGE_H
#define SYNCER_MERGE_H

#include "syncer_kernels.h"

#define SM_STRIP 1024 /* elements of a strip: the accumulation of one strip stays in the L1 cache */
#define SM_SORTED 256 /* the same where one strip per learner is held */

enum sm_mode { SM_AVG = 0, SM_RDA = 1 };
enum sm_turn { SM_KEEP, SM_SHRINK, SM_ROTATE }; /* what HeLoCo does to one gradient of one tensor */

/* How a fragment is cut; made once per fragment and thread count. */
typedef struct {
    size_t tensors;
    const size_t *offset; /* [tensors + 1] first element of each tensor, then the total */
    const size_t *block;  /* [tensors + 1] first block of each tensor, then the total */
    size_t shared_count;
    const size_t *shared; /* [shared_count] tensors that all threads work on together */
    size_t whole_count;
    const size_t *whole; /* [2 * whole_count] ranges of tensors, [first, end), for one thread each */
} sm_plan;

typedef struct {
    double c_ok, k_s, k_d, beta_max, kappa, eps;
} sm_heloco;

/* One learner's gradient of the tensor at hand. */
typedef struct {
    double norm; /* after clipping and correction */
    double wu, wv;
    float k; /* its factor in the sum */
    float q; /* shrink: d + q*m; rotate: (f32)(wu*d + wv*m) * q */
    int turn;
    uint64_t turned[3]; /* elements by enum sm_turn, over all tensors this work has seen */
} sm_share;

/* State of the tensor at hand: one for the shared tensors, one per thread for the others. */
typedef struct {
    sm_share *share; /* [learners] */
    double *sums;    /* [3 * learners][stride] block sums */
    size_t stride;
    float rescale; /* rda: merged = direction * rescale */
    int turned;    /* any share that is not SM_KEEP */
    int rotated;
    int directed; /* rda: there is a mean direction */
} sm_work;

/* Sums that pushes were folded into, one after the other. */
typedef struct {
    float *sum;       /* [elements], NULL: no fold; += (f32)factor * d */
    float *direction; /* [elements], rda only; += (f32)(factor / norm) * d */
    double *radial;   /* [tensors], rda only; += norm * weight */
    double factor, weight; /* of the push to add */
    float scale;           /* at the close: average = sum * scale */
} sm_fold;

/* Rows of sm_job.stats, one block sum per block of the fragment: first three for each learner (the
 * gradient as it came: d.d, d.merged, d.m), then these. */
enum sm_stat { SM_STAT_MOMENTUM, SM_STAT_ALONG, SM_STAT_STEP, SM_STATS }; /* m.m merged.m step.step */

typedef struct {
    const sm_plan *plan;
    int threads;
    int mode; /* enum sm_mode */
    size_t learners;
    const float **gradient; /* [learners], each of the whole fragment */
    const double *weight;   /* [learners] */
    double weight_sum;      /* left to right; of a fold, over all its pushes */
    const float *clip;      /* NULL, or [learners]: factor of each gradient, before all else */
    const sm_heloco *heloco; /* NULL: no correction; otherwise arrays.state[0] is the momentum */
    int trim; /* avg: -1, or mean of each element without its `trim` lowest and highest values */
    const float *merged; /* NULL, or the merged gradient itself: nothing is merged */
    sm_fold fold;
    int outer; /* enum sk_outer, or -1: params_out receives the merged gradient, nothing else */
    sk_outer_scalars scalars;
    sk_outer_arrays arrays;
    int stream; /* the outer step writes past the cache: for outputs that would not stay in it */
    sm_work shared;
    sm_work *own;        /* [threads] */
    float *scratch;      /* [threads][scratch_stride] */
    size_t scratch_stride; /* SK_BLOCK + max(SM_STRIP, trim < 0 ? 0 : learners * SM_SORTED) */
    double *merged_sums; /* [blocks] out: block sums of the merged gradient's squares */
    double *stats;       /* NULL, or out: [3 * learners + SM_STATS][blocks] */
    size_t bad_tensor;   /* out: first tensor with a value that is not finite, or SIZE_MAX */
    double sumsq;        /* out: sum over the tensors of their blocked sums, in tensor order */
} sm_job;

/* Merges and takes the outer step. The inputs are only read; params_out and state_out are written
 * whole, and are to be thrown away when bad_tensor is set. With fold.sum set the merged gradient
 * comes from the fold, which is read only, and `learners` is 0. */
void sm_merge(sm_job *job);

/* Adds the only gradient of the job to its fold, corrected like a merge would. */
void sm_fold_add(sm_job *job);

/* norms[learner]: the root of the sum over the tensors of the gradient's blocked sums of squares.
 * sums: [learners][blocks] working memory. */
void sm_norms(sm_job *job, double *sums, double *norms);

/* Sum over the tensors, in order, of the blocked sums in a row of [blocks]. */
double sm_total(const sm_plan *plan, const double *row);

#endif
