# C surface of the final cut's bookkeeping.

cdef class FinalCut:
    cdef readonly long long step
    cdef readonly long long deadline_ns
    cdef readonly frozenset expected         # learner ids that must acknowledge
    cdef readonly set eligible               # (learner, generation) that got the whole cut
    cdef readonly dict acknowledged          # learner id -> its acknowledged member key

    cdef bint wants(self, object learner)
    cdef bint acknowledge(self, object learner, object generation, object step)
    cdef bint complete(self)
    cdef list missing(self)
