"""The door to the compiled merge; must not keep the state of a round.

Checks sizes and dtypes, lends the working memory of one call, and runs it without the GIL. What a
job computes stands in csrc/syncer_merge.h.
"""

from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_FORMAT
from cpython.buffer cimport PyBuffer_Release, PyObject_GetBuffer
from libc.math cimport sqrt
from libc.stdint cimport SIZE_MAX, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset, strcmp

cimport cython

from syncer.kernels cimport _native
from syncer.kernels._merge cimport (
    SK_BF16_MAX,
    SK_BLOCK,
    SK_FINITE_MAX,
    SK_OUTER_DELAYED_APPLY,
    SK_OUTER_DELAYED_HOLD,
    SK_OUTER_NESTEROV,
    SK_OUTER_SGD,
    SM_ARRAYS,
    SM_PASSES,
    SM_STATS,
    SM_STRIP,
    sk_term,
    sm_crew,
    sm_fold_job,
    sm_fold_sums,
    sm_heloco,
    sm_merge_job,
    sm_norms_job,
    sm_pushes,
    sm_share,
    sm_work,
)
from syncer.merge.buffers cimport Buffer, BufferPool
from syncer.merge.plan cimport Plan

# Indices of the outer steps in csrc, for the optimizer table.
STEP_NESTEROV = SK_OUTER_NESTEROV
STEP_SGD = SK_OUTER_SGD
STEP_DELAYED_HOLD = SK_OUTER_DELAYED_HOLD
STEP_DELAYED_APPLY = SK_OUTER_DELAYED_APPLY
STEP_NONE = -1

# What `run` counts: the passes and the kinds of arrays, in the order of csrc/syncer_merge.h.
PASSES = ("measure", "rotated", "remeasure", "direction", "length", "step")
ARRAYS = ("gradients", "state", "parameters", "sum", "result", "new state")

# Bits of the largest magnitude that a result may have: as f32, and so that bf16 does not round it
# to infinity.
FINITE_F32 = SK_FINITE_MAX
FINITE_BF16 = SK_BF16_MAX

cdef enum:
    # Outputs beyond this leave the cache before anything reads them; writing past it spares the
    # reading of what is overwritten (measured: 0.87 of the copy bandwidth instead of 0.76 for rda).
    STREAM_BYTES = 8 << 20


cdef inline size_t aligned(size_t size) noexcept nogil:
    return (size + 63) // 64 * 64  # of a cache line: no two threads write to the same


cdef inline size_t larger(size_t a, size_t b) noexcept nogil:
    return a if a > b else b


@cython.final
@cython.no_gc
cdef class FoldSums:
    """The sums that pushes are folded into: one array, two with `directed` (rda); +0 at first.

    weight_sum: sum of the weights added so far, in the order of adding.
    """

    cdef readonly Plan plan
    cdef Buffer sum
    cdef Buffer direction
    cdef sm_fold_sums sums  # over the memory of both buffers
    cdef readonly double weight_sum

    def __cinit__(self, Plan plan not None, BufferPool pool not None, bint directed):
        self.plan = plan
        self.sum = pool.take(plan.numel, zero=True)
        self.sums.sum = self.sum.data
        if directed:
            self.direction = pool.take(plan.numel, zero=True)
            self.sums.direction = self.direction.data
            self.sums.radial = <double*>calloc(plan.tensors, sizeof(double))
            if self.sums.radial == NULL:
                raise MemoryError("no memory for the sums of a fold")

    def __dealloc__(self):
        free(self.sums.radial)


