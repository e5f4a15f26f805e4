# C surface of late carry.

cdef class Carried:
    cdef readonly object push
    cdef readonly long long lag
    cdef readonly double discount
    cdef readonly bint holds                 # the payload is still ours to give back


cdef class CarryQueue:
    cdef readonly dict waiting               # fragment -> {learner id: Push}
    cdef readonly dict merged                # fragment -> [(step, ids merged by push)], newest last
    cdef readonly dict taken                 # fragment -> [{(learner id, step, attempt)}], likewise
    cdef readonly Py_ssize_t fragments
    cdef Py_ssize_t memory

    cdef object put(self, object push)
    cdef list take(self, Py_ssize_t fragment)
    cdef list clear(self)
    cdef int note_merged(self, long long step, frozenset learners) except -1
    cdef bint was_merged(self, long long step, object learner)
    cdef int note_taken(self, object push) except -1
    cdef bint was_taken(self, object push)
