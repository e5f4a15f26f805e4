"""Who must acknowledge the final cut, and who has: rounds.md 12.

Pure bookkeeping; sending the cut and ending the run is the scheduler's.
"""


cdef class FinalCut:
    """The final cut of a run that has committed its last step."""

    def __cinit__(self, long long step, long long deadline_ns, expected):
        self.step = step
        self.deadline_ns = deadline_ns
        self.expected = frozenset(expected)
        self.eligible = set()
        self.acknowledged = {}

    cdef bint wants(self, object learner):
        """Must this learner still get the cut?"""
        return learner in self.expected and learner not in self.acknowledged

    cdef bint acknowledge(self, object learner, object generation, object step):
        """Count an acknowledgement; False if it changes nothing. It is never undone."""
        if step != self.step or (learner, generation) not in self.eligible:
            return False
        if not self.wants(learner):
            return False
        self.acknowledged[learner] = (learner, generation)
        return True

    cdef bint complete(self):
        return len(self.acknowledged) == len(self.expected)

    cdef list missing(self):
        """Ids that have not acknowledged, ascending."""
        return sorted(self.expected - self.acknowledged.keys())
