"""A run's configuration in the units of the round logic, and the rules that are pure arithmetic.

Read once from a validated `syncer.config.Config`.
Must not hold anything that changes during a run.
"""

from syncer.core.rounds.closing cimport NEVER
from syncer.core.rounds.round cimport Round

cdef double LONGEST_NS = 3.2e18                  # about a century: keeps deadlines in 64 bits
cdef object MILLION = 1_000_000


cdef long long ns_of(double seconds) noexcept:
    return <long long>min(seconds * 1e9, LONGEST_NS)


cdef object millionths(object value):
    """A capacity or a share as a whole number, so that sums and comparisons are exact."""
    return round(value * MILLION)


cdef class Policy:
    """What the flags of a run mean for its rounds."""

    def __init__(self, config, bint resumed=False):
        self.learners = config.learners
        self.quorum = config.quorum
        self.pipeline = config.pipeline
        self.total_steps = config.total_steps
        self.max_base_lag = -1 if config.max_base_lag is None else config.max_base_lag
        self.fixed_roster = config.fixed_roster
        self.equal_weights = config.learner_weight == "equal"
        self.final_state = bool(config.final_state)
        self.grace_cap_ns = ns_of(config.grace_ms / 1e3)
        self.grace_gamma = config.grace_gamma
        self.grace_tau = config.grace_tau
        self.launch_floor_ns = ns_of(config.min_round_interval_ms / 1e3)
        self.interval_steps = config.sync_interval_steps
        self.quorum_timeout_ns = ns_of(config.quorum_timeout_s)
        self.final_ack_timeout_ns = ns_of(config.final_ack_timeout_resolved_s)
        self.start_learners = (
            config.start_learners if config.start_learners is not None
            else 1 if resumed and not self.fixed_roster else self.learners)
        self.start_timeout_ns = ns_of(config.start_timeout_s or 0)
        self.capacity_quorum = (None if config.quorum_capacity is None
                                else millionths(config.quorum_capacity))
        self.q_min = config.q_min
        self.capacities = {learner: millionths(value) for learner, value in config.learner_capacity}
        self.soft_deadline_ns = ns_of(config.soft_deadline_s or 0)
        self.folds = config.fold != "batch"
        self.exact_fold = config.fold == "exact"
        self.late_carry = config.late_carry
        self.carry_answers = self.late_carry and config.carry_answers_round
        self.carry_gamma = config.carry_gamma
        self.max_carry_lag = config.max_carry_lag
        self.budget_steps = config.learner_budget_steps or 0

    cdef double weight(self, object push) except? -1:
        """Raw weight of a push: 1, or tokens^2 / steps in f64, multiply then divide; 0 without steps."""
        cdef double tokens
        if self.equal_weights:
            return 1.0
        if push.c_steps == 0:
            return 0.0
        tokens = push.c_tokens
        return tokens * tokens / <double>push.c_steps

    cdef object capacity_of(self, Py_ssize_t learner):
        return self.capacities.get(learner, MILLION)

    cdef bint quorum_reached(self, Round round):
        """Have enough answered for the round to close once grace is over?

        An exact fold has no quorum but everybody: it closes when all have answered, or not at all.
        """
        if self.exact_fold:
            return False
        if self.capacity_quorum is None:
            return round.answered >= self.quorum
        return (round.answered >= self.q_min and
                round.capacity_answered * MILLION >= self.capacity_quorum * round.capacity_expected)

    cdef long long soft_deadline_of(self, Round round):
        """When this round closes with what it has, NEVER if that rule does not apply to it now."""
        if self.capacity_quorum is None or self.soft_deadline_ns == 0:
            return NEVER
        if round.answered < self.q_min:
            return NEVER
        return round.launch_ns + self.soft_deadline_ns

    cdef Py_ssize_t relaunch_needs(self):
        """Launchable learners without whom a new attempt could not reach quorum."""
        return self.quorum if self.capacity_quorum is None else self.q_min
