"""What a round merges: its pushes and carried deltas, weighted, in one order.

Must not change a round.

rule 7.1. The order is that of (learner, generation), whatever order the pushes came in, because a
sum of floats depends on its order: with it the same set of pushes gives the same bits on every
machine and in every replay. A delta that was carried into the round stands before its learner's own
push of this round, which is later in that learner's life; unless it comes from a newer connection.

rule 7.6. The weight is what a learner says of itself, and nothing keeps it from saying 2^64 tokens:
    its delta would be the round's. A thousand times what is usual among the others is more than any
    honest difference of machines, batches and pauses. The lower median, because with two others it
    is the smaller one that a third cannot raise; only of positive weights, because otherwise one
    learner that says 0 could take all weight from the only other one.
"""

from syncer.core import actions as act
from syncer.core.rounds.carry cimport Carried
from syncer.core.rounds.policy cimport Policy
from syncer.core.rounds.round cimport Round, Slot

cdef double RATIO = 1000.0


cdef object contribution_of(Policy policy, object push, Carried late=None):
    """A push as the merge sees it, with the weight that is really used (rule 5.8, rule 8.5)."""
    cdef double weight = policy.weight(push)
    if late is None:
        return act.Contribution(push.learner, push.generation, push.base, push.c_steps,
                                push.c_tokens, weight, push.payload)
    return act.Contribution(push.learner, push.generation, push.base, push.c_steps, push.c_tokens,
                            weight * late.discount, push.payload, True, late.lag, late.discount)


# rule 7.1
cdef list contributions_of(Policy policy, Round round):
    """What the round would merge now, ascending (learner, generation), carried before own."""
    cdef Slot slot
    cdef Carried late
    cdef object own
    cdef list found = []
    for learner in sorted(round.slots.keys() | round.carried.keys()):
        slot = round.slots.get(learner)
        late = round.carried.get(learner)
        own = None if slot is None else slot.push
        if late is not None and (own is None or late.push.generation <= own.generation):
            found.append(as_folded(round, contribution_of(policy, late.push, late)))
            late = None
        if own is not None:
            found.append(as_folded(round, contribution_of(policy, own)))
        if late is not None:
            found.append(as_folded(round, contribution_of(policy, late.push, late)))
    return found


cdef object as_folded(Round round, object contribution):
    """With a fold: with the weight that it has in the sums, and without its payload."""
    if not round.folds:
        return contribution
    return contribution._replace(
        payload=None, weight=round.weights[contribution.learner, contribution.carried])


cdef double surely_fair(list weighed) except? -1:
    """A weight that is not capped beside these, whose ever it is: at most two of them are its own
    learner's, so that the lower median of the others is never below this."""
    return RATIO * <double>weighed[max(0, (len(weighed) - 1) // 2 - 1)][0]


cdef bint any_over(list weighed) except -1:
    """May one of these have to be capped?"""
    return len(weighed) > 0 and weighed[len(weighed) - 1][0] > surely_fair(weighed)


# rule 7.6
cpdef double most_over(list weighed, object learner, double weight) except? -1:
    """What this weight is capped at beside these others, or itself.

    weighed: (weight, learner), ascending, all positive; entries of the learner itself do not count.
    """
    cdef list others
    cdef double most
    if not weighed or weight <= surely_fair(weighed):
        return weight
    others = [w for w, who in weighed if who != learner]
    if not others:
        return weight
    most = RATIO * <double>others[(len(others) - 1) // 2]
    return min(weight, most)


cdef list weighed_of(Policy policy, object contributions):
    """(weight, learner) of those that have one, ascending, as their counters say."""
    cdef list found = [(policy.weight(c), c.learner) for c in contributions]
    return sorted([entry for entry in found if entry[0] > 0])
