# C surface of the ways a run comes to its end: the final cut, a spent budget, a signal.
from syncer.core.run.budget cimport BudgetGate
from syncer.core.run.committing cimport Committing
from syncer.core.run.finishing cimport FinalCut

cdef class Ending(Committing):
    cdef readonly FinalCut final_cut
    cdef readonly BudgetGate budget
    cdef readonly bint resumed               # and not to linger
    cdef readonly bint resumed_at_end        # there was no step left to do
    cdef long long born_ns                   # the first event; < 0: none yet
    cdef readonly frozenset hoped            # waited for, and not missed: they contributed once

    cdef readonly bint lingers               # so somebody started it again who does not look
    cdef long long linger_deadline_ns        # < 0: not begun

    cdef int linger(self) except -1
    cdef long long linger_due_ns(self)
    cdef bint is_serving(self)
    cdef bint all_have_it(self)
    cdef int served(self)
    cdef int finish(self) except -1
    cdef int send_final_cut(self) except -1
    cdef set away(self)
    cdef int hope_for(self, learners) except -1
    cdef int complete(self) except -1
    cdef int acknowledged(self, object event) except -1
    cdef int final_cut_overdue(self) except -1
    cdef int budget_done(self, object event) except -1
    cdef str budget_problem(self, object event)
    cdef int close_gate(self) except -1
    cdef int budget_saved(self) except -1
    cdef int budget_overdue(self) except -1
    cdef int stop(self, object event) except -1
    cdef int no_room(self, object event) except -1
    cdef int broken(self, object event) except -1
