"""Members of a run: generations, `current`, hold, delivered versions, step-time estimates.

Pure state; knows nothing of rounds. Must not read a clock: every time is an argument.

A *member* is one connection of a learner: (learner id, generation). `current(L)` is the member of
the newest accepted HELLO of L, or nobody once that one has gone. An older connection that is still
open may answer the pulls it got; it becomes current again only by `promote`, with a new catch-up.
"""


cdef class Member:
    """One connection of a learner. Kept by a round's slot after it has gone (`connected` False)."""

    def __cinit__(self, learner, generation):
        self.learner = learner
        self.generation = generation
        self.key = (learner, generation)
        self.connected = True
        self.step_time_s = -1.0

    cpdef void observe(self, long long now_ns, unsigned long long local_step) noexcept:
        """Feed one (time, optimizer step) sample into the step-time estimate.

        s = elapsed / steps; the estimate is s first, then the mean of s and itself. The clock
        restarts on every sample, so a pause without steps never counts as one slow step.
        """
        cdef double s
        if self.sampled and local_step > self.sample_step:
            s = <double>(now_ns - self.sample_ns) * 1e-9 / <double>(local_step - self.sample_step)
            self.step_time_s = s if self.step_time_s < 0 else 0.5 * s + 0.5 * self.step_time_s
        self.sampled = True
        self.sample_ns = now_ns
        self.sample_step = local_step

    def __repr__(self):
        return f"Member({self.learner}.{self.generation})"


cdef double slowest_step_time_s(list members) noexcept:
    """Largest estimate among the members, < 0 if none has one."""
    cdef Member member
    cdef double slowest = -1.0
    for member in members:
        if member.step_time_s > slowest:
            slowest = member.step_time_s
    return slowest


cdef class Membership:
    """All members of a run of `learners` ids."""

    def __cinit__(self, Py_ssize_t learners):
        self.members = {}
        self.current = [None] * learners
        self.newest = [0] * learners

    cdef Member find(self, object learner, object generation):
        """The connected member, or None."""
        return self.members.get((learner, generation))

    cdef bint is_current(self, Member member):
        return self.current[member.learner] is member

    cdef Member admit(self, object learner, object generation):
        """Register an accepted HELLO; it supersedes the learner's current member without closing it."""
        cdef Member member = Member(learner, generation)
        cdef Member old = self.current[member.learner]
        if old is None:
            self.current_count += 1
        elif not old.held:
            self.launchable_count -= 1
        self.launchable_count += 1
        self.members[member.key] = member
        self.current[member.learner] = member
        self.newest[member.learner] = generation
        return member

    cdef int promote(self, Member member) except -1:
        """A connected member of a learner without a current one is its current, newest one."""
        self.current[member.learner] = member
        self.newest[member.learner] = member.generation
        self.current_count += 1
        self.launchable_count += not member.held
        return 0

    cdef Member leave(self, object learner, object generation):
        """Forget a connection; None if it was not known. Never removes a newer generation."""
        cdef Member member = self.members.pop((learner, generation), None)
        if member is None:
            return None
        member.connected = False
        member.step_time_s = -1.0
        if self.current[member.learner] is member:
            self.current[member.learner] = None
            self.current_count -= 1
            if not member.held:
                self.launchable_count -= 1
        return member

    cdef int hold(self, Member member) except -1:
        """A current member's catch-up begins."""
        if not member.held:
            member.held = True
            self.launchable_count -= 1
        return 0

    cdef int unhold(self, Member member, tuple delivered) except -1:
        """A current member's catch-up has ended with these versions sent."""
        member.delivered = delivered
        if member.held:
            member.held = False
            self.launchable_count += 1
        return 0

    cdef list launchable(self):
        """Current members that are not held, ascending id."""
        cdef list found = []
        cdef Member member
        for member in self.current:
            if member is not None and not member.held:
                found.append(member)
        return found

    cdef tuple current_keys(self):
        """(learner, generation) of every current member, ascending id."""
        cdef list found = []
        cdef Member member
        for member in self.current:
            if member is not None:
                found.append(member.key)
        return tuple(found)
