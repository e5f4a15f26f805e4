"""The compiled plan of a fragment: how its tensors are cut and shared; must not run anything.

A `Plan` is made once per fragment and thread count: from then on a merge costs no Python per tensor
or learner.
"""

from libc.stdlib cimport free, malloc

cimport cython

from syncer.kernels._merge cimport SK_BLOCK

cdef enum:
    # A fragment gets one thread per this many elements: less is not worth waking one for.
    THREAD_GRAIN = 2 * SK_BLOCK
    # Pieces per thread: so many that the last one to finish is short. A tensor that is one piece or
    # less goes to one thread whole, without a barrier: on a machine that is busy otherwise, a
    # barrier waits for a thread that does not run (measured with 64 tensors of 1 Mi and a load of
    # 7 on 2 cores: 2.8 s with barriers in each tensor, against 0.4 s as one tensor with few).
    PIECES = 8


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
        limit = max(<size_t>SK_BLOCK, <size_t>self.numel // (PIECES * self.threads))
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
