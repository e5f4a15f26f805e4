"""Who must acknowledge the final cut, and who has.

Pure bookkeeping; must not send the cut or end the run, which is `ending`'s (rule 12.1 to rule
12.7).

rule 12.3. An acknowledgement counts if it names step T and comes from a generation that was sent
    the whole cut, of a learner that is expected. An older connection of the same learner may still
    say yes to something it never got. Once counted it stays: the learner may end on it, and what
    has ended cannot acknowledge again.
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

    # rule 12.3
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
