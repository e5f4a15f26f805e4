"""One round: the gathering of one step, from launch to commit.

Holds the expected set with its slots, the attempt, the deadlines, the late pushes that joined, and
afterwards the result's figures. It changes only through the methods below; must not decide anything
or emit actions. The sums (answered, capacities) are kept, not made, and so is the time before which
nothing but a change of the round itself can close it: a fleet of thousands pushes to dozens of open
rounds, and an event asks only those that it has changed.

    launch -> GATHERING -> start_computing -> COMPUTING -> finish_computing -> READY -> committed
                 launch again: attempt + 1, new expected set, empty slots; `reopen` leads there

What may change the expected set E while gathering, and nothing else: a slot passing to another
generation of its learner (rule 3.4), `join` (rule 3.5), `drop_slot` (rule 5.6, rule 6.10), a new
launch (rule 6.12). The first three leave attempt, base, launch time and every deadline as they are
(rule 3.6): who comes late must not move the moment for which the others wait.

rule 6.14. A robust merge compares learners: with fewer than 2F + 1 there is nothing to merge yet,
and of a learner that carried a delta in and pushed as well only one counts.

rule 6.15. Whose answer comes an attempt late would answer the next one late as well: answers to
attempts that were given up stand in line on its uplink, and the line grows with each. So the next
attempt has twice the time, until the line is short enough. It is one round's affair: once it closes
by an answer in time the line is gone, and the next one need know of no slowness.

Carried deltas belong to the round and not to an attempt (rule 8.7): a new launch keeps them.
Whether one is its learner's answer is asked of the slot (rule 8.6), so that a push and a carried
delta of one learner count once.
"""

from syncer.core.rounds.carry cimport Carried
from syncer.core.deadlines cimport NEVER
from syncer.core.rounds.membership cimport LONG_AGO, Member
from syncer.core.rounds.policy cimport MILLION, Policy

cdef long long ASK_NS = 250_000_000              # until a refused member is asked again,
cdef long long ASK_MAX_NS = 30_000_000_000       # twice as long after each further refusal


cdef class Slot:
    """Place of one learner in the expected set of a round."""

    def __cinit__(self, Member member):
        self.member = member
        self.again_ns = NEVER
        self.pulled_ns = LONG_AGO


