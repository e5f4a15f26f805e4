"""The door to the compiled passes of a merge; must not keep the state of a round.

Checks sizes and dtypes, lays out the working memory of one call, and runs it without the GIL. What a
pass computes stands in csrc/syncer_merge.h.
"""

from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_FORMAT
from cpython.buffer cimport PyBuffer_Release, PyObject_GetBuffer
from libc.math cimport sqrt
from libc.stdint cimport SIZE_MAX
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport strcmp

cimport cython

from syncer.kernels cimport _native
from syncer.kernels._merge cimport (
    SK_BLOCK, SK_OUTER_DELAYED_APPLY, SK_OUTER_DELAYED_HOLD, SK_OUTER_NESTEROV, SK_OUTER_SGD,
    SM_SORTED, SM_STATS, SM_STRIP, sm_heloco, sm_job, sm_share, sm_work,
)
from syncer.merge.buffers cimport Buffer, BufferPool
from syncer.merge.plan cimport Plan

# Indices of the outer steps in csrc, for the optimizer table.
STEP_NESTEROV = SK_OUTER_NESTEROV
STEP_SGD = SK_OUTER_SGD
STEP_DELAYED_HOLD = SK_OUTER_DELAYED_HOLD
STEP_DELAYED_APPLY = SK_OUTER_DELAYED_APPLY
STEP_NONE = -1

cdef enum:
    # Outputs beyond this leave the cache before anything reads them; writing past it spares the
    # reading of what is overwritten (measured: 0.87 of the copy bandwidth instead of 0.76 for rda).
    STREAM_BYTES = 8 << 20


cdef inline size_t aligned(size_t size) noexcept nogil:
    return (size + 63) // 64 * 64


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
    cdef double* radial
    cdef readonly double weight_sum
    cdef readonly Py_ssize_t pushes

    def __cinit__(self, Plan plan not None, BufferPool pool not None, bint directed):
        self.plan = plan
        self.sum = pool.take(plan.numel, zero=True)
        self.radial = NULL
        if directed:
            self.direction = pool.take(plan.numel, zero=True)
            self.radial = <double*>calloc(plan.tensors, sizeof(double))
            if self.radial == NULL:
                raise MemoryError("no memory for the sums of a fold")

    def __dealloc__(self):
        free(self.radial)


