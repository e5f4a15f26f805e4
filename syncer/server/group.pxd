# C surface of connection groups. Everything belongs to the loop's thread.
from syncer.server.conn cimport Channel, Owner
from syncer.server.loop cimport Loop
from syncer.server.outbox cimport Bulk, Outbox


cdef class Reports:
    cpdef object frame(self, Group group, int kind, object payload)
    cpdef object arriving(self, Group group, object message)
    cpdef object caught_up(self, Group group, tuple delivered)
    cpdef object ended(self, Group group, str reason, str refusal)


cdef class Group(Owner):
    cdef readonly Loop loop
    cdef readonly Reports reports
    cdef readonly object hello, limits, reassembly
    cdef readonly object learner, generation
    cdef readonly Channel control
    cdef readonly dict data     # stream index -> Channel
    cdef readonly Outbox outbox
    cdef readonly bint ended
    cdef object _link           # of an ended one: what its sockets were seen to carry
    cdef readonly long long heard_ns    # when its last byte came
    cdef public object work     # what `reports` keeps per group
    cdef list streams
    cdef object __weakref__
    cdef Py_ssize_t turn
    cdef bint pumping, in_order
    cdef readonly bint throttled

    cpdef object pump(self)
    cpdef object grant(self, Py_ssize_t count)
    cpdef Py_ssize_t in_flight(self)
    cpdef object end(self, str reason, str refusal=*)
    cdef Channel _idle_stream(self)
    cdef Py_ssize_t _send_together(self) except -1
    cdef object _report(self)
