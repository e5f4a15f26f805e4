cdef class BufferPool:
    cdef list _spare
    cdef Py_ssize_t _spare_bytes_max
    cdef public Py_ssize_t bytes_max
    cdef readonly Py_ssize_t live
    cdef readonly Py_ssize_t live_bytes
    cdef readonly Py_ssize_t spare_bytes

    cdef void give_back(self, Buffer buffer)
    cdef void trim(self)


cdef class Buffer:
    cdef BufferPool pool
    cdef object source          # an adopted array, or None: the memory is the pool's
    cdef float* data            # first element, 64-byte aligned unless adopted; NULL: moved on
    cdef Py_ssize_t capacity    # elements that fit
    cdef readonly Py_ssize_t numel
    cdef readonly bint frozen
    cdef Py_ssize_t shape[1]
    cdef Py_ssize_t strides[1]