@cython.final
@cython.no_gc
cdef class _Job:
    """One call: the job, and everything it points to, freed on every way out."""

    cdef sm_job job
    cdef sm_heloco correction
    cdef Plan plan
    cdef Py_buffer* views
    cdef size_t held
    cdef char* arena
    cdef size_t blocks

    def __cinit__(self, Plan plan not None, int mode, int trim=-1):
        self.plan = plan
        self.blocks = plan.plan.block[plan.plan.tensors]
        self.job.plan, self.job.threads, self.job.mode = &plan.plan, plan.threads, mode
        self.job.trim = trim
        self.job.outer = STEP_NONE

    def __dealloc__(self):
        cdef size_t i
        for i in range(self.held):
            PyBuffer_Release(&self.views[i])
        free(self.views)
        free(self.arena)

    cdef hold(self, list arrays):
        """Takes the arrays' memory for as long as the job lives; checks dtype and size."""
        cdef Py_buffer* view
        cdef bint floats
        self.views = <Py_buffer*>calloc(len(arrays) + 1, sizeof(Py_buffer))
        if self.views == NULL:
            raise MemoryError("no memory for a merge")
        for array in arrays:
            view = &self.views[self.held]
            PyObject_GetBuffer(array, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)
            self.held += 1
            floats = view.format != NULL and strcmp(view.format, b"f") == 0
            if not floats or view.len != self.plan.numel * 4:
                raise ValueError(
                    f"a gradient must hold {self.plan.numel} float32 elements, contiguous; got "
                    f"{view.len} bytes of format {(view.format or b'B').decode()!r}"
                )

    cdef set_up(self, size_t learners, bint stats):
        """Carves the working memory out of one allocation; every part is 64-byte aligned."""
        cdef sm_job* job = &self.job
        cdef size_t count = larger(learners, 1), threads = self.plan.threads, i
        cdef size_t shared_sums = aligned(3 * count * self.plan.blocks_shared_max * sizeof(double))
        cdef size_t whole_sums = aligned(3 * count * self.plan.blocks_whole_max * sizeof(double))
        cdef size_t shares = aligned(count * sizeof(sm_share))
        cdef size_t strips = larger(SM_STRIP, SM_SORTED * count if job.trim >= 0 else 0)
        cdef size_t scratch = aligned(threads * (SK_BLOCK + strips) * sizeof(float))
        cdef size_t row = aligned(self.blocks * sizeof(double))
        cdef size_t pointers = aligned(count * sizeof(double))
        cdef size_t works = aligned(threads * sizeof(sm_work))
        cdef size_t rows = aligned((3 * count + SM_STATS) * self.blocks * sizeof(double))
        cdef size_t size = (64 + scratch + row + 3 * pointers + works + shared_sums + shares
                            + threads * (whole_sums + shares) + (rows if stats else 0))
        self.arena = <char*>malloc(size)
        if self.arena == NULL:
            raise MemoryError(f"no memory for a merge: {size} bytes")
        cdef char* at = <char*>aligned(<size_t>self.arena)
        job.learners = learners
        job.scratch_stride = SK_BLOCK + strips
        job.scratch, at = <float*>at, at + scratch
        job.merged_sums, at = <double*>at, at + row
        job.gradient, at = <const float**>at, at + pointers
        job.weight, at = <double*>at, at + pointers
        job.clip, at = <float*>at, at + pointers
        job.own, at = <sm_work*>at, at + works
        job.shared.stride = self.plan.blocks_shared_max
        job.shared.sums, at = <double*>at, at + shared_sums
        job.shared.share, at = <sm_share*>at, at + shares
        for i in range(threads):
            job.own[i].stride = self.plan.blocks_whole_max
            job.own[i].sums, at = <double*>at, at + whole_sums
            job.own[i].share, at = <sm_share*>at, at + shares
        self.clear_turns(&job.shared, count)
        for i in range(threads):
            self.clear_turns(&job.own[i], count)
        job.stats = <double*>at if stats else NULL

    cdef void clear_turns(self, sm_work* work, size_t learners) noexcept:
        cdef size_t i
        for i in range(learners):
            work.share[i].turned[0] = work.share[i].turned[1] = work.share[i].turned[2] = 0

    cdef take_gradients(self, list gradients, list weights, clip):
        cdef double* weight_array = <double*>self.job.weight
        cdef float* clip_array = <float*>self.job.clip
        cdef size_t i
        for i in range(self.job.learners):
            self.job.gradient[i] = <const float*>self.views[i].buf
            weight_array[i] = weights[i]
            self.job.weight_sum += weight_array[i]
            if clip is not None:
                clip_array[i] = clip[i]
        if clip is None:
            self.job.clip = NULL

    cdef correct(self, heloco, Buffer momentum):
        """heloco: (c_ok, k_s, k_d, beta_max, kappa, eps) or None."""
        if momentum is not None:
            self.check(momentum, False)
            self.job.arrays.state[0] = momentum.data
        if heloco is None:
            return
        if momentum is None:
            raise ValueError("a correction needs an optimizer that keeps a momentum")
        c = &self.correction
        c.c_ok, c.k_s, c.k_d, c.beta_max, c.kappa, c.eps = heloco
        self.job.heloco = c

    cdef check(self, Buffer buffer, bint written):
        if buffer.numel != self.plan.numel:
            raise ValueError(
                f"a buffer of {buffer.numel} elements for a fragment of {self.plan.numel}")
        if written and buffer.frozen:
            raise ValueError("a merge cannot write to a published buffer")

    cdef step(self, Buffer params, tuple state, Buffer params_out, tuple state_out, int outer,
              scalars):
        cdef sm_job* job = &self.job
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

    cdef total(self, size_t row):
        return _native.fragment_total(&self.plan.plan, self.job.stats + row * self.blocks)

    cdef turned(self, size_t learner):
        """Elements kept, shrunk and rotated by the correction."""
        cdef size_t counts[3]
        cdef size_t turn, thread
        for turn in range(3):
            counts[turn] = self.job.shared.share[learner].turned[turn]
            for thread in range(<size_t>self.plan.threads):
                counts[turn] += self.job.own[thread].share[learner].turned[turn]
        return counts[0], counts[1], counts[2]

    cdef statistics(self):
        cdef size_t n = self.job.learners
        learners = [(self.total(3 * i), self.total(3 * i + 1), self.total(3 * i + 2),
                     self.turned(i)) for i in range(n)]
        return learners, [self.total(3 * n + i) for i in range(SM_STATS)]