@cython.no_gc
cdef class _Call:
    """What one call holds while a job runs: the caller's arrays and working memory. All of it is
    let go with the call, on every way out."""

    cdef Plan plan
    cdef Py_buffer* views
    cdef size_t held
    cdef void** lent  # each piece begins with the address of the one before

    def __cinit__(self, Plan plan not None):
        self.plan = plan

    def __dealloc__(self):
        cdef size_t i
        cdef void** piece
        for i in range(self.held):
            PyBuffer_Release(&self.views[i])
        free(self.views)
        while self.lent != NULL:
            piece = self.lent
            self.lent = <void**>piece[0]
            free(piece)

    cdef void* lend(self, size_t nbytes) except NULL:
        """Working memory for as long as the call lives, aligned to a cache line."""
        cdef void** piece = <void**>malloc(nbytes + 128)
        if piece == NULL:
            raise MemoryError(f"no memory for a merge: {nbytes} bytes")
        piece[0] = self.lent
        self.lent = piece
        return <void*>aligned(<size_t>(piece + 1))

    cdef size_t blocks(self) noexcept:
        return self.plan.plan.block[self.plan.plan.tensors]

    cdef const float** hold(self, arrays) except NULL:
        """Takes the arrays' memory for as long as the call lives; checks dtype and size."""
        cdef const float** starts = <const float**>self.lend((len(arrays) + 1) * sizeof(float*))
        cdef Py_buffer* view
        cdef bint floats
        self.views = <Py_buffer*>calloc(len(arrays) + 1, sizeof(Py_buffer))
        if self.views == NULL:
            raise MemoryError("no memory for a merge")
        for array in arrays:
            view = &self.views[self.held]
            PyObject_GetBuffer(array, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)
            starts[self.held] = <const float*>view.buf
            self.held += 1
            floats = view.format != NULL and strcmp(view.format, b"f") == 0
            if <uintptr_t>view.buf % 4:
                raise ValueError("a gradient starts at an address that is not a multiple of 4; "
                                 "pass an aligned copy")
            if not floats or view.len != self.plan.numel * 4:
                raise ValueError(
                    f"a gradient must hold {self.plan.numel} float32 elements, contiguous; got "
                    f"{view.len} bytes of format {(view.format or b'B').decode()!r}"
                )
        return starts

    cdef int equip(self, sm_crew* crew, size_t learners, size_t beside=0) except -1:
        """Working memory of the crew: room for each learner, `beside` elements more."""
        cdef size_t count = larger(learners, 1), threads = self.plan.threads, i
        cdef size_t shares = aligned(count * sizeof(sm_share))
        cdef size_t terms = aligned(2 * count * sizeof(sk_term))
        cdef size_t sums = aligned(3 * count * self.plan.blocks_whole_max * sizeof(double))
        cdef char* own_sums = <char*>self.lend(threads * sums)
        cdef char* own_shares = <char*>self.lend((threads + 1) * shares)
        cdef char* own_terms = <char*>self.lend((threads + 1) * terms)
        memset(own_shares, 0, (threads + 1) * shares)
        crew.plan, crew.threads = &self.plan.plan, self.plan.threads
        crew.scratch_stride = SK_BLOCK + beside
        crew.scratch = <float*>self.lend(threads * crew.scratch_stride * sizeof(float))
        crew.own = <sm_work*>self.lend(threads * sizeof(sm_work))
        memset(crew.own, 0, threads * sizeof(sm_work))
        for i in range(threads):
            crew.own[i].stride = self.plan.blocks_whole_max
            crew.own[i].sums = <double*>(own_sums + i * sums)
            crew.own[i].share = <sm_share*>(own_shares + i * shares)
            crew.own[i].term = <sk_term*>(own_terms + i * terms)
            crew.own[i].summed = crew.own[i].term + count
        crew.shared.stride = self.plan.blocks_shared_max
        crew.shared.sums = <double*>self.lend(3 * count * crew.shared.stride * sizeof(double))
        crew.shared.share = <sm_share*>(own_shares + threads * shares)
        crew.shared.term = <sk_term*>(own_terms + threads * terms)
        crew.shared.summed = crew.shared.term + count
        return 0

    cdef int clip(self, sm_pushes* pushes, clip) except -1:
        """clip: a factor for each gradient, rounded to f32 here, or None."""
        cdef float* factors
        cdef size_t i
        if clip is None:
            return 0
        factors = <float*>self.lend(pushes.learners * sizeof(float))
        for i in range(pushes.learners):
            factors[i] = clip[i]
        pushes.clip = factors
        return 0

    cdef int correct(self, sm_pushes* pushes, heloco, Buffer momentum) except -1:
        """heloco: (c_ok, k_s, k_d, beta_max, kappa, eps) or None."""
        cdef sm_heloco* constants
        if momentum is not None:
            self.check(momentum, False)
        if heloco is None:
            return 0
        if momentum is None:
            raise ValueError("a correction needs an optimizer that keeps a momentum")
        constants = <sm_heloco*>self.lend(sizeof(sm_heloco))
        constants.c_ok, constants.k_s, constants.k_d = heloco[:3]
        constants.beta_max, constants.kappa, constants.eps = heloco[3:]
        pushes.heloco, pushes.momentum = constants, momentum.data
        return 0

    cdef int check(self, Buffer buffer, bint written) except -1:
        if buffer.numel != self.plan.numel:
            raise ValueError(
                f"a buffer of {buffer.numel} elements for a fragment of {self.plan.numel}")
        if written and buffer.frozen:
            raise ValueError("a merge cannot write to a published buffer")
        return 0


