# C surface of what every layer of the scheduler stands on.
from syncer.core.rounds.membership cimport Membership
from syncer.core.rounds.policy cimport Policy

cdef class Ground:
    cdef readonly Policy policy
    cdef readonly Membership members
    cdef readonly long long now_ns
    cdef list out

    cdef int emit(self, object action) except -1
    cdef int log(self, str level, str text, dict fields) except -1
    cdef int warn(self, str text, dict fields) except -1
    cdef int release_all(self, list payloads) except -1
