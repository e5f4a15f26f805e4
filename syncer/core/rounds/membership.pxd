# C surface of membership: who is connected, who is current, who is held.
# Nothing here is `nogil`; a Member outlives its connection as long as a round's slot points to it.

cdef extern from *:
    """
    #define SYNCER_LONG_AGO (-0x4000000000000000LL)
    """
    const long long LONG_AGO "SYNCER_LONG_AGO"       # before every moment of a run

cdef long long SILENCE_NS                    # after so long a connection may be taken for dead


cdef class Member:
    cdef readonly Py_ssize_t learner
    cdef readonly unsigned long long generation
    cdef readonly tuple key                  # (learner, generation), shared by every action
    cdef readonly bint connected
    cdef readonly bint held                  # a catch-up is under way: in no new expected set
    cdef readonly bint stalled               # its catch-up stands still: its peer takes none of it
    cdef readonly tuple delivered            # versions of the fragments at its tail; None before
    cdef readonly frozenset kept             # fragments that its learner had at its HELLO
    cdef readonly dict owed                  # fragment -> its pull of a fate not told, or None
    cdef readonly double step_time_s         # < 0: no estimate
    cdef bint init_dropped                   # gave an initial value while a newer one was current
    cdef readonly long long since_ns         # up to date: its HELLO, its tail, or the start
    cdef readonly long long life_ns          # its newest sign of life; LONG_AGO: none yet
    cdef readonly long long first_ns         # its first sign of life since then; NEVER: none
    cdef readonly long long claim_ns         # first sign beside a current one not yet established
    cdef bint sampled
    cdef long long sample_ns
    cdef unsigned long long sample_step

    cpdef void observe(self, long long now_ns, unsigned long long local_step) noexcept
    cdef long long quiet_since_ns(self) noexcept
    cdef int up_to_date(self, long long now_ns) except -1
    cdef bint established(self) noexcept


cdef class Membership:
    cdef readonly dict members               # (learner, generation) -> Member, connected ones only
    cdef readonly list current               # by learner id: Member or None
    cdef readonly list newest                # by learner id: generation last made current, or 0
    cdef readonly list latest                # by learner id: generation of the newest HELLO, or 0
    cdef readonly dict older                 # learner id -> its Members that are not current
    cdef readonly dict vacant_ns             # learner id of `older` -> when its current one went
    cdef readonly list used                  # by learner id: {generation: None}, oldest first
    cdef readonly Py_ssize_t current_count
    cdef readonly Py_ssize_t launchable_count
    cdef readonly Py_ssize_t told_count      # members that have asked for the fates of their pushes
    cdef double slowest_s                    # of the launchable members, if that is known
    cdef bint slowest_known

    cdef Member find(self, object learner, object generation)
    cdef bint was_used(self, object learner, object generation)
    cdef bint is_current(self, Member member)
    cdef Member admit(self, object learner, object generation, long long now_ns, frozenset kept=*,
                      bint wants_fates=*)
    cdef bint sign_of_life(self, Member member, long long now_ns)
    cdef list heirs(self, long long now_ns)
    cdef Member heir(self, object learner)
    cdef long long heir_deadline_ns(self)
    cdef int remember(self, dict used, object generation) except -1
    cdef int promote(self, Member member, long long now_ns) except -1
    cdef int supersede(self, Member member) except -1
    cdef int set_aside(self, Member member) except -1
    cdef int started(self, long long now_ns) except -1
    cdef Member leave(self, object learner, object generation, long long now_ns)
    cdef int hold(self, Member member) except -1
    cdef int stall(self, Member member, bint still) except -1
    cdef bint is_served(self, Member member)
    cdef int run_is_over(self, long long now_ns) except -1
    cdef int unhold(self, Member member, tuple delivered, long long now_ns) except -1
    cdef list launchable(self)
    cdef int observe(self, Member member, long long now_ns, unsigned long long local_step) except -1
    cdef double slowest_launchable_s(self)
    cdef tuple current_keys(self)
    cdef tuple without(self, Py_ssize_t fragment)


cdef double slowest_step_time_s(list members) noexcept
