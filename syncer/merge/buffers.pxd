cdef class BufferPool:
    cdef bint lasting
    cdef readonly Py_ssize_t live
    cdef readonly Py_ssize_t live_bytes

    cdef void count(self, Buffer buffer, Py_ssize_t numel)


cdef class Buffer:
    cdef BufferPool pool
    cdef object source          # an adopted array, or None: the memory is a block of its own
    cdef float* data            # first element, 64-byte aligned unless adopted
    cdef readonly Py_ssize_t numel
    cdef readonly bint frozen
    cdef Py_ssize_t shape[1]
    cdef Py_ssize_t strides[1]
