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

#define SM_STRIP 2048 /* elements of a strip: the accumulation of one strip stays in the L1 cache */

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
    double norm; /* after the correction */
    double wu, wv;
    float k; /* its factor in the sum */
    float q; /* shrink: d + q*m; rotate: (f32)(wu*d + wv*m) * q */
    int turn;
} sm_share;

/* State of the tensor at hand: one for the shared tensors, one per thread for the others. */
typedef struct {
    sm_share *share; /* [learners] */
    double *sums;    /* [3 * learners][stride] block sums */
    size_t stride;
    float rescale; /* rda: merged = direction * rescale */
    int turned;    /* any share that is not SM_KEEP */
    int rotated;
    int directed; /* rda: params_out holds the mean direction */
} sm_work;

typedef struct {
    const sm_plan *plan;
    int threads;
    int mode;                     /* enum sm_mode */
    size_t learners;              /* 0: `merged` holds the merged gradient already */
    const float **gradient; /* [learners], each of the whole fragment */
    const double *weight;         /* [learners] */
    double weight_sum;            /* left to right */
    const sm_heloco *heloco;      /* NULL: no correction; otherwise arrays.state[0] is the momentum */
    const float *merged;
    int outer; /* enum sk_outer, or -1: params_out receives the merged gradient, nothing else */
    sk_outer_scalars scalars;
    sk_outer_arrays arrays;
    sm_work shared;
    sm_work *own;        /* [threads] */
    float *scratch;      /* [threads][SK_BLOCK + SM_STRIP] */
    double *merged_sums; /* [blocks] out: block sums of the merged gradient's squares */
    size_t bad_tensor;   /* out: first tensor with a value that is not finite, or SIZE_MAX */
    double sumsq;        /* out: sum over the tensors of their blocked sums, in tensor order */
} sm_job;

/* Runs the job. The inputs are only read; params_out and state_out are written whole, and are to be
 * thrown away when bad_tensor is set. */
void sm_merge(sm_job *job);

#endif
