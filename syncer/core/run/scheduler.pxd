# C surface of the scheduler: state that invariants.check reads, nothing that others may set.
from syncer.core.rounds.membership cimport Member
from syncer.core.run.waits cimport Waiting

cdef class Scheduler(Waiting):
    cdef readonly object config

    cpdef list step(self, long long now_ns, object event)
    cdef int handle(self, object event) except -1
    cdef int run_timers(self) except -1
    cdef int on_hello(self, object event) except -1
    cdef frozenset kept_of(self, object event)
    cdef object run_state(self)
    cdef int on_misfit(self, object event) except -1
    cdef int turn_away(self, object event) except -1
    cdef int welcome(self, Member member) except -1
    cdef int on_disconnected(self, object event) except -1
    cdef int on_init(self, object event) except -1
    cdef int on_push(self, object event) except -1
    cdef int on_progress(self, object event) except -1
    cdef int sign_of_life(self, object event) except -1
    cdef int succeed(self) except -1
    cdef int current_again(self, Member member) except -1
    cdef int on_merge_done(self, object event) except -1
    cdef int on_stalled(self, object event) except -1
    cdef int early_ack(self, object event) except -1
    cdef int start_if_ready(self) except -1
    cdef int after_save(self, object kind) except -1