cdef tuple NOTHING_TURNED = (0, 0, 0)


cdef tuple turned(const sm_crew* crew, size_t learner):
    """Elements kept, shrunk and rotated by the correction."""
    cdef size_t counts[3]
    cdef size_t turn
    cdef int thread
    for turn in range(3):
        counts[turn] = crew.shared.share[learner].turned[turn]
        for thread in range(crew.threads):
            counts[turn] += crew.own[thread].share[learner].turned[turn]
    return counts[0], counts[1], counts[2]


cdef void tell_moved(const sm_crew* crew, dict moved):
    """Adds up what the threads have read and written, by pass and kind of array."""
    cdef size_t p, a
    cdef uint64_t read, written
    cdef int thread
    for p in range(<size_t>SM_PASSES):
        for a in range(<size_t>SM_ARRAYS):
            read = written = 0
            for thread in range(crew.threads):
                read += crew.own[thread].moved[p][a][0]
                written += crew.own[thread].moved[p][a][1]
            if read or written:
                moved[PASSES[p], ARRAYS[a]] = (read, written)


@cython.final
@cython.no_gc
cdef class _Merge(_Call):
    """A merge and what it points to."""

    cdef sm_merge_job job

    cdef int step(self, Buffer params, tuple state, Buffer params_out, tuple state_out, int outer,
                  scalars) except -1:
        cdef sm_merge_job* job = &self.job
        cdef Buffer buffer
        cdef Py_ssize_t i
        if len(state) != len(state_out) or len(state) > 2:
            raise ValueError("the state arrays before and after do not match in number")
        self.check(params, False)
        self.check(params_out, True)
        job.arrays.params, job.arrays.params_out = params.data, params_out.data
        for i in range(len(state)):
            buffer = state[i]
            self.check(buffer, False)
            job.arrays.state[i] = buffer.data
            buffer = state_out[i]
            self.check(buffer, True)
            job.arrays.state_out[i] = buffer.data
        job.outer = outer
        job.stream = (1 + len(state)) * self.plan.numel * 4 > STREAM_BYTES
        job.scalars.lr, job.scalars.mu, job.scalars.period, job.scalars.k = scalars
        return 0

    cdef int weigh(self, weights) except -1:
        cdef double* weight = <double*>self.lend(len(weights) * sizeof(double))
        cdef Py_ssize_t i
        for i in range(len(weights)):
            weight[i] = weights[i]
            self.job.weight_sum += weight[i]
        self.job.weight = weight
        return 0

    cdef double total(self, size_t row) noexcept:
        return _native.fragment_total(&self.plan.plan, self.job.stats + row * self.blocks())

    cdef tuple statistics(self):
        cdef size_t n = self.job.pushes.learners, i
        learners = [(self.total(3 * i), self.total(3 * i + 1), self.total(3 * i + 2),
                     turned(&self.job.crew, i)) for i in range(n)]
        return learners, [self.total(3 * n + i) for i in range(<size_t>SM_STATS)]


@cython.final
@cython.no_gc
cdef class _FoldAdd(_Call):
    """One push into a fold, and what it points to."""

    cdef sm_fold_job job


@cython.final
@cython.no_gc
cdef class _Norms(_Call):
    """The norms of some gradients, and what they point to."""

    cdef sm_norms_job job


