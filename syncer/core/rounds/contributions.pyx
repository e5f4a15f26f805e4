"""What a round merges: its pushes and carried deltas, weighted, in one order.

Must not change a round.

rule 7.1. The order is that of (learner, generation), whatever order the pushes came in, because a
sum of floats depends on its order: with it the same set of pushes gives the same bits on every
machine and in every replay. A delta that was carried into the round stands before its learner's own
push of this round, which is later in that learner's life; unless it comes from a newer connection.
"""

from syncer.core import actions as act
from syncer.core.rounds.carry cimport Carried
from syncer.core.rounds.policy cimport Policy
from syncer.core.rounds.round cimport Round, Slot


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
            found.append(contribution_of(policy, late.push, late))
            late = None
        if own is not None:
            found.append(contribution_of(policy, own))
        if late is not None:
            found.append(contribution_of(policy, late.push, late))
    return found
