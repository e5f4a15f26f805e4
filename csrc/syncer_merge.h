/* One merge of one fragment: HeLoCo, avg or rda, the outer step, in cache-sized pieces.
 *
 * Must not: allocate, lock, include Python.h, or know what a learner, a round or a version is.
 *
 * `sm_` (syncer merge) stands before everything that knows tensors and gradients; `sk_` (syncer
 * kernel, syncer_kernels.h) before the arithmetic on arrays that it is made of.
 *
 * The fragment is cut into blocks of SK_BLOCK elements from the start of each tensor: the unit of
 * the blocked sum, of the work of one thread, and of what stays in its cache. A tensor is either
 * shared (all threads take blocks of it, with a barrier between passes) or whole (one thread takes
 * it through all passes). Which of the two changes no bit.
 *
 * There are three jobs (merge, add to a fold, norms), each a struct of its own. The caller makes the
 * plan, fills a job in, and lends all memory it works in.
 */
#ifndef SYNCER_MERGE_H
#define SYNCER_MERGE_H

#include "syncer_kernels.h"

#define SM_STRIP 256 /* elements that go through all of a pass while they are in the L1 cache */

enum sm_mode { SM_AVG = 0, SM_RDA = 1 };

/* The passes that a tensor may take, and what they read and write, for counting it. */
enum sm_pass { SM_MEASURE, SM_ROTATED, SM_REMEASURE, SM_DIRECTION, SM_LENGTH, SM_STEP, SM_PASSES };
enum sm_array { SM_GRADIENTS, SM_STATE, SM_PARAMS, SM_MERGED, SM_RESULT, SM_NEW_STATE, SM_ARRAYS };

/* ------------------------------------------------------------------ what all jobs share */

/* How a fragment is cut; made once per fragment and thread count. */
typedef struct {
    size_t tensors;
    const size_t *offset; /* [tensors + 1] first element of each tensor, then the total */
    const size_t *block;  /* [tensors + 1] first block of each tensor, then the total */
    size_t shared_count;
    const size_t *shared; /* [shared_count] tensors that all threads work on together */
    size_t whole_count;
    const size_t *whole; /* [2 * whole_count] tensors [first, end), for one thread each */
} sm_plan;

/* One learner's gradient of the tensor at hand. */
typedef struct {
    double norm;        /* after clipping and correction */
    uint64_t turned[3]; /* elements kept, shrunk and rotated, over all tensors this work has seen */
} sm_share;

/* State of the tensor at hand: one for the shared tensors, one per thread for the others. */
typedef struct {
    sm_share *share; /* [learners] */
    sk_term *term;   /* [learners] what is done to each gradient */
    sk_term *summed; /* [summed_count] those that enter the sum at hand, in order */
    size_t summed_count;
    double *sums; /* [3 * learners][stride] block sums */
    size_t stride;
    float rescale; /* rda: merged = direction * rescale */
    int turned;    /* any gradient that is not kept as it is */
    int rotated;
    int directed; /* rda: there is a mean direction */
    /* Bytes that this thread has read [0] and written [1] of each kind of array, by pass. Only those
     * of sm_crew.own count: they are a thread's, also while a team works on a shared tensor. */
    uint64_t moved[SM_PASSES][SM_ARRAYS][2];
} sm_work;

/* Who works, on which cut, in whose memory. */
typedef struct {
    const sm_plan *plan;
    int threads;
    sm_work shared;
    sm_work *own;          /* [threads] */
    float *scratch;        /* [threads][scratch_stride] */
    size_t scratch_stride; /* SK_BLOCK; for a merge that trims, learners * SM_STRIP more */
} sm_crew;

typedef struct {
    double c_ok, k_s, k_d, beta_max, kappa, eps;
} sm_heloco;

/* The gradients of a job, and what is done to each before it enters a sum: clipping first, then the
 * correction against the momentum. */
