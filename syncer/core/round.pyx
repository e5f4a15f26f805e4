"""One round: the gathering of one step, from launch to commit.

Holds the expected set with its slots, the attempt, the deadlines, and afterwards the result's
figures. It changes only through the methods below; must not decide anything or emit actions.

    launch -> GATHERING -> start_computing -> COMPUTING -> finish_computing -> READY -> committed
                 relaunch: attempt + 1, new expected set, empty slots

What may change the expected set while gathering, and nothing else: a slot's `rebind` to another
generation of the same learner, `join`, `release_slot`, `relaunch`. The first three leave attempt,
base, launch time and every deadline as they are.
"""

from syncer.core.quorum cimport NEVER


cdef class Slot:
    """Place of one learner in the expected set of a round."""

    def __cinit__(self, Member member):
        self.member = member


cdef class Round:
    """The gathering, merge and commit of one step."""

    def __cinit__(self, long long step, Py_ssize_t fragment, long long base):
        self.step = step
        self.fragment = fragment
        self.base = base
        self.committed_ns = NEVER

    cdef int launch(self, long long now_ns, list members, long long quorum_deadline_ns) except -1:
        """Begin the next attempt with these members (ascending id) as the expected set."""
        cdef Member member
        self.attempt += 1
        self.slots = {}
        for member in members:
            self.slots[member.learner] = Slot(member)
        self.answered = 0
        self.launch_ns = now_ns
        self.quorum_deadline_ns = quorum_deadline_ns
        self.quorum_ns = NEVER
        self.grace_deadline_ns = NEVER
        self.grace_ns = NEVER
        self.released = []
        self.joined = []
        return 0

    cdef list relaunch(self, long long now_ns, list members, long long quorum_deadline_ns):
        """As `launch`; returns the payloads of the pushes that the new attempt discards."""
        cdef list discarded = [push.payload for push in self.pushes()]
        self.launch(now_ns, members, quorum_deadline_ns)
        return discarded

    cdef list pushes(self):
        """Accepted pushes, ascending learner id."""
        cdef Slot slot
        cdef list found = []
        for learner in sorted(self.slots):
            slot = self.slots[learner]
            if slot.push is not None:
                found.append(slot.push)
        return found

    cdef int accept(self, Slot slot, object push) except -1:
        slot.push = push
        self.answered += 1
        return 0

    cdef int arm_grace(self, long long now_ns, long long grace_ns) except -1:
        """Quorum is seen for the first time in this attempt."""
        self.quorum_ns = now_ns
        self.grace_ns = grace_ns
        self.grace_deadline_ns = now_ns + grace_ns
        return 0

    cdef int release_slot(self, Py_ssize_t learner) except -1:
        """The learner cannot answer this pull: the round does not wait for it any more."""
        del self.slots[learner]
        self.released.append(learner)
        return 0

    cdef int join(self, Member member) except -1:
        """A late joiner enters the expected set."""
        self.slots[member.learner] = Slot(member)
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

    cdef int start_computing(self, tuple contributions) except -1:
        """The round has closed: from here on no push finds it."""
        self.state = RoundState.COMPUTING
        self.contributions = contributions
        self.payloads_held = True
        return 0

    cdef int finish_computing(self, object done) except -1:
        """The worker's answer is here, and the payloads are free."""
        self.state = RoundState.READY
        self.payloads_held = False
        self.compute_ns = done.compute_ns
        self.gnorm = done.gnorm
        self.error = done.error
        return 0

    def __repr__(self):
        return f"Round(step={self.step}, attempt={self.attempt}, answered={self.answered})"
