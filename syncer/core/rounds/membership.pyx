"""Members of a run: generations, `current`, hold, delivered versions, step-time estimates.

Pure state; must not know rounds or read a clock: every time is an argument.

A *member* is one connection of a learner: (learner id, generation). A learner draws a new
generation for every connection, so that two connections of one learner are never taken for each
other: a push says by its member which anchor and which pulls it can belong to.

rule 2.1. The newest accepted HELLO of a learner is its *current* member. It supersedes the older
one without closing it: a learner that dials again may have done so because its old connection broke
on one side only, and what that one still delivers is good. The older member may answer the pulls it
got, gets no new ones, and becomes current again only by `promote` (rule 2.4).

rule 2.3. A connection that goes takes only itself away, never the member that has followed it.

rule 3.2. A current member is *held* from the beginning of its catch-up to its end. *Launchable* is
who is current and not held; new expected sets are made of nobody else.

rule 2.6. A member's step time is measured, not configured: fleets are mixed, and machines get slow.
Its clock restarts with every sample, also one without progress, so that a pause between two phases
of training never counts as one long step; half of the estimate is the newest sample, so that a
learner that has become fast is not waited for as a slow one for long. One sample counts for no more
than four times the estimate: an evaluation between two steps is not the time of a step. The
estimate is dropped at disconnect.
"""

from syncer.errors import InvariantViolation


cdef double LEAP = 4.0                           # of the estimate, at most, in one sample


cdef class Member:
    """One connection of a learner. Kept by a round's slot after it has gone (`connected` False)."""

    def __cinit__(self, learner, generation):
        self.learner = learner
        self.generation = generation
        self.key = (learner, generation)
        self.connected = True
        self.step_time_s = -1.0

    # rule 2.6
    cpdef void observe(self, long long now_ns, unsigned long long local_step) noexcept:
        """Feed one (time, optimizer step) sample into the step-time estimate.

        s = elapsed / steps; the estimate is s first, then the mean of s and itself, of s no more
        than 4 times itself.
        """
        cdef double s
        if self.sampled and local_step > self.sample_step:
            s = <double>(now_ns - self.sample_ns) * 1e-9 / <double>(local_step - self.sample_step)
            if self.step_time_s > 0:
                s = min(s, LEAP * self.step_time_s)
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

    # rule 2.1
    cdef Member admit(self, object learner, object generation):
        """Register an accepted HELLO; it supersedes the current member without closing it.

        The wire has refused ids outside of the roster; one more look, since lists are not checked.
        """
        cdef Member member = Member(learner, generation)
        cdef Member old
        if not 0 <= member.learner < len(self.current):
            raise InvariantViolation(f"{member!r} is outside of 0..{len(self.current) - 1}")
        old = self.current[member.learner]
        if old is None:
            self.current_count += 1
        elif not old.held:
            self.launchable_count -= 1
        self.launchable_count += 1
        self.slowest_known = False
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
        self.slowest_known = False
        return 0

    # rule 2.3
    cdef Member leave(self, object learner, object generation):
        """Forget a connection; None if it was not known. Never removes a newer generation."""
        cdef Member member = self.members.pop((learner, generation), None)
        if member is None:
            return None
        member.connected = False
        self.slowest_known = False
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
            self.slowest_known = False
        return 0

    cdef int unhold(self, Member member, tuple delivered) except -1:
        """A current member's catch-up has ended with these versions sent."""
        member.delivered = delivered
        if member.held:
            member.held = False
            self.launchable_count += 1
            self.slowest_known = False
        return 0

    # rule 3.2
    cdef list launchable(self):
        """Current members that are not held, ascending id."""
        cdef list found = []
        cdef Member member
        for member in self.current:
            if member is not None and not member.held:
                found.append(member)
        return found

    cdef int observe(self, Member member, long long now_ns,
                     unsigned long long local_step) except -1:
        """A sample of a member's step time, and what it means for the slowest."""
        cdef double before = member.step_time_s
        member.observe(now_ns, local_step)
        if member.held or not self.is_current(member) or not self.slowest_known:
            return 0
        if member.step_time_s >= self.slowest_s:
            self.slowest_s = member.step_time_s
        elif before == self.slowest_s:
            self.slowest_known = False
        return 0

    cdef double slowest_launchable_s(self):
        """Largest step time among the launchable members, < 0 if none has an estimate.

        Asked after every event, so it is kept until the slowest gets faster or goes.
        """
        cdef Member member
        if not self.slowest_known:
            self.slowest_known = True
            self.slowest_s = -1.0
            for member in self.current:
                if member is not None and not member.held and member.step_time_s > self.slowest_s:
                    self.slowest_s = member.step_time_s
        return self.slowest_s

    cdef tuple current_keys(self):
        """(learner, generation) of every current member, ascending id."""
        cdef list found = []
        cdef Member member
        for member in self.current:
            if member is not None:
                found.append(member.key)
        return tuple(found)
