# C surface of joining: how a member gets into what is open.
from syncer.core.rounds.gathering cimport Gathering
from syncer.core.rounds.membership cimport Member
from syncer.core.rounds.round cimport Round, Slot

cdef class Joining(Gathering):
    cdef int catch_up(self, Member member) except -1
    cdef int caught_up(self, object event) except -1
    cdef int tail(self, Member member) except -1
    cdef int replay_open_pulls(self, Member member) except -1
    cdef int rebind(self, Member member) except -1
    cdef int pass_on(self, Round round, Slot slot, Member member) except -1
    cdef int take_slots(self) except -1
    cdef Slot silent_slot(self, Round round, object learner)
    cdef int late_join(self, Member member) except -1
    cdef Member answerer(self, Slot slot)
    cdef int ask_again(self) except -1
    cdef long long joining_deadline_ns(self)
    cdef int left(self, Member dead) except -1
    cdef int tell_of(self, Member dead) except -1
    cdef bint can_close(self, Round round)
    cdef bint recovers(self, Member dead)
    cdef int shrink(self, Member dead) except -1
