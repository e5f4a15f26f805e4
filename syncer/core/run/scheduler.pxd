# C surface of the scheduler: the state that invariants.check reads, and nothing that others may set.
from syncer.core.rounds.admission cimport Admission
from syncer.core.run.budget cimport BudgetGate
from syncer.core.run.finishing cimport FinalCut
from syncer.core.rounds.membership cimport Member
from syncer.core.rounds.round cimport Round
from syncer.core.run.saving cimport Saves

cpdef enum Phase:
    WAITING = 0      # for a session, every INIT and enough learners
    RUNNING = 1
    SAVING = 2       # every step is committed; checkpoint or final state are being written
    FINISHING = 3    # the final cut is out
    CUTOFF = 4       # a learner has spent its budget: reports, then the cut-off checkpoint
    STOPPING = 5     # a signal or a failed merge; the last cut is being written
    ENDED = 6


cdef class Scheduler(Admission):
    cdef readonly object config
    cdef readonly Phase phase
    cdef readonly list initialized           # of each fragment
    cdef readonly dict unsynced              # step -> committed Round whose Synced is to come
    cdef readonly dict ledger                # learner id -> [merges, steps, tokens]
    cdef readonly FinalCut final_cut
    cdef readonly BudgetGate budget
    cdef bytes fingerprint
    cdef int stop_signal
    cdef str failure                         # why the run ends after the last save, if not by a signal
    cdef Round committing                    # computed; becomes visible when it is durable
    cdef readonly Saves saves
    cdef long long start_deadline_ns         # < 0: not begun

    cdef int handle(self, object event) except -1
    cdef int on_hello(self, object event) except -1
    cdef int on_disconnected(self, object event) except -1
    cdef int on_init(self, object event) except -1
    cdef int on_progress(self, object event) except -1
    cdef int sign_of_life(self, object event) except -1
    cdef int on_caught_up(self, object event) except -1
    cdef int on_merge_done(self, object event) except -1
    cdef int on_synced(self, object event) except -1
    cdef int on_saved(self, object event) except -1
    cdef int on_final_ack(self, object event) except -1
    cdef int on_budget_done(self, object event) except -1
    cdef int on_stop(self, object event) except -1
    cdef int start_if_ready(self) except -1
    cdef int run_timers(self) except -1
    cdef int commit_in_order(self) except -1
    cdef int commit(self, Round round) except -1
    cdef int report_unsynced(self) except -1
    cdef int report(self, Round round, long long sync_ns) except -1
    cdef int publish(self, Round round) except -1
    cdef dict ledger_after(self, Round round)
    cdef int save(self, str kind) except -1
    cdef int save_next(self) except -1
    cdef int after_save(self, str kind) except -1
    cdef int not_saved(self, str kind, str error) except -1
    cdef int fail(self, str text) except -1
    cdef int end_stopping(self) except -1
    cdef int send_final_cut(self) except -1
    cdef int finish(self) except -1
    cdef int end(self, int status, str text) except -1
