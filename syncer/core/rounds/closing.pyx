"""When a round closes, how long grace is, how far apart launches are: rounds.md 3 and 5 as formulas.

Pure functions of their arguments; must not keep state.
"""

NEVER = 0x7FFFFFFFFFFFFFFF


cpdef Verdict decide_close(
    long long now_ns, Py_ssize_t answered, Py_ssize_t expected, bint contributed, bint quorum,
    long long grace_deadline_ns, long long quorum_deadline_ns,
    long long soft_deadline_ns=0x7FFFFFFFFFFFFFFF) noexcept:
    """What to do with a gathering round.

    answered, expected: slots; contributed: at least one delta would be merged; quorum: reached;
    grace_deadline_ns: NEVER while grace is not armed; soft_deadline_ns: NEVER unless the round may
    close by it. The order of the tests is the rule: a full round closes even below quorum, and once
    quorum is there the quorum deadline has no effect.
    """
    if contributed and (answered >= expected or now_ns >= soft_deadline_ns):
        return Verdict.CLOSE
    if quorum:
        return Verdict.CLOSE if now_ns >= grace_deadline_ns else Verdict.WAIT
    if now_ns >= quorum_deadline_ns:
        return Verdict.RELAUNCH
    return Verdict.WAIT


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


cpdef long long launch_interval_ns(
    long long floor_ns, double interval_steps, double step_time_s, Py_ssize_t fragments) noexcept:
    """max(floor, H * step_time / P) in ns: each fragment is synced once per H steps of the slowest.

    interval_steps = H; the second term only when H > 0 and there is an estimate (step_time_s >= 0).
    At most a century, so that an absurd estimate cannot overflow a deadline.
    """
    cdef double pace_ns
    if interval_steps <= 0 or step_time_s < 0:
        return floor_ns
    pace_ns = interval_steps * step_time_s / <double>fragments * 1e9
    if not pace_ns < 3.2e18:
        pace_ns = 3.2e18
    return max(floor_ns, <long long>(pace_ns + 0.5))