def run(Plan plan not None, *, int mode, list gradients, list weights, Buffer params not None,
        tuple state, Buffer params_out not None, tuple state_out, int outer, scalars,
        heloco=None, clip=None, int trim=-1, merged=None, FoldSums fold=None,
        double fold_scale=1.0, bint stats=False):
    """Merges one fragment and takes its outer step into the output buffers. Releases the GIL.

    mode: 0 avg, 1 rda. gradients: f32 arrays of plan.numel elements, in learner order; weights: f64,
    one each. Instead, `merged` (f32, plan.numel) is the merged gradient itself (with it, gradients
    only serve the statistics), or `fold` the sums of pushes added before (fold_scale: the average is
    sum * f32(fold_scale)).
    state, state_out: buffers of the optimizer's arrays (momentum first). outer: a STEP_ constant;
    STEP_NONE writes the merged gradient itself to params_out. scalars: (lr, mu, period, k), rounded
    to f32 here. heloco: (c_ok, k_s, k_d, beta_max, kappa, eps) or None. clip: a factor for each
    gradient, rounded to f32, or None. trim: avg only; -1, or the mean of each element without its
    `trim` lowest and highest values.

    Returns (gnorm, bad_tensor, statistics): gnorm is the norm of the merged gradient, f64;
    bad_tensor the first tensor with a result that is not finite, or -1 (with one, the outputs hold
    rubbish); statistics None, or ([(d.d, d.merged, d.m, (kept, shrunk, rotated elements)) per
    learner], [m.m, m.merged, step.step]).
    Raises ValueError for arrays of another size or dtype, before anything is written.
    """
    cdef _Job call = _Job(plan, mode, trim)
    cdef sm_job* job = &call.job
    if len(gradients) != len(weights) or (clip is not None and len(clip) != len(gradients)):
        raise ValueError("gradients, weights and clip factors do not match in number")
    if not gradients and merged is None and fold is None:
        raise ValueError("a merge needs at least one gradient, a fold, or the merged gradient")
    if trim >= 0 and 2 * trim >= len(gradients):
        raise ValueError(f"{len(gradients)} gradients are too few to drop {trim} at each end")
    call.step(params, state, params_out, state_out, outer, scalars)
    call.hold(gradients if merged is None else [*gradients, merged])
    call.set_up(len(gradients), stats)
    call.take_gradients(gradients, weights, clip)
    call.correct(heloco, state[0] if state else None)
    if merged is not None:
        job.merged = <const float*>call.views[len(gradients)].buf
    elif fold is not None:
        if fold.plan is not plan:
            raise ValueError("the fold belongs to another fragment")
        job.fold.sum, job.fold.radial = fold.sum.data, fold.radial
        job.fold.direction = NULL if fold.direction is None else fold.direction.data
        job.fold.scale, job.weight_sum = fold_scale, fold.weight_sum
    with nogil:
        _native.merge_fragment(job)
    bad = -1 if job.bad_tensor == SIZE_MAX else <Py_ssize_t>job.bad_tensor
    return sqrt(job.sumsq), bad, (call.statistics() if stats else None)


def add(FoldSums fold not None, gradient, *, double factor, double weight, Buffer momentum=None,
        heloco=None, double clip=1.0):
    """Adds one gradient to the sums of a fold, corrected and clipped first. Releases the GIL.

    factor: what the gradient is multiplied by in the sum, f64, rounded to f32 (for the direction:
    factor / norm, rounded once). weight: what enters the weight sum and the radial sum.
    Returns the elements (kept, shrunk, rotated) by the correction. Raises ValueError like `run`.
    """
    cdef _Job call = _Job(fold.plan, 0 if fold.direction is None else 1)
    cdef sm_job* job = &call.job
    call.hold([gradient])
    call.set_up(1, False)
    call.take_gradients([gradient], [weight], [clip])
    call.correct(heloco, momentum)
    job.fold.sum, job.fold.radial = fold.sum.data, fold.radial
    job.fold.direction = NULL if fold.direction is None else fold.direction.data
    job.fold.factor, job.fold.weight = factor, weight
    with nogil:
        _native.fold_add(job)
    fold.weight_sum += weight
    fold.pushes += 1
    return call.turned(0)


def norms(Plan plan not None, list gradients):
    """Norm of each gradient as a whole: the root of its tensors' blocked sums of squares, f64."""
    cdef _Job call = _Job(plan, 0)
    cdef Py_ssize_t i, n = len(gradients)
    cdef double* results
    cdef double* sums
    call.hold(gradients)
    call.set_up(n, True)
    call.take_gradients(gradients, [0.0] * n, None)
    sums, results = call.job.stats, <double*>call.job.weight
    call.job.stats = NULL
    with nogil:
        _native.gradient_norms(&call.job, sums, results)
    return [results[i] for i in range(n)]
