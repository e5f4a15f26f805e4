"""Late pushes that wait for their fragment's next round.

Holds what waits and what was merged lately; must not decide or emit: `admission` says what is
carried (rule 8.1), `gathering` attaches it (rule 8.3 to rule 8.5).

rule 8.2, one waiting push per (learner, fragment). The newer base wins: a learner's delta is
relative to what it last applied, so of two deltas of one fragment the one against the newer version
says more about where the learner stands now, and merging both would count the stretch they share
twice. Two of the same base are the same stretch, and the first is kept.

rule 8.8. A learner whose connection broke cannot know whether its push arrived, and may send it
    again. The first copy is the one that counts, wherever it was merged.

Two things are bounded here, because a fleet may run for months. What waits is one push for each
learner and fragment, in its wire form. What was merged or taken is remembered only for as many
rounds of the fragment as a delta may lag: the same push, sent again later, would be refused for its
lag anyway, so that it is not asked whether it has been here before (rule 8.1).
"""

from syncer.steps cimport fragment_of


cdef class Carried:
    """A late push that has joined a round, at a discount for every version it is behind."""

    def __cinit__(self, push, long long lag, double discount):
        self.push = push
        self.lag = lag
        self.discount = discount
        self.holds = True


cdef class CarryQueue:
    """Waiting late pushes of a run."""

    def __cinit__(self, Py_ssize_t fragments, long long max_lag):
        self.fragments = fragments
        self.memory = max_lag + 2
        self.waiting = {}
        self.merged = {}
        self.taken = {}

    # rule 8.2
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
        cdef Py_ssize_t fragment = fragment_of(step, self.fragments)
        cdef list steps = self.merged.setdefault(fragment, [])
        cdef list taken = self.taken.get(fragment)
        steps.append((step, learners))
        if len(steps) > self.memory:
            del steps[0]
        if taken is not None:
            taken.append(set())
            if len(taken) > self.memory:
                del taken[0]
            if not any(taken):
                del self.taken[fragment]
        return 0

    # rule 8.8
    cdef int note_taken(self, object push) except -1:
        """This late push has had its chance."""
        cdef list taken = self.taken.setdefault(push.fragment, [set()])
        (<set>taken[len(taken) - 1]).add((push.learner, push.step, push.attempt))
        return 0

    cdef bint was_taken(self, object push):
        """Was it taken before, on this or another connection of its learner?"""
        cdef tuple key = (push.learner, push.step, push.attempt)
        return any([key in taken for taken in self.taken.get(push.fragment, ())])

    cdef bint was_merged(self, long long step, object learner):
        """Was a push of the learner merged in this step, as far as that can still matter?"""
        for merged_step, learners in self.merged.get(fragment_of(step, self.fragments), ()):
            if merged_step == step:
                return learner in learners
        return False
