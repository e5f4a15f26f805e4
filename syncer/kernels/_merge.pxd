# C surface of csrc/syncer_merge.h: the job of one fragment merge. Declarations only; the contract
# stands in the header. Must not hold code: whoever cimports it links nothing.

from libc.stdint cimport uint64_t


cdef extern from "syncer_kernels.h" nogil:
    enum:
        SK_BLOCK
        SK_OUTER_NESTEROV
        SK_OUTER_SGD
        SK_OUTER_DELAYED_HOLD
        SK_OUTER_DELAYED_APPLY

    # Scalars of the outer optimizers: lr and mu; period (N) and k for Delayed Nesterov only.
    ctypedef struct sk_outer_scalars:
        float lr
        float mu
        float period
        float k

    # state: 0 momentum, 1 accumulator; arrays that an optimizer does not keep may be NULL.
    ctypedef struct sk_outer_arrays:
        const float* params
        const float* state[2]
        float* params_out
        float* state_out[2]


cdef extern from "syncer_merge.h" nogil:
    enum:
        SM_STRIP
        SM_SORTED
        SM_KEEP
        SM_SHRINK
        SM_ROTATE
        SM_STATS

    ctypedef struct sm_plan:
        size_t tensors
        const size_t* offset
        const size_t* block
        size_t shared_count
        const size_t* shared
        size_t whole_count
        const size_t* whole

    ctypedef struct sm_heloco:
        double c_ok
        double k_s
        double k_d
        double beta_max
        double kappa
        double eps

    ctypedef struct sm_share:
        double norm
        uint64_t turned[3]

    ctypedef struct sm_work:
        sm_share* share
        double* sums
        size_t stride

    ctypedef struct sm_fold:
        float* sum
        float* direction
        double* radial
        double factor
        double weight
        float scale

    ctypedef struct sm_job:
        const sm_plan* plan
        int threads
        int mode
        size_t learners
        const float** gradient
        const double* weight
        double weight_sum
        const float* clip
        const sm_heloco* heloco
        int trim
        const float* merged
        sm_fold fold
        int outer
        sk_outer_scalars scalars
        sk_outer_arrays arrays
        int stream
        sm_work shared
        sm_work* own
        float* scratch
        size_t scratch_stride
        double* merged_sums
        double* stats
        size_t bad_tensor
        double sumsq

    void sm_merge(sm_job* job) noexcept
    void sm_fold_add(sm_job* job) noexcept
    void sm_norms(sm_job* job, double* sums, double* norms) noexcept
    double sm_total(const sm_plan* plan, const double* row) noexcept
