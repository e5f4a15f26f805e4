from syncer.kernels._merge cimport sm_plan


cdef class Plan:
    cdef sm_plan plan
    cdef size_t* memory
    cdef size_t blocks_shared_max
    cdef size_t blocks_whole_max
    cdef readonly int threads
    cdef readonly Py_ssize_t numel
    cdef readonly Py_ssize_t tensors
