# C surface of the closing rules: what to do with a gathering round now.
from syncer.core.rounds.policy cimport Policy
from syncer.core.rounds.round cimport Round

cpdef enum Verdict:
    WAIT = 0
    CLOSE = 1
    RELAUNCH = 2

cdef Verdict verdict_of(Policy policy, Round round, long long now_ns)
cdef int arm_grace(Policy policy, Round round, long long now_ns, long long sync_ns) except -1
cdef long long time_of_verdict(Policy policy, Round round)
cdef bint quorum_reached(Policy policy, Round round)
cdef Py_ssize_t relaunch_needs(Policy policy)

cpdef Verdict decide_close(
    long long now_ns, Py_ssize_t answered, Py_ssize_t expected, bint contributed, bint quorum,
    long long grace_deadline_ns, long long quorum_deadline_ns,
    long long soft_deadline_ns=*) noexcept

cpdef long long grace_ns(
    double gamma, double tau, long long cap_ns, double step_time_s, double since_launch_s,
    double sync_s) noexcept

cpdef long long launch_interval_ns(
    long long floor_ns, long long longest_ns, double interval_steps, double step_time_s,
    Py_ssize_t fragments) noexcept
