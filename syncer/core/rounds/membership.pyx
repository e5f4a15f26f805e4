"""Members of a run: generations, `current`, hold, delivered versions, step-time estimates.

Pure state; must not know rounds or read a clock: every time is an argument.

A *member* is one connection of a learner: (learner id, generation). A learner draws a new
generation for every connection, so that two connections of one learner are never taken for each
other: a push says by its member which anchor and which pulls it can belong to.

This is the one place that decides who is current:

rule 2.1. The newest accepted HELLO of a learner is its *current* member. It supersedes the older
one without closing it: a learner that dials again may have done so because its old connection broke
on one side only, and what that one still delivers is good. The older member may answer the pulls it
got, gets no new ones, and becomes current again by rule 2.4 or rule 2.7 alone.

rule 2.4. Two HELLOs of one learner may overtake each other, and then the older connection is the
one that lives. When the newest has gone, and for 5 s its learner has not dialed again, the older
one that showed life last is current: also one that has nothing to say until it is pulled. Not at
its first frame: that may have been on its way for long, from a process that has died, while its
successor is about to dial; a round would then wait for the dead.

rule 2.7. The newest may be the dead one without having gone: nothing ends it while its peer's
machine is there, or until keep-alive does. One late frame shows no life; two of them 5 s apart do.
A current member that has not shown this since it was up to date gives way to an older one that
does, if nothing came of the current one between the two. One that has shown it is the learner, and
loses no place by having nothing to say for long. If the wrong one has won, its rival wins by the
same rule.

rule 2.8. Who is being caught up may have nothing to say for as long as that takes: what shows its
life is that it takes the bytes. A peer that takes next to none of them for 5 s, though it is its
turn, is as silent as one that says nothing. Otherwise a HELLO that somebody has recorded, and that
never reads, or a byte now and then, would keep the learner out until a write times out. Who waits
for its turn has not been asked for a sign yet, and keeps its place: it is where a learner stands
that was started again while its predecessor is still there, and speaks from a thread.

rule 2.2. Every connection has a generation of its own. A HELLO whose generation has been used is
refused, also when its first connection has gone: somebody has recorded it, MAC and all, and would
be its learner's newest connection. What is remembered is bounded for each learner, so that nobody
can have another one's forgotten.

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

from syncer.core.deadlines cimport NEVER
from syncer.errors import InvariantViolation


SILENCE_NS = 5_000_000_000
cdef Py_ssize_t USED_MAX = 1 << 18                # generations that are remembered, of all learners
cdef Py_ssize_t USED_LEAST = 64                  # and of each one, however many there are
cdef double LEAP = 4.0                           # of the estimate, at most, in one sample


cdef class Member:
    """One connection of a learner. Kept by a round's slot after it has gone (`connected` False).

    Large: who it is, what it has been sent, and the times that tell whether it is alive.
    """

    def __cinit__(self, learner, generation):
        self.learner = learner
        self.generation = generation
        self.key = (learner, generation)
        self.connected = True
        self.kept = frozenset()
        self.step_time_s = -1.0
        self.life_ns = LONG_AGO
        self.first_ns = NEVER
        self.claim_ns = NEVER

    cdef int up_to_date(self, long long now_ns) except -1:
        """It has been sent what there is; what it says from now on counts."""
        self.since_ns = now_ns
        self.first_ns = NEVER
        self.claim_ns = NEVER
        return 0

    cdef bint established(self) noexcept:
        """Has it shown life, and not by one late frame?"""
        return self.first_ns != NEVER and self.life_ns >= self.first_ns + SILENCE_NS

    cdef long long quiet_since_ns(self) noexcept:
        """Since when nothing has come of it, beside its HELLO."""
        return max(self.since_ns, self.life_ns)

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
        return f"Member({self.learner}, generation={self.generation})"


cdef double slowest_step_time_s(list members) noexcept:
    """Largest estimate among the members, < 0 if none has one."""
    cdef Member member
    cdef double slowest = -1.0
    for member in members:
        if member.step_time_s > slowest:
            slowest = member.step_time_s
    return slowest


cdef class Membership:
    """All members of a run of `learners` ids.

    Large: who is current is decided in one place, from who comes, goes and shows life.
    """

    def __cinit__(self, Py_ssize_t learners):
        self.members = {}
        self.current = [None] * learners
        self.newest = [0] * learners
        self.latest = [0] * learners
        self.used = [{} for _ in range(learners)]
        self.older = {}
        self.vacant_ns = {}

    cdef Member find(self, object learner, object generation):
        """The connected member, or None."""
        return self.members.get((learner, generation))

    # rule 2.2
    cdef bint was_used(self, object learner, object generation):
        """Is this the generation of a connection, there or gone?"""
        return 0 <= learner < len(self.current) and generation in self.used[learner]

    cdef bint is_current(self, Member member):
        return self.current[member.learner] is member

    # rule 2.1
    cdef Member admit(self, object learner, object generation, long long now_ns,
                      frozenset kept=frozenset(), bint wants_fates=False):
        """Register an accepted HELLO; it supersedes the current member without closing it.

        The wire has refused ids outside of the roster; one more look, since lists are not checked.
        """
        cdef Member member = Member(learner, generation)
        member.kept = kept
        if wants_fates:
            member.owed = {}
            self.told_count += 1
        if not 0 <= member.learner < len(self.current):
            raise InvariantViolation(f"{member!r} is outside of 0..{len(self.current) - 1}")
        self.members[member.key] = member
        self.latest[member.learner] = generation
        self.remember(self.used[member.learner], generation)
        self.promote(member, now_ns)
        return member

    cdef int remember(self, dict used, object generation) except -1:
        """This generation has been used; the oldest of its learner is forgotten if need be."""
        used[generation] = None
        if len(used) > max(USED_MAX // len(self.current), USED_LEAST):
            del used[next(iter(used))]
        return 0

    cdef int promote(self, Member member, long long now_ns) except -1:
        """From now on this connected member is its learner's current one."""
        cdef Member other = self.current[member.learner]
        self.set_aside(member)
        if other is not None:
            self.supersede(other)
        for other in self.older.get(member.learner, ()):
            other.claim_ns = NEVER
        self.vacant_ns.pop(member.learner, None)
        self.current[member.learner] = member
        self.newest[member.learner] = member.generation
        member.up_to_date(now_ns)
        self.current_count += 1
        self.launchable_count += not member.held
        self.slowest_known = False
        return 0

    cdef int supersede(self, Member old) except -1:
        """A current member is one of its learner's older ones from now on."""
        self.older.setdefault(old.learner, []).append(old)
        self.current[old.learner] = None
        self.current_count -= 1
        self.launchable_count -= not old.held
        return 0

    cdef int set_aside(self, Member member) except -1:
        """An older member will not become current, or it is about to."""
        cdef list others = self.older.get(member.learner)
        if others is not None and member in others:
            others.remove(member)
            if not others:
                del self.older[member.learner]
                self.vacant_ns.pop(member.learner, None)
        return 0

    # rule 2.7
    cdef bint sign_of_life(self, Member member, long long now_ns):
        """Something has come of a member; True if it is to take the current one's place for it."""
        cdef Member current = self.current[member.learner]
        cdef Member other
        member.life_ns = now_ns
        if current is member:
            member.first_ns = min(member.first_ns, now_ns)
            if self.older:
                for other in self.older.get(member.learner, ()):
                    other.claim_ns = NEVER
            return False
        if current is None or self.is_served(current) or current.established():
            return False
        if member.claim_ns == NEVER:
            member.claim_ns = now_ns
        return now_ns >= member.claim_ns + SILENCE_NS

    # rule 2.4
    cdef list heirs(self, long long now_ns):
        """Members that are to be current now, since theirs went and no newer one has come."""
        cdef list found = []
        for learner in sorted(self.vacant_ns):
            if now_ns >= self.vacant_ns[learner] + SILENCE_NS:
                found.append(self.heir(learner))
        return found

    cdef Member heir(self, object learner):
        """The older member that showed life last, the newest of equal ones."""
        cdef Member member, found = None
        for member in self.older[learner]:
            if found is None or member.quiet_since_ns() >= found.quiet_since_ns():
                found = member
        return found

    cdef long long heir_deadline_ns(self):
        """When `heirs` will name somebody."""
        cdef long long due = NEVER
        for left_ns in self.vacant_ns.values():
            due = min(due, <long long>left_ns + SILENCE_NS)
        return due

    cdef int started(self, long long now_ns) except -1:
        """The run starts: each current member is sent what there is."""
        cdef Member member
        for member in self.members.values():
            member.up_to_date(now_ns)
        return 0

    # rule 2.3
    cdef Member leave(self, object learner, object generation, long long now_ns):
        """Forget a connection; None if it was not known. Never removes a newer generation."""
        cdef Member member = self.members.pop((learner, generation), None)
        if member is None:
            return None
        member.connected = False
        self.told_count -= member.owed is not None
        self.slowest_known = False
        member.step_time_s = -1.0
        if self.current[member.learner] is member:
            self.supersede(member)
            self.vacant_ns[member.learner] = now_ns
        self.set_aside(member)                   # with the last of them nobody is left to wait for
        return member

    cdef int hold(self, Member member) except -1:
        """A current member's catch-up begins."""
        member.stalled = False
        if not member.held:
            member.held = True
            self.launchable_count -= 1
            self.slowest_known = False
        return 0

    # rule 2.8
    cdef int stall(self, Member member, bint still) except -1:
        """The catch-up of a member stands still, or moves again, which is a sign of life."""
        cdef Member other
        member.stalled = still
        if not still and self.is_current(member):
            for other in self.older.get(member.learner, ()):
                other.claim_ns = NEVER
        return 0

    cdef bint is_served(self, Member member):
        """Is it being caught up, and takes it what it is sent?"""
        return member.held and not member.stalled

    cdef int run_is_over(self, long long now_ns) except -1:
        """The last step is committed: nobody is caught up any more, the final cut is to come."""
        cdef Member member
        for member in self.members.values():
            if member.held:
                member.held = False
                self.launchable_count += self.is_current(member)
                member.up_to_date(now_ns)
        self.slowest_known = False
        return 0

    cdef int unhold(self, Member member, tuple delivered, long long now_ns) except -1:
        """A current member's catch-up has ended with these versions sent."""
        if member.delivered is None:             # not at a replay: it may have shown life since
            member.up_to_date(now_ns)
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

    cdef tuple without(self, Py_ssize_t fragment):
        """Those of them that did not bring this fragment with them."""
        cdef list found = []
        cdef Member member
        for member in self.current:
            if member is not None and fragment not in member.kept:
                found.append(member.key)
        return tuple(found)
