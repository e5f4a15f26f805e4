# C surface of the readiness loop. All methods but `Loop.post` and `Loop.wake` belong to the loop's
# own thread; none may be called while the GIL is released.


cdef class Timer:
    cdef readonly long long when_ns
    cdef object callback

    cpdef void cancel(self)


cdef class Handler:
    # Called by the loop when the registered descriptor is ready; `events` is a mask of READ, WRITE.
    # A handler that was unregistered earlier in the same turn may still be called once and must
    # ignore it.
    cpdef object ready(self, int events)


cdef class Loop:
    cdef object posted
    cdef list timers
    cdef long long timer_order
    cdef bint waking
    cdef readonly object scratch
    cdef public unsigned long long bytes_received, bytes_sent
    cdef public object refused

    # The port: what a world has to bring.
    cpdef long long now_ns(self)
    cpdef object register(self, object sock, int events, Handler handler)
    cpdef object modify(self, object sock, int events, Handler handler)
    cpdef object unregister(self, object sock)
    cpdef object wake(self)
    cpdef long unacknowledged(self, object sock)

    # The same in every world.
    cpdef Timer call_at(self, long long when_ns, object callback)
    cpdef object turn(self, list ready)
    cpdef object due_ns(self, object deadline_ns)
