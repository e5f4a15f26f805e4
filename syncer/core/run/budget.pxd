# C surface of the learner budget's gate.

cdef class BudgetGate:
    cdef readonly dict leases                # learner id still to report -> deadline in ns
    cdef long long lease_ns

    cdef int renew(self, object learner, long long now_ns) except -1
    cdef int report(self, object learner) except -1
    cdef bint complete(self)
    cdef long long deadline_ns(self)
    cdef list expired(self, long long now_ns)
