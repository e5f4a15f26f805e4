# C surface of the waits of a run: what it waits for now, and when that is to be said.
from syncer.core.rounds.membership cimport Member
from syncer.core.rounds.round cimport Round
from syncer.core.run.ending cimport Ending

cpdef enum Wait:
    NO_WAIT = 0
    LEARNERS = 1         # to begin with
    VALUES = 2           # of learner 0, to begin with
    ANSWERS = 3          # of the round that commits next
    MERGE = 4            # of that round
    LAUNCH = 5           # somebody to launch it to
    WRITTEN = 6          # a file, that something comes after
    ACKNOWLEDGED = 7     # the final cut
    REPORTED = 8         # a spent budget, by everybody


cdef class Waiting(Ending):
    cdef readonly list initialized           # of each fragment
    cdef long long start_deadline_ns         # of --start-timeout-s; < 0: not begun
    cdef readonly Wait wait                  # what the run waits for now
    cdef readonly long long wait_step        # and of which step, if it is about one
    cdef readonly long long wait_since_ns
    cdef long long tell_ns                   # when it is to be said; 0 before the first event
    cdef bint told                           # it has been, so who comes is told at once
    cdef list newcomers                      # keys of who became current in this event
    cdef readonly long long said_count       # waits that were said so far
    cdef frozenset told_ids                  # whose answers were waited for when that was last said
    cdef long long told_ns

    cdef int start_overdue(self) except -1
    cdef str start_missing(self)
    cdef Wait awaited(self)
    cdef long long step_of(self, Wait wait)
    cdef int look_wait(self) except -1
    cdef bint goes_on(self)
    cdef int say_wait(self) except -1
    cdef int tell_newcomers(self) except -1
    cpdef object told_wait(self)
    cdef int notice(self, tuple members, object code, str text) except -1
    cdef object code_of(self)
    cdef str sentence(self)
    cdef str answers_sentence(self, Round round)
    cdef str needs_of(self, Round round)
    cdef str until_of(self, Round round)
    cdef object whereabouts(self, learners)
    cdef list absent(self)
    cdef object start_left_ns(self)
