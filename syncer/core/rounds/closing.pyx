"""When a round closes: everybody, quorum, grace, the deadlines. Must change only a round's grace.

Must not emit an action or know who is connected: what is done with a verdict is `gathering`'s.
Written a second time, slowly, in tests/closing_rules.py; the tests compare every close and wait.

A round has E expected slots, n of them answered. In this order (rule 6.1 to rule 6.3):

    n >= E and there is something to merge          close, even below quorum: nobody else will come
    soft deadline past and n >= --q-min             close (capacity quorum only, rule 6.6)
    quorum reached                                  wait until grace is over, then close
    quorum deadline past                            relaunch
    otherwise                                       wait

Once quorum is there the quorum deadline has no effect: it asks for a new attempt, which would throw
away a round that is about to succeed.

Quorum is a number of answers (rule 6.4) or a share of capacity (rule 6.5). K is never lowered to
the size of E. It need not be: a round launched to fewer than K closes by the first line, and one
that has lost learners since should wait for them, not pass for full.

Grace (rule 6.7, rule 6.8) is the time that others get once quorum is there. A sync that takes
longer than tau steps of the slowest learner would be late for it, so what is left of tau step times
is shared out: gamma of it is granted, the rest is reserve. It is armed once in an attempt, when
quorum is first seen. Were it armed at every answer, a fleet of n learners could hold a round n
graces long.

An exact fold has no quorum (rule 6.9): its weights are those of the whole roster. A capacity round
may have a soft deadline (rule 6.6), which takes what is there when waiting costs more than it
brings.

--robust (rule 6.14) needs 2F + 1 learners to do without F of them. With fewer nothing could be left
out, and one of two would decide: such a round waits as one below quorum does, whoever has answered.
No quorum is smaller than that: settings with one are refused.

rule 4.4. Launches keep a distance, so that each fragment is merged once in H steps of the slowest
    learner, and all fragments are spread evenly over that time. What is kept is when a launch
    happened, never when the next may: an estimate that was wrong for a moment rules only until the
    next sample, and that of a learner that has gone not at all. The pace is never slower than the
    quorum timeout, in which a round would be given up.
"""

from syncer.core.deadlines cimport NEVER
from syncer.core.rounds.membership cimport slowest_step_time_s
from syncer.core.rounds.policy cimport MILLION, Policy
from syncer.core.rounds.round cimport Round


cdef Verdict verdict_of(Policy policy, Round round, long long now_ns):
    """What to do with a gathering round whose grace has been armed if it was due."""
    return decide_close(
        now_ns, round.answered, len(round.slots), round.mergeable(), round.quorum_ns != NEVER,
        round.grace_deadline_ns, round.quorum_deadline_ns, soft_deadline_of(policy, round))


# rule 6.7
cdef int arm_grace(Policy policy, Round round, long long now_ns, long long sync_ns) except -1:
    """Give the others their time when quorum is first seen in this attempt.

    sync_ns: compute, commit and broadcast of the last commit. xi is the step time of the slowest
    expected member that has an estimate.
    """
    if round.quorum_ns != NEVER or not quorum_reached(policy, round):
        return 0
    return round.arm_grace(now_ns, grace_ns(
        policy.grace_gamma, policy.grace_tau, policy.grace_ns,
        slowest_step_time_s(round.expected_members()),
        (now_ns - round.launch_ns) * 1e-9, sync_ns * 1e-9))


cdef long long time_of_verdict(Policy policy, Round round):
    """When time alone changes the verdict."""
    cdef long long due = round.grace_deadline_ns
    if round.quorum_ns == NEVER:
        due = round.quorum_deadline_ns
    return min(due, soft_deadline_of(policy, round))


# rule 6.4, rule 6.5, rule 6.9
cdef bint quorum_reached(Policy policy, Round round):
    """Have enough answered for the round to close once grace is over?

    An exact fold has no quorum but everybody: it closes when all have answered, or not at all.
    """
    if policy.exact_fold:
        return False
    if policy.quorum_capacity is None:
        return round.answered >= policy.quorum
    return (round.answered >= policy.q_min and
            round.capacity_answered * MILLION >= policy.quorum_capacity * round.capacity_expected)


# rule 6.6
cdef long long soft_deadline_of(Policy policy, Round round):
    """When this round closes with what it has, NEVER if that rule does not apply to it now."""
    if policy.quorum_capacity is None or policy.soft_deadline_ns == 0:
        return NEVER
    if round.answered < policy.q_min:
        return NEVER
    return round.launch_ns + policy.soft_deadline_ns


cdef Py_ssize_t relaunch_needs(Policy policy):
    """Launchable learners without whom a new attempt could not reach quorum."""
    return policy.quorum if policy.quorum_capacity is None else policy.q_min


# rule 6.1, rule 6.2, rule 6.3
cpdef Verdict decide_close(
        long long now_ns, Py_ssize_t answered, Py_ssize_t expected, bint contributed, bint quorum,
        long long grace_deadline_ns, long long quorum_deadline_ns,
        long long soft_deadline_ns=0x7FFFFFFFFFFFFFFF) noexcept:
    """What to do with a gathering round; the order of the tests is the rule.

    answered, expected: slots; contributed: at least one delta would be merged; quorum: reached;
    grace_deadline_ns: NEVER while grace is not armed; soft_deadline_ns: NEVER unless the round may
    close by it.
    """
    if contributed and (answered >= expected or now_ns >= soft_deadline_ns):
        return Verdict.CLOSE
    if quorum:
        return Verdict.CLOSE if now_ns >= grace_deadline_ns else Verdict.WAIT
    if now_ns >= quorum_deadline_ns:
        return Verdict.RELAUNCH
    return Verdict.WAIT


# rule 6.8
cpdef long long grace_ns(
        double gamma, double tau, long long cap_ns, double step_time_s, double since_launch_s,
        double sync_s) noexcept:
    """clamp(gamma * (tau * step_time - since_launch - sync), 0, cap) in ns.

    The time that a fleet of this speed has left before its next sync would be late. step_time_s < 0
    (no estimate): the cap.
    """
    cdef double seconds
    if step_time_s < 0:
        return cap_ns
    seconds = gamma * (tau * step_time_s - since_launch_s - sync_s)
    if not seconds > 0:
        return 0
    if seconds * 1e9 >= <double>cap_ns:
        return cap_ns
    return <long long>(seconds * 1e9 + 0.5)


# rule 4.4
cpdef long long launch_interval_ns(
        long long floor_ns, long long longest_ns, double interval_steps, double step_time_s,
        Py_ssize_t fragments) noexcept:
    """max(floor, min(H * step_time / P, longest)) in ns: once per H steps of the slowest.

    interval_steps = H; the second term only when H > 0 and there is an estimate (step_time_s >= 0).
    """
    cdef double pace_ns
    if interval_steps <= 0 or step_time_s < 0:
        return floor_ns
    pace_ns = interval_steps * step_time_s / <double>fragments * 1e9
    if not pace_ns < <double>longest_ns:
        return max(floor_ns, longest_ns)
    return max(floor_ns, <long long>(pace_ns + 0.5))
