# C surface of csrc/syncer_kernels.h for _native.pyx, and, at the end, what other rooms cimport.
# _native alone links csrc: another module calls it through these five functions.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from syncer.kernels._merge cimport (
    SK_FINITE_MAX,
    SK_OUTER_DELAYED_APPLY,
    SK_OUTER_DELAYED_HOLD,
    SK_OUTER_NESTEROV,
    SK_OUTER_SGD,
    sk_outer_arrays,
    sk_outer_scalars,
    sm_fold_job,
    sm_merge_job,
    sm_norms_job,
    sm_plan,
)

cdef extern from "syncer_kernels.h" nogil:
    const int SK_BLOCK
    const int SK_Q4_BLOCK
    const int SK_Q4_BYTES
    const int SK_THREADS_MAX
    const int SK_CPU_COUNT
    enum: SK_FAMILIES
    enum sk_status:
        SK_OK
        SK_UNKNOWN_FAMILY
        SK_UNKNOWN_VARIANT
        SK_UNSUPPORTED_VARIANT
    enum sk_dtype:
        SK_DTYPE_F32
        SK_DTYPE_BF16
        SK_DTYPE_Q4
    ctypedef struct sk_sha256:
        pass

    void sk_init() noexcept
    unsigned sk_cpu_detect() noexcept
    const char *sk_cpu_name(unsigned bit) noexcept
    const char *sk_family_name(int family) noexcept
    const char *sk_variant_name(int family, int i) noexcept
    int sk_variant_supported(int family, int i) noexcept
    const char *sk_active_name(int family) noexcept
    int sk_select(const char *family, const char *variant) noexcept
    int sk_has_openmp() noexcept
    const char *sk_compiler() noexcept
    enum: SK_FLOAT_FLUSHES
    enum: SK_FLOAT_ROUNDS
    unsigned sk_float_faults() noexcept
    uint64_t sk_float_exact() noexcept
    void sk_float_back(uint64_t mode) noexcept
    float sk_float_of(double x) noexcept

    ctypedef struct sk_check_host:
        void *context
        void *(*lend)(void *context, size_t nbytes) noexcept
        void (*give_back)(void *context, void *memory) noexcept
        void (*fail)(void *context, const char *family, const char *variant, const char *what,
                     size_t n) noexcept
    int sk_check(const sk_check_host *host)

    void sk_sha256_init(sk_sha256 *s) noexcept
    void sk_sha256_update(sk_sha256 *s, const uint8_t *data, size_t n) noexcept
    void sk_sha256_digest(const sk_sha256 *s, uint8_t *out) noexcept
    void sk_sha256_update_pair(sk_sha256 *a, const uint8_t *data_a, size_t na, sk_sha256 *b,
                               const uint8_t *data_b, size_t nb) noexcept
    void sk_sha256_pair(const uint8_t *a, size_t na, const uint8_t *b, size_t nb, uint8_t *out_a,
                        uint8_t *out_b) noexcept

    int64_t sk_decode(int dtype, const uint8_t *src, float *out, size_t n, size_t whole,
                      int negate, int threads) noexcept
    void sk_encode_bf16(const float *src, uint8_t *out, size_t n, int threads) noexcept
    void sk_encode_q4(const float *src, uint8_t *out, size_t n, int threads) noexcept
    int64_t sk_encode_change(int dtype, const float *values, const uint8_t *base, uint8_t *change,
                             uint8_t *out, size_t n, int threads) noexcept
    void sk_apply_change(int dtype, const uint8_t *base, const uint8_t *change, uint8_t *out,
                         size_t n, int threads) noexcept
    void sk_encode_range(int dtype, const float *src, size_t n, size_t begin, size_t end,
                         uint8_t *out, int threads) noexcept
    double sk_sumsq(const float *x, size_t n, int threads) noexcept
    double sk_dot(const float *x, const float *y, size_t n, int threads) noexcept
    void sk_three(const float *x, const float *y, size_t n, double *out, int threads) noexcept
    double sk_rotated_sumsq(const float *d, const float *m, double wu, double wv, size_t n,
                            int threads) noexcept
    void sk_accumulate(float *out, const float *g, float k, size_t n, int threads) noexcept
    void sk_first(float *out, const float *g, float k, size_t n, int threads) noexcept
    void sk_scale(float *out, float k, size_t n, int threads) noexcept
    void sk_blend(float *theta, const float *anchor, float a, float b, size_t n,
                  int threads) noexcept
    void sk_shrink(float *out, const float *d, const float *m, float q, size_t n,
                   int threads) noexcept
    void sk_rotate(float *out, const float *d, const float *m, double wu, double wv, float s,
                   size_t n, int threads) noexcept
    int64_t sk_scan(const float *x, size_t n, int threads) noexcept
    int64_t sk_outer_step(int outer, const sk_outer_scalars *scalars,
                          const sk_outer_arrays *arrays, const float *g, size_t n,
                          int threads) noexcept


# The three jobs of csrc/syncer_merge.h, its total, and sk_decode by one thread. Nothing is checked
# here.
cdef int64_t decode_part(int dtype, const uint8_t *src, float *out, size_t n, size_t whole,
                         bint negate) noexcept nogil
cdef void merge_fragment(sm_merge_job *job) noexcept nogil
cdef void fold_add(sm_fold_job *job) noexcept nogil
cdef void gradient_norms(sm_norms_job *job) noexcept nogil
cdef double fragment_total(const sm_plan *plan, const double *row) noexcept nogil