cdef class Round:
    """The gathering, merge and commit of one step.

    Large: this is the one place where everything about a round stands.
    """

    def __cinit__(self, long long step, Py_ssize_t fragment, long long base, Policy policy):
        self.step = step
        self.fragment = fragment
        self.base = base
        self.policy = policy
        self.carried = {}
        self.excluded = []
        self.asking = {}
        self.committed_ns = NEVER
        self.patience_ns = policy.quorum_timeout_ns

    # rule 8.7, rule 6.15
    cdef int launch(self, long long now_ns, list members) except -1:
        """Begin the next attempt with these members (ascending id) as the expected set.

        The pushes of the attempt before must have been freed; carried deltas stay.
        """
        cdef Member member
        cdef Slot slot
        self.attempt += 1
        if self.attempt == 1:
            self.begun_ns = now_ns
        self.slots = {}
        self.asking = {}
        self.answered = 0
        self.pushed = 0
        self.weights = {}
        self.told_too_few = False
        self.told_deferred = False
        self.capacity_expected = 0
        self.capacity_answered = 0
        for member in members:
            slot = Slot(member)
            self.slots[member.learner] = slot
            if self.answers(slot):
                self.count_answer(slot)
        if self.policy.learner_capacity:
            self.capacity_expected = sum([self.policy.capacity_of(i) for i in self.slots])
        else:
            self.capacity_expected = MILLION * len(self.slots)
        if self.outrun:
            self.patience_ns = min(2 * self.patience_ns, self.policy.longest_attempt_ns)
        self.outrun = False
        self.launch_ns = now_ns
        self.quorum_deadline_ns = now_ns + self.patience_ns
        self.quorum_ns = NEVER
        self.grace_deadline_ns = NEVER
        self.grace_ns = NEVER
        self.verdict_ns = 0
        self.released = []
        self.joined = []
        return 0

    cdef bint contributed(self) noexcept:
        """Would a merge have anything to merge?"""
        return self.pushed > 0 or len(self.carried) > 0

    # rule 6.14
    cdef bint mergeable(self):
        """Is there a contribution of as many learners as the merge needs?"""
        cdef Py_ssize_t found = self.pushed
        cdef Slot slot
        for learner in self.carried:
            slot = self.slots.get(learner)
            found += slot is None or slot.push is None
        return found >= self.policy.least_values

    # rule 8.6
    cdef bint answers(self, Slot slot):
        """Has its learner answered? With --carry-answers-round a carried delta is an answer."""
        return slot.push is not None or (self.policy.carry_answers_round
                                         and slot.member.learner in self.carried)

    cdef int count_answer(self, Slot slot) except -1:
        self.answered += 1
        self.capacity_answered += self.policy.capacity_of(slot.member.learner)
        return 0

    cdef int accept(self, Slot slot, object push) except -1:
        """The slot's first valid push."""
        cdef bint answered = self.answers(slot)
        slot.push = push
        slot.holds = True
        self.verdict_ns = 0
        self.asked(slot.member.learner)
        self.pushed += 1
        if not answered:
            self.count_answer(slot)
        return 0

    cdef int attach(self, Carried late) except -1:
        """A late push joins this round, whether or not its learner is expected."""
        cdef Slot slot = self.slots.get(late.push.learner)
        self.carried[late.push.learner] = late
        self.verdict_ns = 0
        if self.policy.carry_answers_round and slot is not None and slot.push is None:
            self.count_answer(slot)
        return 0

    cdef int arm_grace(self, long long now_ns, long long grace_ns) except -1:
        """Quorum is seen for the first time in this attempt."""
        self.quorum_ns = now_ns
        self.grace_ns = grace_ns
        self.grace_deadline_ns = now_ns + grace_ns
        return 0

    cdef int heard_late(self, Slot slot, object push) except -1:
        """A push that answers no pull of now: is it late, of one that this attempt waits for?"""
        if (slot is not None and push.attempt < self.attempt and not self.answers(slot)
                and slot.member.generation == push.generation):
            self.outrun = True
        return 0

    cdef int drop_slot(self, Py_ssize_t learner) except -1:
        """The round does not wait for this learner, who has not answered, any more."""
        self.asked(learner)
        del self.slots[learner]
        self.verdict_ns = 0
        self.capacity_expected -= self.policy.capacity_of(learner)
        self.released.append(learner)
        return 0

    cdef int ask_later(self, Slot slot, long long now_ns) except -1:
        """Its learner could not answer with the anchor it had: it is asked again a little later."""
        if slot.again_ns == NEVER:
            slot.pause_ns = min(max(2 * slot.pause_ns, ASK_NS), ASK_MAX_NS)
            slot.again_ns = now_ns + slot.pause_ns
            self.asking[slot.member.learner] = slot
        return 0

    cdef int pulled(self, tuple members, long long now_ns) except -1:
        """These members of E are asked for it now."""
        cdef Slot slot
        for learner, _ in members:
            slot = self.slots[learner]
            slot.pulled_ns = now_ns
            if self.asking:
                self.asked(learner)
        return 0

    cdef int asked(self, Py_ssize_t learner) except -1:
        """It has been asked, or need not be any more."""
        cdef Slot slot
        if self.asking:
            slot = self.asking.pop(learner, None)
            if slot is not None:
                slot.again_ns = NEVER
        return 0

    cdef int pass_on(self, Slot slot, Member member) except -1:
        """The slot is another generation's of its learner from now on, and nothing else changes."""
        self.asked(member.learner)
        slot.member = member
        slot.pause_ns = 0
        return 0

    # rule 3.6
    cdef int join(self, Member member) except -1:
        """A late joiner enters the expected set, and nothing else changes."""
        self.slots[member.learner] = Slot(member)
        self.verdict_ns = 0
        self.capacity_expected += self.policy.capacity_of(member.learner)
        self.joined.append(member.learner)
        return 0

    cdef list expected_members(self):
        """Members of the expected set, ascending id."""
        cdef Slot slot
        cdef list found = []
        for learner in sorted(self.slots):
            slot = self.slots[learner]
            found.append(slot.member)
        return found

    cdef list unanswered(self):
        """Ids of the learners whose answers are missing, ascending."""
        return [learner for learner in sorted(self.slots) if not self.answers(self.slots[learner])]

    cdef list free_pushes(self):
        """Payloads of pushes that have not been given back yet, ascending id; now they are."""
        cdef Slot slot
        cdef list found = []
        for learner in sorted(self.slots):
            slot = self.slots[learner]
            if slot.holds:
                slot.holds = False
                found.append(slot.push.payload)
        return found

    cdef list free_all(self):
        """As `free_pushes`, and the carried ones."""
        cdef Carried late
        cdef list found = self.free_pushes()
        for learner in sorted(self.carried):
            late = self.carried[learner]
            if late.holds:
                late.holds = False
                found.append(late.push.payload)
        return found

    cdef int start_computing(self, tuple contributions) except -1:
        """The round has closed: from here on no push finds it."""
        self.state = RoundState.COMPUTING
        self.contributions = contributions
        return 0

    cdef int finish_computing(self, object done) except -1:
        """The worker's answer is here."""
        self.state = RoundState.READY
        self.compute_ns = done.compute_ns
        self.gnorm = done.gnorm
        self.error = done.error
        return 0

    cdef int reopen(self) except -1:
        """There is no result: back to gathering. A new launch follows."""
        self.state = RoundState.GATHERING
        self.contributions = ()
        self.error = None
        return 0

    cdef frozenset heard(self):
        """Learners whose own push the merge of this attempt took, or left out."""
        return frozenset([c.learner for c in self.contributions if not c.carried] + [
            c.learner for c, attempt, _ in self.excluded
            if attempt == self.attempt and not c.carried])

    def __repr__(self):
        return f"Round(step={self.step}, attempt={self.attempt}, answered={self.answered})"
