cpdef object advance(list buffers, Py_ssize_t count)
