# C surface of connections. Everything belongs to the loop's thread.
from syncer.server.loop cimport Handler, Loop, Timer
from syncer.server.outbox cimport Bulk, Outbox
from syncer.wire.frames cimport FrameReader


cdef class Owner:
    # What a channel reports to. A call may close the channel; callers look at `closed` afterwards.
    cpdef object on_bytes(self, Channel channel, Py_ssize_t count)
    cpdef object on_frame(self, Channel channel, int kind, object payload)
    cpdef object on_broken(self, Channel channel, str text)
    cpdef object on_lost(self, Channel channel, str reason)
    cpdef object on_sent(self, Channel channel, Bulk bulk)
    cpdef object on_writable(self, Channel channel)


cdef class Channel(Handler):
    cdef readonly object sock, peer
    cdef object tls             # the same socket, if it has TLS on it
    cdef readonly Loop loop
    cdef readonly bint closed, paused
    cdef readonly unsigned long long received
    cdef public Owner owner
    cdef public FrameReader reader
    cdef readonly unsigned long long sent
    cdef Py_ssize_t allowance   # bytes of bulk messages that may go now; < 0: any number
    cdef list out               # buffers of whole frames; the first may be partly sent
    cdef Bulk bulk              # the message whose piece is in `out`
    cdef Py_ssize_t rough       # bytes at the end of `out` that are not encoded yet, and where in
    cdef Py_ssize_t piece_end   # its tensor what is in `out` ends
    cdef bint mid_frame         # some bytes of `out[0]`'s frame are with the kernel
    cdef readonly bint blocked
    cdef bint again
    cdef bint half_closed
    cdef int mask
    cdef long long progress_ns, write_timeout_ns
    cdef Timer stall, failure

    cpdef object send(self, list buffers, Bulk bulk=*)
    cpdef object grant(self, Py_ssize_t count)
    cpdef object read_now(self)
    cpdef object pause(self)
    cpdef object resume(self)
    cpdef object close(self)
    cdef object _read(self)
    cdef object _read_on(self)
    cdef Py_ssize_t _take(self) except -1
    cdef object _flush(self)
    cdef Py_ssize_t _encoded(self, Py_ssize_t most) except -2
    cdef object _advance(self, Py_ssize_t sent)
    cdef object _block(self)
    cdef object _unblock(self)
    cdef object _interest(self)
    cdef object _fail(self, error)
    cdef object _fail_later(self, error)
    cdef bint idle(self)
