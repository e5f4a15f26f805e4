# C surface of the admission of pushes.
from syncer.core.rounds.joining cimport Joining
from syncer.core.rounds.round cimport Round, Slot

cdef class Admission(Joining):
    cdef str admit_push(self, object event)
    cdef object refusal(self, Round round, Slot slot, object event)
    cdef int accept(self, Round round, Slot slot, object event) except -1
    cdef str refuse(self, Round round, Slot slot, object event, object reason)
    cdef bint waits_for_others(self, Round round, Slot slot)
    cdef bint carriable(self, Round round, object event)
    cdef int carry(self, object event) except -1
    cdef int folded(self, object event) except -1
