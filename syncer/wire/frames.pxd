# C surface of the frame reader, and of who takes what comes of a message.

from libc.stdint cimport int64_t, uint64_t

from syncer.wire.payload cimport Payload


cdef struct Range:
    uint64_t start
    uint64_t end


cdef enum:
    TYPE_COUNT = 32             # message types that a limit can be kept of


cpdef enum:
    SINK_LEAD = 256             # bytes of a room in front of what is received, for what was left


cdef class Sink:
    cdef readonly Payload room

    cpdef object came(self, Partial message, Py_ssize_t piece, Py_ssize_t start, Py_ssize_t end)


cdef class Partial:
    # One message in reassembly: its bytes and the ranges that are taken.
    cdef readonly Payload payload
    cdef object msg_id
    cdef readonly uint64_t total
    cdef uint64_t filled
    cdef Range* ranges
    cdef Py_ssize_t range_count
    cdef Py_ssize_t range_capacity
    cdef dict coming            # of each piece that has begun: its end -> up to where it is in
    cdef public Sink sink       # None: nobody knows yet

    cdef int reserve(self, uint64_t start, uint64_t end) except -1
    cdef int insert(self, Py_ssize_t index, uint64_t start, uint64_t end) except -1


cdef class Reassembly:
    cdef readonly object limits
    cdef readonly uint64_t bytes_open
    cdef dict messages
    cdef object lock, sink_of

    cdef Partial reserve(self, uint64_t msg_id, uint64_t total, uint64_t offset, uint64_t size)
    cdef Partial open(self, object msg_id, uint64_t total)
    cdef tuple filled(self, Partial partial, uint64_t size)


cdef class FrameReader:
    cdef object _limits
    cdef public Reassembly reassembly
    cdef object error
    cdef int64_t frame_bytes_max[TYPE_COUNT]

    cdef Payload staging
    cdef Py_ssize_t start
    cdef Py_ssize_t end

    cdef Payload target
    cdef Partial partial
    cdef Py_ssize_t target_at
    cdef Py_ssize_t target_end
    cdef Py_ssize_t piece_bytes
    cdef Py_ssize_t wanted      # how long `buffer` was, less what was received since
    cdef int target_type

    cdef bint waits(self)
    cpdef object buffer(self)
    cpdef FrameReader received(self, Py_ssize_t count)
    cdef tuple next_frame(self)
    cdef tuple take_chunk(self, uint64_t size)
    cdef tuple take_bare(self, int msg_type, uint64_t size)
    cdef tuple finish_target(self)
    cdef tuple checked_inner(self, tuple frame)
