"""The compiled plan of a fragment and the one call that runs a merge; must not keep state of rounds.

A `Plan` is made once per fragment and thread count: from then on a merge costs no Python per tensor
or learner. `run` is the only door to csrc/merge_fragment.c.
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
    SM_STRIP, sm_heloco, sm_job, sm_plan, sm_share, sm_work,
)
from syncer.merge.buffers cimport Buffer

# Indices of the outer steps in csrc, for the optimizer table.
STEP_NESTEROV = SK_OUTER_NESTEROV
STEP_SGD = SK_OUTER_SGD
STEP_DELAYED_HOLD = SK_OUTER_DELAYED_HOLD
STEP_DELAYED_APPLY = SK_OUTER_DELAYED_APPLY
STEP_NONE = -1

cdef enum:
    # Below this, all of a tensor's gradients fit in one core's share of the cache, and one thread
    # takes it through every pass; above, the passes go through memory anyway and all threads share.
    WHOLE_MAX = 1 << 18
    # A fragment gets one thread per this many elements: less is not worth waking one for.
    THREAD_GRAIN = 2 * 16384
    # Pieces per thread: so many that the last one to finish is short.
    PIECES = 4


@cython.final
@cython.no_gc
cdef class Plan:
    """How the tensors of one fragment are cut into blocks and shared between threads.

    numels: elements of each tensor, all > 0. threads: most threads a merge may use, >= 1.
    Raises ValueError for an empty fragment, an empty tensor, or threads < 1.
    """

    def __cinit__(self, numels, int threads):
        cdef size_t count = len(numels), t, first, taken, limit, shared = 0, whole = 0
        cdef size_t offset = 0, block = 0, blocks
        cdef Py_ssize_t numel
        if count == 0 or min(numels) <= 0:
            raise ValueError("a fragment has at least one tensor, and every tensor an element")
        if threads < 1:
            raise ValueError(f"merge threads must be at least 1, not {threads}")
        self.tensors = count
        self.numel = sum(numels)
        self.threads = max(1, min(threads, (self.numel + THREAD_GRAIN - 1) // THREAD_GRAIN))
        self.memory = <size_t*>malloc((2 * (count + 1) + 3 * count) * sizeof(size_t))
        if self.memory == NULL:
            raise MemoryError("no memory for the plan of a fragment")
        cdef size_t* offsets = self.memory
        cdef size_t* first_blocks = offsets + count + 1
        cdef size_t* shared_list = first_blocks + count + 1
        cdef size_t* whole_list = shared_list + count
        # One thread takes a tensor whole if that leaves the others enough to do.
        limit = min(<size_t>WHOLE_MAX, max(<size_t>SK_BLOCK,
                                           <size_t>self.numel // (PIECES * self.threads)))
        self.blocks_shared_max = self.blocks_whole_max = 1
        first = taken = 0
        for t in range(count):
            numel = numels[t]
            offsets[t], first_blocks[t] = offset, block
            blocks = (numel + SK_BLOCK - 1) // SK_BLOCK
            self.blocks_shared_max = max(self.blocks_shared_max, blocks)
            if <size_t>numel > limit or taken + <size_t>numel > limit:
                if t > first:
                    whole_list[2 * whole], whole_list[2 * whole + 1] = first, t
                    whole += 1
                first, taken = t, 0
            if <size_t>numel > limit:
                shared_list[shared] = t
                shared += 1
                first = t + 1
            else:
                taken += numel
                self.blocks_whole_max = max(self.blocks_whole_max, blocks)
            offset += numel
            block += blocks
        if count > first:
            whole_list[2 * whole], whole_list[2 * whole + 1] = first, count
            whole += 1
        offsets[count], first_blocks[count] = offset, block
        self.plan.tensors = count
        self.plan.offset, self.plan.block = offsets, first_blocks
        self.plan.shared_count, self.plan.shared = shared, shared_list
        self.plan.whole_count, self.plan.whole = whole, whole_list

    def __dealloc__(self):
        free(self.memory)

    @property
    def shared(self):
        """Indices of the tensors that all threads work on together."""
        return [self.plan.shared[i] for i in range(self.plan.shared_count)]

    @property
    def whole(self):
        """Ranges [first, end) of tensors that one thread takes through every pass."""
        return [(self.plan.whole[2 * i], self.plan.whole[2 * i + 1])
                for i in range(self.plan.whole_count)]


@cython.final
@cython.no_gc
cdef class _Memory:
    """Everything a job points to: held while it runs, freed on every way out."""

    cdef Py_buffer* views
    cdef size_t held
    cdef char* arena

    def __dealloc__(self):
        for i in range(self.held):
            PyBuffer_Release(&self.views[i])
        free(self.views)
        free(self.arena)

    cdef hold(self, list arrays, Py_ssize_t numel):
        cdef Py_buffer* view
        cdef size_t count = len(arrays)
        self.views = <Py_buffer*>calloc(count + 1, sizeof(Py_buffer))
        if self.views == NULL:
            raise MemoryError("no memory for a merge")
        for array in arrays:
            view = &self.views[self.held]
            PyObject_GetBuffer(array, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)
            self.held += 1
            if view.format == NULL or strcmp(view.format, b"f") != 0 or view.len != numel * 4:
                raise ValueError(
                    f"a gradient must hold {numel} float32 elements, contiguous; got "
                    f"{view.len} bytes of format {(view.format or b'B').decode()!r}"
                )

    cdef void set_up(self, Plan plan, sm_job* job) except *:
        """Carves the working memory of a job out of one allocation; every part is 64-byte aligned."""
        cdef size_t learners = max(job.learners, <size_t>1), threads = plan.threads
        cdef size_t shared_sums = aligned(3 * learners * plan.blocks_shared_max * sizeof(double))
        cdef size_t whole_sums = aligned(3 * learners * plan.blocks_whole_max * sizeof(double))
        cdef size_t shares = aligned(learners * sizeof(sm_share))
        cdef size_t scratch = aligned(threads * (SK_BLOCK + SM_STRIP) * sizeof(float))
        cdef size_t merged = aligned(plan.plan.block[plan.plan.tensors] * sizeof(double))
        cdef size_t pointers = aligned(learners * sizeof(void*))
        cdef size_t weights = aligned(learners * sizeof(double))
        cdef size_t works = aligned(threads * sizeof(sm_work))
        cdef size_t size = (64 + scratch + merged + pointers + weights + works + shared_sums + shares
                            + threads * (whole_sums + shares))
        cdef size_t i
        self.arena = <char*>malloc(size)
        if self.arena == NULL:
            raise MemoryError(f"no memory for a merge: {size} bytes")
        cdef char* at = <char*>aligned(<size_t>self.arena)
        job.scratch, at = <float*>at, at + scratch
        job.merged_sums, at = <double*>at, at + merged
        job.gradient, at = <const float**>at, at + pointers
        job.weight, at = <double*>at, at + weights
        job.own, at = <sm_work*>at, at + works
        job.shared.stride = plan.blocks_shared_max
        job.shared.sums, at = <double*>at, at + shared_sums
        job.shared.share, at = <sm_share*>at, at + shares
        for i in range(threads):
            job.own[i].stride = plan.blocks_whole_max
            job.own[i].sums, at = <double*>at, at + whole_sums
            job.own[i].share, at = <sm_share*>at, at + shares


cdef inline size_t aligned(size_t size) noexcept nogil:
    return (size + 63) // 64 * 64


def run(Plan plan not None, *, int mode, list gradients, list weights, Buffer params not None,
        tuple state, Buffer params_out not None, tuple state_out, int outer, tuple scalars,
        heloco=None, merged=None):
    """Merges one fragment and takes its outer step into the output buffers. Releases the GIL.

    mode: 0 avg, 1 rda. gradients: f32 arrays of plan.numel elements, in learner order; weights: f64,
    one each. Without gradients, `merged` (f32, plan.numel) is the merged gradient already.
    state, state_out: buffers of the optimizer's arrays (momentum first). outer: index of the outer
    step in csrc, or -1 to write the merged gradient itself to params_out. scalars: (lr, mu, period,
    k), rounded to f32 here. heloco: (c_ok, k_s, k_d, beta_max, kappa, eps) or None.

    Returns (gnorm, bad_tensor): gnorm is the norm of the merged gradient, f64; bad_tensor the first
    tensor with a result that is not finite, or -1. With a bad tensor the outputs hold rubbish.
    Raises ValueError for arrays of another size or dtype, before anything is written.
    """
    cdef sm_job job
    cdef sm_heloco correction
    cdef _Memory memory = _Memory()
    cdef Buffer buffer
    cdef double weight, weight_sum = 0.0
    cdef size_t i
    cdef double* weight_array
    for buffer in (params, params_out, *state, *state_out):
        if buffer.numel != plan.numel:
            raise ValueError(f"a buffer of {buffer.numel} elements for a fragment of {plan.numel}")
    for buffer in (params_out, *state_out):
        if buffer.frozen:
            raise ValueError("a merge cannot write to a published buffer")
    if len(gradients) != len(weights) or len(state) != len(state_out) or len(state) > 2:
        raise ValueError("gradients and weights, or the state arrays, do not match in number")
    if heloco is not None and not state:
        raise ValueError("a correction against the momentum needs an optimizer that keeps one")
    if not gradients and merged is None:
        raise ValueError("a merge needs at least one gradient, or the merged one")
    memory.hold(gradients or [merged], plan.numel)
    job.plan, job.threads, job.mode = &plan.plan, plan.threads, mode
    job.learners = len(gradients)
    memory.set_up(plan, &job)
    weight_array = <double*>job.weight
    job.merged = NULL
    if gradients:
        for i in range(job.learners):
            job.gradient[i] = <const float*>memory.views[i].buf
            weight = weights[i]
            weight_array[i] = weight
            weight_sum += weight
    else:
        job.merged = <const float*>memory.views[0].buf
    job.weight_sum = weight_sum
    job.heloco = NULL
    if heloco is not None:
        (correction.c_ok, correction.k_s, correction.k_d, correction.beta_max, correction.kappa,
         correction.eps) = heloco
        job.heloco = &correction
    job.outer = outer
    job.scalars.lr, job.scalars.mu, job.scalars.period, job.scalars.k = scalars
    job.arrays.params, job.arrays.params_out = params.data, params_out.data
    job.arrays.state[0] = job.arrays.state[1] = NULL
    job.arrays.state_out[0] = job.arrays.state_out[1] = NULL
    for i in range(<size_t>len(state)):
        buffer = state[i]
        job.arrays.state[i] = buffer.data
        buffer = state_out[i]
        job.arrays.state_out[i] = buffer.data
    with nogil:
        _native.merge_fragment(&job)
    return sqrt(job.sumsq), (-1 if job.bad_tensor == SIZE_MAX else <Py_ssize_t>job.bad_tensor)
