# C surface of the gathering of rounds: the state every later layer builds on.
from syncer.core.rounds.carry cimport Carried, CarryQueue
from syncer.core.rounds.ground cimport Ground
from syncer.core.rounds.round cimport Round

cdef class Gathering(Ground):
    cdef readonly dict rounds                # step -> Round, from launch to commit
    cdef readonly list gathering             # the rounds that still gather, ascending step
    cdef readonly list versions              # of each fragment; empty before the session is known
    cdef readonly Py_ssize_t fragments
    cdef readonly Py_ssize_t depth           # of --pipeline
    cdef readonly long long global_step      # newest committed step
    cdef readonly long long next_step        # to be launched
    cdef readonly long long first_step       # that this process launches
    cdef readonly long long launched_ns      # the newest launch; long ago before the first
    cdef long long retry_ns                  # nobody was there to launch to: not before this
    cdef readonly long long sync_ns          # compute + commit + broadcast of the last commit
    cdef readonly list weighed               # (weight, learner) of the round merged last
    cdef readonly bint weightless            # it had no weight at all
    cdef readonly set unfolded               # fragments whose rounds keep their pushes apart
    cdef readonly CarryQueue late            # None before the session is known

    cdef int open_session(self, Py_ssize_t fragments, long long step=*) except -1
    cdef int committed(self, Round round) except -1
    cdef int sync_took(self, long long sync_ns) except -1
    cdef int launch_due(self) except -1
    cdef Py_ssize_t launch_needs(self) noexcept
    cdef long long next_launch_ns(self)
    cdef int launch(self) except -1
    cdef int open_fold(self, Round round) except -1
    cdef int fold(self, Round round, object push, Carried late=*) except -1
    cdef object capped(self, Round round, object contribution, list weighed)
    cdef int pull(self, Round round, tuple members) except -1
    cdef int owe_fates(self, Round round, tuple members) except -1
    cdef int tell_fate(self, object push, Py_ssize_t fragment, long long step, unsigned int attempt,
                       object fate) except -1
    cdef int settle_all(self) except -1
    cdef int settle(self, Round round) except -1
    cdef int look_weightless(self, Round round) except -1
    cdef int look_too_few(self, Round round) except -1
    cdef int close(self, Round round) except -1
    cdef int quorum_timeout(self, Round round) except -1
    cdef int pull_missing(self, Round round, dict fields) except -1
    cdef int relaunch(self, Round round, dict fields) except -1
    cdef int begin_attempt(self, Round round, list members) except -1
    cdef int ask(self, Round round, list members) except -1
    cdef int reopen(self, Round round, list members) except -1
    cdef int attach_waiting(self, Round round) except -1
    cdef int attach(self, Round round, object push, bint parked) except -1
    cdef long long gathering_deadline_ns(self)
    cdef list free_everything(self)