def run(Plan plan not None, *, int mode, gradients, weights, Buffer params not None,
        tuple state, Buffer params_out not None, tuple state_out, int outer, scalars,
        heloco=None, clip=None, int trim=-1, merged=None, FoldSums fold=None,
        double fold_scale=1.0, bint stats=False, uint32_t most=SK_FINITE_MAX, dict moved=None):
    """Merges one fragment and takes its outer step into the output buffers. Releases the GIL.

    mode: 0 avg, 1 rda. gradients: f32 arrays of plan.numel elements, in learner order; weights: f64
    numbers, one each. Instead, `merged` (f32, plan.numel) is the merged gradient itself (with it,
    gradients only serve the statistics), or `fold` the sums of pushes added before (fold_scale: the
    average is sum * f32(fold_scale)).
    state, state_out: buffers of the optimizer's arrays (momentum first). outer: a STEP_ constant;
    STEP_NONE writes the merged gradient itself to params_out. scalars: (lr, mu, period, k), rounded
    to f32 here. heloco: (c_ok, k_s, k_d, beta_max, kappa, eps) or None. clip: a factor for each
    gradient, rounded to f32, or None. trim: -1, or the mean of each element (rda: of the unit
    vectors, and of the norms) without its `trim` lowest and highest values. most: a FINITE_
    constant. moved: receives the bytes that the passes have read and written, statistics aside:
    (one of PASSES, one of ARRAYS) -> (read, written).

    Returns (gnorm, bad, statistics): gnorm is the norm of the merged gradient, f64; bad the first
    element of which a result is above `most` or no number, or -1 (with one, the outputs hold
    rubbish); statistics None, or ([(d.d, d.merged, d.m, (kept, shrunk, rotated elements)) per
    learner], [m.m, m.merged, step.step]).
    Raises ValueError for arrays of another size or dtype, before anything is written.
    """
    cdef _Merge call = _Merge(plan)
    cdef sm_merge_job* job = &call.job
    if len(gradients) != len(weights) or (clip is not None and len(clip) != len(gradients)):
        raise ValueError("gradients, weights and clip factors do not match in number")
    if len(gradients) == 0 and merged is None and fold is None:
        raise ValueError("a merge needs at least one gradient, a fold, or the merged gradient")
    if trim >= 0 and 2 * trim >= len(gradients):
        raise ValueError(f"{len(gradients)} gradients are too few to drop {trim} at each end")
    if fold is not None and fold.plan is not plan:
        raise ValueError("the fold belongs to another fragment")
    job.mode, job.trim, job.scalars.most = mode, trim, most
    call.step(params, state, params_out, state_out, outer, scalars)
    job.pushes.learners = len(gradients)
    job.pushes.gradient = call.hold(gradients if merged is None else [*gradients, merged])
    call.equip(&job.crew, job.pushes.learners,
               SM_STRIP * job.pushes.learners if trim >= 0 else 0)
    call.weigh(weights)
    call.clip(&job.pushes, clip)
    call.correct(&job.pushes, heloco, state[0] if state else None)
    job.merged_sums = <double*>call.lend(call.blocks() * sizeof(double))
    if stats:
        job.stats = <double*>call.lend(
            (3 * job.pushes.learners + SM_STATS) * call.blocks() * sizeof(double))
    if merged is not None:
        job.merged = job.pushes.gradient[job.pushes.learners]
    elif fold is not None:
        job.fold, job.fold_scale, job.weight_sum = &fold.sums, fold_scale, fold.weight_sum
    with nogil:
        _native.merge_fragment(job)
    if moved is not None:
        tell_moved(&job.crew, moved)
    bad = -1 if job.bad == SIZE_MAX else <Py_ssize_t>job.bad
    return sqrt(job.sumsq), bad, (call.statistics() if stats else None)


def add(FoldSums fold not None, gradient, *, double factor, double weight, Buffer momentum=None,
        heloco=None, double clip=1.0):
    """Adds one gradient to the sums of a fold, corrected and clipped first. Releases the GIL.

    factor: what the gradient is multiplied by in the sum, f64, rounded to f32 (for the direction:
    factor / norm, rounded once). weight: what enters the weight sum and the radial sum.
    Returns the elements (kept, shrunk, rotated) by the correction. Raises ValueError like `run`.
    """
    cdef _FoldAdd call = _FoldAdd(fold.plan)
    cdef sm_fold_job* job = &call.job
    job.pushes.learners = 1
    job.pushes.gradient = call.hold([gradient])
    call.equip(&job.crew, 1)
    call.clip(&job.pushes, (clip,))
    call.correct(&job.pushes, heloco, momentum)
    job.fold, job.factor, job.weight = fold.sums, factor, weight
    with nogil:
        _native.fold_add(job)
    fold.weight_sum += weight
    try:
        return turned(&job.crew, 0)
    except MemoryError:  # it has been added, and must not be again
        return NOTHING_TURNED


def norms(Plan plan not None, gradients):
    """Norm of each gradient as a whole: the root of its tensors' blocked sums of squares, f64.

    gradients: f32 arrays of plan.numel elements. Releases the GIL. Raises ValueError like `run`.
    """
    cdef _Norms call = _Norms(plan)
    cdef sm_norms_job* job = &call.job
    cdef size_t i
    job.learners = len(gradients)
    job.gradient = call.hold(gradients)
    call.equip(&job.crew, 1)
    job.sums = <double*>call.lend(job.learners * call.blocks() * sizeof(double))
    job.norms = <double*>call.lend(job.learners * sizeof(double))
    with nogil:
        _native.gradient_norms(job)
    return [job.norms[i] for i in range(job.learners)]
