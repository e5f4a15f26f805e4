"""Gather lists: buffers that are written one after the other; must not write them.

Compiled because the server calls it after every send: 0.2 to 0.7 us, against 0.6 to 0.9 us in
Python, beside a send of 3 us for a small frame.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.string cimport memcpy


cpdef object advance(list buffers, Py_ssize_t count):
    """Drop the first `count` bytes, which are written: whole buffers, and the head of the next.

    buffers: bytes or one-dimensional memoryviews of bytes, of at least `count` bytes in all.
    """
    cdef Py_ssize_t index = 0, size
    for buffer in buffers:
        size = len(buffer)
        if count < size:
            break
        count -= size
        index += 1
    del buffers[:index]
    if count:
        buffers[0] = memoryview(buffers[0])[count:]


cpdef list first_bytes(list buffers, Py_ssize_t count):
    """A gather list of the first `count` bytes, or of all if there are no more."""
    cdef list found = []
    cdef Py_ssize_t size
    for buffer in buffers:
        size = len(buffer)
        if count <= size:
            found.append(memoryview(buffer)[:count])
            break
        found.append(buffer)
        count -= size
    return found


def gather(list buffers, target):
    """Copy the buffers one after the other into `target`, other threads running meanwhile; returns
    how many bytes they have. Raises ValueError if it has no room for them."""
    cdef Py_buffer source, sink
    cdef Py_ssize_t done = 0
    PyObject_GetBuffer(target, &sink, PyBUF_WRITABLE)
    try:
        for buffer in buffers:
            PyObject_GetBuffer(buffer, &source, PyBUF_SIMPLE)
            try:
                if source.len > sink.len - done:
                    raise ValueError(f"{sink.len} bytes have no room for {done + source.len}")
                with nogil:
                    memcpy(<char*>sink.buf + done, source.buf, <size_t>source.len)
            finally:
                PyBuffer_Release(&source)
            done += source.len
    finally:
        PyBuffer_Release(&sink)
    return done
