# C surface of what a merge left out, and of the rounds that are gathered again for it.
from syncer.core.rounds.admission cimport Admission
from syncer.core.rounds.round cimport Round

cdef class Excluding(Admission):
    cdef readonly dict fruitless             # fragment -> attempts in a row that left nothing
    cdef readonly dict exclusions            # learner id -> its contributions left out so far

    cdef int computed(self, Round round, object event) except -1
    cdef int exclude(self, Round round, object event) except -1
    cdef int gather_again(self, Round round, object event) except -1
