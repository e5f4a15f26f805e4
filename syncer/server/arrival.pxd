# C surface of what arrives. Everything belongs to the loop's thread, but what a worker was given:
# `decode_to`, `finish`, and what they touch.
from libc.stdint cimport uint8_t

from syncer.server.decoded cimport Decoded
from syncer.wire.frames cimport Partial, Sink


cdef class Arrival(Sink):
    cdef readonly object group
    cdef readonly str name
    cdef readonly object event
    cdef readonly Decoded decoded
    cdef readonly object sha        # of initial values alone
    cdef readonly object tensor     # the wire bytes, until all are decoded
    cdef uint8_t* wire              # and where they are, or what is not received elsewhere of them
    cdef float* values
    cdef int dtype
    cdef bint negate
    cdef Py_ssize_t unit, elements  # bytes and elements of what is worked on as a whole
    cdef readonly Py_ssize_t size
    cdef public Py_ssize_t there    # bytes that have come without a gap, if it goes by that
    cdef public Py_ssize_t hashed
    cdef readonly Py_ssize_t done
    cdef readonly dict parts        # decoded of pieces: up to where, and from where on
    cdef readonly Py_ssize_t bad    # first element that is not finite, or -1
    cdef public bint working, over
    cdef object more
    cdef bint by_piece
    cdef Py_ssize_t news            # bytes that have come since `more` was called

    cpdef object expect(self, object room, object more)
    cdef int take(self, Py_ssize_t piece, Py_ssize_t start, Py_ssize_t end,
                  uint8_t* data) except -1
    cdef int decode_units(self, Py_ssize_t start, Py_ssize_t end, uint8_t* data) except -1
