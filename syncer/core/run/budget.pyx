"""Who has reported that its step budget is spent.

Pure bookkeeping of a gate that has closed; it never opens again. What closes it and what follows is
`ending`'s (rule 11.1, rule 11.4); must not end a run.

rule 11.3. A learner that is slow but alive is waited for: each sign of progress renews its lease.
    Only a step count within the budget is one, since a learner beyond it has missed the gate and
    would renew for ever. A report ends the lease, and a second one changes nothing.
"""

from syncer.core.deadlines cimport NEVER


cdef class BudgetGate:
    """Reports and progress leases of all learners, from the first report on."""

    def __cinit__(self, Py_ssize_t learners, long long now_ns, long long lease_ns):
        self.lease_ns = lease_ns
        self.leases = dict.fromkeys(range(learners), now_ns + lease_ns)

    # rule 11.3
    cdef int renew(self, object learner, long long now_ns) except -1:
        """A sign of progress from a learner that has not reported yet."""
        if learner in self.leases:
            self.leases[learner] = now_ns + self.lease_ns
        return 0

    cdef int report(self, object learner) except -1:
        """A correct report; a second one changes nothing."""
        self.leases.pop(learner, None)
        return 0

    cdef bint complete(self):
        return not self.leases

    cdef long long deadline_ns(self):
        return min(self.leases.values(), default=NEVER)

    cdef list expired(self, long long now_ns):
        """Learners whose lease is over, ascending."""
        return sorted(learner for learner, due in self.leases.items() if now_ns >= due)
