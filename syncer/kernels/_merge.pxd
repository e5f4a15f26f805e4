# C surface of csrc/syncer_merge.h: the jobs of one fragment. Declarations only; the contract stands
# in the header. Must not hold code: whoever cimports it links nothing.

from libc.stdint cimport uint32_t, uint64_t


cdef extern from "syncer_kernels.h" nogil:
    enum:
        SK_BLOCK
        SK_FINITE_MAX
        SK_BF16_MAX
        SK_OUTER_NESTEROV
        SK_OUTER_SGD
        SK_OUTER_DELAYED_HOLD
        SK_OUTER_DELAYED_APPLY

    # Scalars of the outer optimizers: lr and mu; period (N) and k for Delayed Nesterov only; most,
    # the bits of the largest magnitude that may be written.
    ctypedef struct sk_outer_scalars:
        float lr
        float mu
        float period
        float k
        uint32_t most

    # state: 0 momentum, 1 accumulator; arrays that an optimizer does not keep may be NULL.
    ctypedef struct sk_outer_arrays:
        const float* params
        const float* state[2]
        float* params_out
        float* state_out[2]

    # One gradient on its way into a sum.
    ctypedef struct sk_term:
        pass


cdef extern from "syncer_merge.h" nogil:
    enum:
        SM_STRIP
        SM_STATS
        SM_PASSES
        SM_ARRAYS

    ctypedef struct sm_plan:
        size_t tensors
        const size_t* offset
        const size_t* block
        size_t shared_count
        const size_t* shared
        size_t whole_count
        const size_t* whole

    ctypedef struct sm_share:
        uint64_t turned[3]

    ctypedef struct sm_work:
        sm_share* share
        sk_term* term
        sk_term* summed
        double* sums
        size_t stride
        uint64_t moved[6][6][2]  # as in the header

    ctypedef struct sm_crew:
        const sm_plan* plan
        int threads
        sm_work shared
        sm_work* own
        float* scratch
        size_t scratch_stride

    ctypedef struct sm_heloco:
        double c_ok
        double k_s
        double k_d
        double beta_max
        double kappa
        double eps

    ctypedef struct sm_pushes:
        size_t learners
        const float** gradient
        const float* clip
        const sm_heloco* heloco
        const float* momentum

    ctypedef struct sm_fold_sums:
        float* sum
        float* direction
        double* radial

    ctypedef struct sm_merge_job:
        sm_crew crew
        int mode
        sm_pushes pushes
        const double* weight
        double weight_sum
        int trim
        const sm_fold_sums* fold
        float fold_scale
        const float* merged
        int outer
        sk_outer_scalars scalars
        sk_outer_arrays arrays
        int stream
        double* merged_sums
        double* stats
        size_t bad
        double sumsq

    ctypedef struct sm_fold_job:
        sm_crew crew
        sm_pushes pushes
        sm_fold_sums fold
        double factor
        double weight

    ctypedef struct sm_norms_job:
        sm_crew crew
        size_t learners
        const float** gradient
        double* sums
        double* norms

    void sm_merge(sm_merge_job* job) noexcept
    void sm_fold_add(sm_fold_job* job) noexcept
    void sm_norms(sm_norms_job* job) noexcept
    double sm_total(const sm_plan* plan, const double* row) noexcept
    void sm_places_clear() noexcept
    int sm_place_add(const int* cores, size_t count) noexcept
    int sm_placed() noexcept
