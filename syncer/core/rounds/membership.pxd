# C surface of membership: who is connected, who is current, who is held.
# Nothing here is `nogil`; a Member outlives its connection as long as a round's slot points to it.

cdef class Member:
    cdef readonly Py_ssize_t learner
    cdef readonly unsigned long long generation
    cdef readonly tuple key                  # (learner, generation), shared by every action
    cdef readonly bint connected
    cdef readonly bint held                  # a catch-up is under way: in no new expected set
    cdef readonly tuple delivered            # versions of the fragments at its tail; None before
    cdef readonly double step_time_s         # < 0: no estimate
    cdef bint init_dropped                   # gave an initial value while a newer one was current
    cdef bint sampled
    cdef long long sample_ns
    cdef unsigned long long sample_step

    cpdef void observe(self, long long now_ns, unsigned long long local_step) noexcept


cdef class Membership:
    cdef readonly dict members               # (learner, generation) -> Member, connected ones only
    cdef readonly list current               # by learner id: Member or None
    cdef readonly list newest                # by learner id: generation of the newest HELLO, or 0
    cdef readonly Py_ssize_t current_count
    cdef readonly Py_ssize_t launchable_count
    cdef double slowest_s                    # of the launchable members, if that is known
    cdef bint slowest_known

    cdef Member find(self, object learner, object generation)
    cdef bint is_current(self, Member member)
    cdef Member admit(self, object learner, object generation)
    cdef int promote(self, Member member) except -1
    cdef Member leave(self, object learner, object generation)
    cdef int hold(self, Member member) except -1
    cdef int unhold(self, Member member, tuple delivered) except -1
    cdef list launchable(self)
    cdef int observe(self, Member member, long long now_ns, unsigned long long local_step) except -1
    cdef double slowest_launchable_s(self)
    cdef tuple current_keys(self)


cdef double slowest_step_time_s(list members) noexcept
