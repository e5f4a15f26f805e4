"""What must be true of a scheduler between two events: the state part of the invariants.

`check` reads and never changes; it costs a pass over all members and open rounds, so tests run it
after every event and production only with SYNCER_CHECK=1. The numbers are those of the invariants
at the end of docs/rules.md.
"""

from syncer.core.deadlines cimport NEVER
from syncer.core.rounds.carry cimport Carried
from syncer.core.rounds.closing cimport Verdict, quorum_reached, time_of_verdict, verdict_of
from syncer.core.rounds.membership cimport Member, Membership
from syncer.core.rounds.round cimport Round, RoundState, Slot
from syncer.core.run.phases cimport Phase
from syncer.core.run.scheduler cimport Scheduler
from syncer.errors import InvariantViolation
from syncer.steps cimport fragment_of, version_at


cpdef int check(Scheduler s) except -1:
    """Raise InvariantViolation, naming the invariant and the state, if the scheduler's is wrong."""
    check_members(s.members)
    if s.fragments:
        check_versions(s)
        check_rounds(s)
    if s.phase == Phase.FINISHING:
        demand(s.final_cut is not None, "a final cut is out", s.phase)
        demand(not s.rounds, "1: nothing is open once the last step is committed", s.rounds)
    if s.final_cut is not None:
        for learner, key in s.final_cut.acknowledged.items():
            demand(learner in s.final_cut.expected and key in s.final_cut.eligible,
                   "15: only an expected learner that got the cut has acknowledged", key)
    if s.phase == Phase.ENDED:
        demand(not s.rounds and not s.gathering, "nothing is open after the end", s.rounds)
    return 0


cdef int demand(bint true, str rule, object found) except -1:
    if not true:
        raise InvariantViolation(f"invariant broken: {rule}; found {found!r}")
    return 0


cdef int check_members(Membership m) except -1:
    cdef Member member
    cdef Py_ssize_t learner, current = 0, launchable = 0
    for key, member in m.members.items():
        demand(member.connected and member.key == key, "a registered member is connected", key)
    for learner in range(len(m.current)):
        member = m.current[learner]
        if member is None:
            continue
        current += 1
        launchable += not member.held
        demand(m.members.get(member.key) is member and member.learner == learner,
               "the current member of a learner is registered", member)
        demand(m.newest[learner] == member.generation,
               "only the newest accepted generation is current", member)
    for learner, older in m.older.items():
        demand(older and all([m.members.get(o.key) is o and o is not m.current[learner]
                              for o in older]),
               "older members are connected and not current", older)
    demand(set(m.vacant_ns) == {learner for learner in m.older if m.current[learner] is None},
           "a place is vacant if only older members of its learner are there", m.vacant_ns)
    demand(current == m.current_count and launchable == m.launchable_count,
           "member counts equal the members", (m.current_count, m.launchable_count))
    return 0


cdef int check_versions(Scheduler s) except -1:
    cdef Py_ssize_t p
    cdef long long expected
    for p in range(s.fragments):
        expected = version_at(s.global_step, p, s.fragments)
        demand(s.versions[p] == expected, f"1: fragment {p} is at its last merge, {expected}",
               s.versions)
    return 0


cdef int check_rounds(Scheduler s) except -1:
    cdef Round round
    cdef list gathering = []
    if s.phase == Phase.RUNNING:
        demand(sorted(s.rounds) == list(range(s.global_step + 1, s.next_step)),
               "2: the open rounds are the steps after the last commit", sorted(s.rounds))
    else:
        demand(not s.rounds and not s.late.waiting,
               "rounds and late pushes end with the running phase", s.rounds)
    demand(len(s.rounds) <= s.depth, "2: depth holds", len(s.rounds))
    for step in sorted(s.rounds):
        round = s.rounds[step]
        demand(round.step == step and round.fragment == fragment_of(step, s.fragments),
               "2: a round belongs to its step and fragment", round)
        demand(round.base == s.versions[round.fragment],
               "3: a round's base is its fragment's version", round)
        if round.state == RoundState.GATHERING:
            gathering.append(round)
            check_gathering(s, round)
        else:
            demand(len(round.contributions) > 0 or round.error is not None,
                   "a closed round has contributions", round)
    demand(gathering == s.gathering, "the gathering rounds are listed in step order", s.gathering)
    return 0


cdef int check_gathering(Scheduler s, Round round) except -1:
    cdef Slot slot
    cdef Carried late
    cdef Py_ssize_t answered = 0, pushed = 0
    capacity = answered_capacity = 0
    for learner, slot in round.slots.items():
        demand(slot.member.learner == learner, "4: one slot per learner", round)
        capacity += s.policy.capacity_of(learner)
        answered += round.answers(slot)
        answered_capacity += s.policy.capacity_of(learner) if round.answers(slot) else 0
        if slot.push is None:
            demand(not slot.holds, "an empty slot holds no payload", round)
            continue
        pushed += 1
        demand(slot.push.learner == learner and slot.push.step == round.step
               and slot.push.attempt == round.attempt and slot.push.base <= round.base,
               "5: a slot holds a push of its learner, step and attempt", slot.push)
        demand(s.policy.fixed_roster or slot.push.generation == slot.member.generation,
               "5: a push comes from the expected generation", slot.push)
    demand((answered, pushed, capacity, answered_capacity)
           == (round.answered, round.pushed, round.capacity_expected, round.capacity_answered),
           "4: the sums of a round equal its slots", round)
    for learner, late in round.carried.items():
        demand(late.push.learner == learner and late.push.fragment == round.fragment
               and late.lag <= s.policy.max_carry_lag and late.push.base <= round.base,
               "18: a carried delta is of its learner and fragment, and not too old", late.push)
    if s.policy.fixed_roster:
        demand(sorted(round.slots) == list(range(len(s.members.current))),
               "10: a fixed roster expects every learner", sorted(round.slots))
    demand((round.quorum_ns != NEVER) == quorum_reached(s.policy, round),
           "grace is armed exactly when quorum has been reached", round)
    demand(verdict_of(s.policy, round, s.now_ns) == Verdict.WAIT,
           "20: a round that could close or relaunch has done so", round)
    demand(round.verdict_ns == time_of_verdict(s.policy, round),
           "a round is looked at again when time alone closes or relaunches it", round)
    return 0
