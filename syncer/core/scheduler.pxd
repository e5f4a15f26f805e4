# C surface of the scheduler: the state that invariants.check reads, and nothing that others may set.
from syncer.core.finishing cimport FinalCut
from syncer.core.membership cimport Member, Membership
from syncer.core.round cimport Round, Slot

cpdef enum Phase:
    WAITING = 0      # for a session, every INIT and enough learners
    RUNNING = 1
    SAVING = 2       # every step is committed; the final state is being written
    FINISHING = 3    # the final cut is out
    STOPPING = 4     # a signal came while a write was under way
    ENDED = 5


cdef class Scheduler:
    cdef readonly object config
    cdef readonly Phase phase
    cdef readonly Membership members
    cdef readonly dict rounds                # step -> Round, from launch to commit
    cdef readonly list gathering             # the rounds that still gather, ascending step
    cdef readonly dict unsynced              # step -> committed Round whose Synced is to come
    cdef readonly list versions              # of each fragment; empty before the first HELLO
    cdef readonly list initialized
    cdef readonly dict ledger                # learner id -> [merges, steps, tokens]
    cdef readonly Py_ssize_t fragments
    cdef readonly long long global_step
    cdef readonly long long next_step
    cdef readonly long long now_ns
    cdef readonly long long next_launch_ns
    cdef readonly long long sync_ns          # compute + commit + broadcast of the last commit
    cdef readonly FinalCut final_cut
    cdef readonly Py_ssize_t depth
    cdef readonly bint fixed_roster
    cdef bytes fingerprint
    cdef list out
    cdef int stop_signal
    # configuration, in the units of this file
    cdef Py_ssize_t learners, quorum
    cdef long long total_steps, max_base_lag, grace_cap_ns, launch_floor_ns
    cdef long long quorum_timeout_ns, final_ack_timeout_ns
    cdef double grace_gamma, grace_tau, interval_steps
    cdef bint equal_weights, final_state

    cdef int emit(self, object action) except -1
    cdef int log(self, str level, str text, dict fields) except -1
    cdef int warn(self, str text, dict fields) except -1
    cdef int handle(self, object event) except -1
    cdef int on_hello(self, object event) except -1
    cdef int on_disconnected(self, object event) except -1
    cdef int on_init(self, object event) except -1
    cdef int on_push(self, object event) except -1
    cdef str refusal(self, Round round, Slot slot, object event)
    cdef int accept(self, Round round, Slot slot, object event) except -1
    cdef int refuse_stale(self, Round round, Slot slot, object event) except -1
    cdef int on_caught_up(self, object event) except -1
    cdef int catch_up(self, Member member) except -1
    cdef int pull(self, Round round, tuple members) except -1
    cdef int replay_open_pulls(self, Member member) except -1
    cdef int rebind(self, Member member) except -1
    cdef int late_join(self, Member member) except -1
    cdef bint recovers(self, Member dead)
    cdef int on_merge_done(self, object event) except -1
    cdef int on_synced(self, object event) except -1
    cdef int on_saved(self, object event) except -1
    cdef int on_final_ack(self, object event) except -1
    cdef int on_stop(self, object event) except -1
    cdef int start_if_ready(self) except -1
    cdef int advance(self) except -1
    cdef int commit_in_order(self) except -1
    cdef int commit(self, Round round) except -1
    cdef int report_unsynced(self) except -1
    cdef int report(self, Round round, long long sync_ns) except -1
    cdef int launch_due(self) except -1
    cdef int launch(self) except -1
    cdef int settle(self, Round round) except -1
    cdef bint quorum_reached(self, Round round)
    cdef int close(self, Round round) except -1
    cdef int quorum_timeout(self, Round round) except -1
    cdef int begin_finishing(self) except -1
    cdef int send_final_cut(self) except -1
    cdef int finish_if_acknowledged(self) except -1
    cdef int end(self, int status, str text) except -1
