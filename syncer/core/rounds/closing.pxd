# C surface of the closing rules; every function is a pure function of its arguments.

cpdef enum Verdict:
    WAIT = 0
    CLOSE = 1
    RELAUNCH = 2

cdef long long NEVER                         # a deadline that does not exist

cpdef Verdict decide_close(
    long long now_ns, Py_ssize_t answered, Py_ssize_t expected, bint contributed, bint quorum,
    long long grace_deadline_ns, long long quorum_deadline_ns, long long soft_deadline_ns=*) noexcept

cpdef long long grace_ns(
    double gamma, double tau, long long cap_ns, double step_time_s, double since_launch_s,
    double sync_s) noexcept

cpdef long long launch_interval_ns(
    long long floor_ns, double interval_steps, double step_time_s, Py_ssize_t fragments) noexcept