typedef struct {
    size_t learners;
    const float **gradient;  /* [learners], each of the whole fragment */
    const float *clip;       /* NULL, or [learners]: factor of each gradient */
    const sm_heloco *heloco; /* NULL: no correction */
    const float *momentum;   /* of the correction; not read without one */
} sm_pushes;

/* Sums that pushes were folded into, one after the other. */
typedef struct {
    float *sum;       /* [elements]; += (f32)factor * d */
    float *direction; /* [elements], rda only, otherwise NULL; += (f32)(factor / norm) * d */
    double *radial;   /* [tensors], rda only; += norm * weight */
} sm_fold_sums;

/* Sum over the tensors, in order, of the blocked sums in a row of [blocks]. */
double sm_total(const sm_plan *plan, const double *row);

/* Places of threads: cores that share memory. None or one: threads run anywhere and take what comes;
 * otherwise every merge is shared out in the same way. Set before the first merge. */
#define SM_PLACES_MAX 64
void sm_places_clear(void);
int sm_place_add(const int *cores, size_t count); /* 0 if there is no room, or no such core */
int sm_placed(void);
void sm_take_place(int thread, int threads); /* of the calling thread, `thread` of a team */

/* ------------------------------------------------------------------ merge */

/* Rows of sm_merge_job.stats, one block sum per block of the fragment: first three for each learner
 * (the gradient as it came: d.d, d.merged, d.m), then these: m.m, merged.m, step.step. */
enum sm_stat { SM_STAT_MOMENTUM, SM_STAT_ALONG, SM_STAT_STEP, SM_STATS };

/* What is merged is one of three: the pushes; a fold of pushes added before (`pushes` is empty); or
 * a gradient that is merged already (`pushes` serve the statistics alone). */
typedef struct {
    sm_crew crew;
    int mode; /* enum sm_mode */
    sm_pushes pushes;
    const double *weight; /* [pushes.learners] */
    double weight_sum;    /* left to right; of a fold, over all its pushes */
    int trim; /* -1, or mean of each element (rda: of the unit vectors, and of the norms) without its
               * `trim` lowest and highest values */
    const sm_fold_sums *fold; /* NULL, or the fold; only read */
    float fold_scale;         /* its average is sum * fold_scale */
    const float *merged;      /* NULL, or the merged gradient itself */
    int outer; /* enum sk_outer, or -1: params_out receives the merged gradient, nothing else */
    sk_outer_scalars scalars;
    sk_outer_arrays arrays;
    int stream; /* the outer step writes past the cache: for outputs that would not stay in it */
    double *merged_sums; /* [blocks] out: block sums of the merged gradient's squares */
    double *stats;       /* NULL, or out: [3 * pushes.learners + SM_STATS][blocks] */
    size_t bad;          /* out: first element with a value above scalars.most, or SIZE_MAX */
    double sumsq;        /* out: sum over the tensors of their blocked sums, in tensor order */
} sm_merge_job;

/* Merges and takes the outer step. The inputs are only read; params_out and state_out are written
 * whole, and are to be thrown away when bad is set. */
void sm_merge(sm_merge_job *job);

/* ------------------------------------------------------------------ add to a fold */

typedef struct {
    sm_crew crew;
    sm_pushes pushes;  /* one gradient */
    sm_fold_sums fold; /* in and out */
    double factor;     /* of the gradient in the sums */
    double weight;     /* of its norm in the radial sum */
} sm_fold_job;

/* Adds one gradient to the sums of a fold, corrected like a merge would. */
void sm_fold_add(sm_fold_job *job);

/* ------------------------------------------------------------------ norms */

typedef struct {
    sm_crew crew;
    size_t learners;
    const float **gradient; /* [learners], each of the whole fragment */
    double *sums;           /* [learners][blocks] working memory */
    double *norms;          /* [learners] out */
} sm_norms_job;

/* Norm of each gradient as it came: the root of the sum over the tensors of its blocked sums. */
void sm_norms(sm_norms_job *job);

#endif
