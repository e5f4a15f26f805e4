cpdef object advance(list buffers, Py_ssize_t count)
cpdef list first_bytes(list buffers, Py_ssize_t count)
