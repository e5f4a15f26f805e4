# C surface of the admission of pushes.
from syncer.core.rounds.gathering cimport Gathering
from syncer.core.rounds.round cimport Round, Slot

cdef class Admission(Gathering):
    cdef int on_push(self, object event) except -1
    cdef str refusal(self, Round round, Slot slot, object event)
    cdef int accept(self, Round round, Slot slot, object event) except -1
    cdef int refuse(self, Round round, Slot slot, object event, str reason) except -1
    cdef bint carriable(self, Round round, object event)
    cdef int carry(self, object event) except -1
    cdef int on_folded(self, object event) except -1
    cdef int strict_failure(self, str metric, str text) except -1
