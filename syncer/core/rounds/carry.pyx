"""Late pushes that wait for their fragment's next round: rounds.md 9.

Holds what waits and what was merged lately; the scheduler asks, decides and emits. Bounded: one
waiting push per (learner, fragment), and the merged ids of only as many rounds as a delta may lag.
"""


cdef class Carried:
    """A late push that has joined a round, at a discount for every version it is behind."""

    def __cinit__(self, push, long long lag, double discount):
        self.push = push
        self.lag = lag
        self.discount = discount
        self.holds = True


cpdef long long version_index(long long version, Py_ssize_t fragment, Py_ssize_t fragments) noexcept:
    """How many merges of the fragment lie at or before a version (0 for version 0)."""
    if version < fragment + 1:
        return 0
    return (version - 1 - fragment) // fragments + 1


cdef class CarryQueue:
    """Waiting late pushes of a run."""

    def __cinit__(self, Py_ssize_t fragments, long long max_lag):
        self.fragments = fragments
        self.memory = max_lag + 2
        self.waiting = {}
        self.merged = {}

    cdef object put(self, object push):
        """Let a push wait; returns the push that has to go: an older one, itself, or None."""
        cdef dict of_fragment = self.waiting.setdefault(push.fragment, {})
        old = of_fragment.get(push.learner)
        if old is not None and push.base <= old.base:
            return push
        of_fragment[push.learner] = push
        return old

    cdef list take(self, Py_ssize_t fragment):
        """All waiting pushes of a fragment, ascending learner id; none waits afterwards."""
        cdef dict of_fragment = self.waiting.pop(fragment, None)
        if of_fragment is None:
            return []
        return [of_fragment[learner] for learner in sorted(of_fragment)]

    cdef list clear(self):
        """As `take`, for all fragments."""
        cdef list found = []
        for fragment in sorted(self.waiting):
            found += self.take(fragment)
        return found

    cdef int note_merged(self, long long step, frozenset learners) except -1:
        """These learners' pushes were merged in this step."""
        cdef list steps = self.merged.setdefault((step - 1) % self.fragments, [])
        steps.append((step, learners))
        if len(steps) > self.memory:
            del steps[0]
        return 0

    cdef bint was_merged(self, long long step, object learner):
        """Was a push of the learner merged in this step, as far as that can still matter?"""
        for merged_step, learners in self.merged.get((step - 1) % self.fragments, ()):
            if merged_step == step:
                return learner in learners
        return False
