"""What a merge left out because its result would not be finite, and what becomes of its round.

Must not decide whether a value is finite or whose it is: the merge does (`syncer/merge/finite.py`).

rule 7.5. A fold does not know any more what was in it. Its round is gathered again with the pushes
    kept apart, and so are the following rounds of that fragment until one leaves nothing out: a
    learner that is wild in every round would cost two attempts each otherwise.

rule 9.6. One learner whose training has blown up costs the others nothing: the merge goes on
    without its contribution, and says whose it was and where. In a fixed roster too: what would be
    the alternative, a run that ends for everybody, helps nobody. It has answered all the same; but
    it has no share in the ledger.
rule 9.7. Only if nothing finite is left the round has no result. It is gathered again, at once and
    as a new attempt, from those that were not left out if there are any: they may be slower, and
    should not have to race the one that is always first and never finite. Why not for ever: where
    every learner has blown up nothing will ever be merged again, and a run that ends can be resumed
    from a better cut.

rule 19.2. Whose contribution was left out is told so, if it has asked.
"""

from syncer.core import actions as act
from syncer.core.rounds.admission cimport Admission
from syncer.core.rounds.carry cimport Carried
from syncer.core.rounds.membership cimport Member
from syncer.core.rounds.round cimport Round
from syncer.protocol import PushFate

cdef object LEFT_OUT = PushFate.LEFT_OUT


cdef class Excluding(Admission):
    """The rules of a computed round, on top of those that gathered it."""

    def __init__(self, config, resumed=None):
        Admission.__init__(self, config, resumed)
        self.fruitless = {}
        self.exclusions = {}

    cdef int computed(self, Round round, object event) except -1:
        """A worker's answer: the round is ready, or gathers again."""
        cdef Py_ssize_t fragment = round.fragment
        round.finish_computing(event)
        self.exclude(round, event)
        if event.restarted:
            self.warn("momentum begins anew: it alone is more than finite",
                      {"step": round.step, "fragment": fragment})
        if not event.nothing_left:
            self.fruitless.pop(fragment, None)
            return self.release_all(round.free_all())
        if not round.folds:                      # it names nobody: the next attempt tells
            self.fruitless[fragment] = self.fruitless.get(fragment, 0) + 1
        if self.fruitless.get(fragment, 0) >= self.policy.nonfinite_limit:
            round.error = (f"{event.error}; nothing finite was left in {self.fruitless[fragment]} "
                           "attempts in a row, as many as --nonfinite-limit allows: resume from a "
                           "checkpoint before the training blew up")
            return self.release_all(round.free_all())
        return self.gather_again(round, event)

    # rule 9.6, rule 7.5
    cdef int exclude(self, Round round, object event) except -1:
        """What was left out is named and counted, and not of the round any more."""
        cdef object contribution
        for dropped in event.dropped:
            contribution = round.contributions[dropped.position]
            round.excluded.append((contribution, round.attempt, dropped.element))
            self.exclusions[contribution.learner] = (
                self.exclusions.get(contribution.learner, 0) + 1)
            self.warn("contribution left out: the merge would not be finite", {
                "learner": contribution.learner, "generation": contribution.generation,
                "fragment": round.fragment, "step": round.step, "attempt": round.attempt,
                "element": dropped.element, "so_far": self.exclusions[contribution.learner]})
            if not contribution.carried:
                self.tell_fate(contribution, round.fragment, round.step, round.attempt, LEFT_OUT)
        if event.dropped:
            left = {dropped.position for dropped in event.dropped}
            round.contributions = tuple([c for i, c in enumerate(round.contributions)
                                         if i not in left])
        if event.dropped or event.nothing_left:
            self.unfolded.add(round.fragment)
        else:
            self.unfolded.discard(round.fragment)
        return 0

    # rule 9.7
    cdef int gather_again(self, Round round, object event) except -1:
        cdef Member member
        cdef list there = self.members.launchable()
        cdef list expected = there
        cdef set out = {contribution.learner for contribution, _, _ in round.excluded}
        cdef Carried late
        for contribution, attempt, _ in round.excluded:
            if contribution.carried and attempt == round.attempt:
                late = round.carried.pop(contribution.learner)
                self.emit(act.Release(late.push.payload))
        if self.policy.fixed_roster:
            expected = round.expected_members()
        elif len([member for member in there if member.learner not in out]) >= (
                self.policy.least_values):
            expected = there = [member for member in there if member.learner not in out]
        round.folds = False
        self.reopen(round, expected)
        self.warn("nothing finite is left to merge: new attempt", {
            "step": round.step, "fragment": round.fragment, "attempt": round.attempt,
            "in_a_row": self.fruitless.get(round.fragment, 0), "limit": self.policy.nonfinite_limit,
            "error": event.error})
        return self.ask(round, there)
