# C surface of commits and saves: what becomes visible, what becomes durable, and the end.
from syncer.core.rounds.excluding cimport Excluding
from syncer.core.rounds.round cimport Round
from syncer.core.run.phases cimport Phase
from syncer.core.run.saving cimport Saves

cdef class Committing(Excluding):
    cdef readonly Phase phase
    cdef readonly dict unsynced              # step -> committed Round whose Synced is to come
    cdef readonly dict ledger                # learner id -> [merges, steps, tokens]
    cdef readonly Saves saves
    cdef bytes fingerprint
    cdef Round committing                    # computed; becomes visible when it is durable
    cdef int stop_signal
    cdef str failure                         # why the run ends after the last save, or None
    cdef int failure_status                  # and with which status
    cdef str unwritten                       # why there is no final state, or None

    cdef int commit_in_order(self) except -1
    cdef int commit(self, Round round) except -1
    cdef int add_to(self, dict ledger, Round round) except -1
    cdef int publish(self, Round round) except -1
    cdef int synced(self, object event) except -1
    cdef int report_unsynced(self) except -1
    cdef int report(self, Round round, long long sync_ns) except -1
    cdef int save(self, object kind) except -1
    cdef int save_next(self) except -1
    cdef object saved(self, object event)
    cdef int not_saved(self, object kind, str error) except -1
    cdef int no_final_state(self, str error) except -1
    cdef int record_shutdown(self) except -1
    cdef int without_it(self, object kind, str error) except -1
    cdef int give_up_saving(self) except -1
    cdef int fail(self, str text) except -1
    cdef int fail_with(self, int status, str text) except -1
    cdef int strict_failure(self, int status, str metric, str text) except -1
    cdef int end_stopping(self) except -1
    cdef int end(self, int status, str text) except -1
