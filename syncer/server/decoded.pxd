# C surface of decoded payloads. Everything belongs to the loop's thread but `values`.


cdef class Decoded:
    cdef readonly object pool
    cdef readonly Py_ssize_t numel
    cdef readonly object array
    cdef readonly object tensor, decode
    cdef readonly bint in_place
    cdef readonly bint parked       # only `tensor` is kept, and whoever needs the values decodes it
    cdef public object digest
    cdef readonly Py_ssize_t users
    cdef readonly bint released
    cdef object __weakref__

    cdef object _memory(self)
    cdef int _free_if_unused(self) except -1


cpdef Decoded memory_for(object pool, Py_ssize_t numel, tensor, int dtype, bint keep_wire)
