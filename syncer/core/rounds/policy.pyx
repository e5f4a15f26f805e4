"""A run's configuration in the units of the round logic, and the two rules that are pure numbers.

Read once from a validated `syncer.config.Config`; must not hold anything that changes in a run. A
field has the name of its flag, so that a search for the flag finds every rule that asks for it:
`--min-round-interval-ms` is `min_round_interval_ns`. All times are ns, because deadlines are
compared and added as 64-bit integers: a float of seconds would close a round a little early or
late, and two machines would not agree. Capacities and the capacity quorum are whole millionths for
the same reason: sums of them are exact in every order.

rule 1.4, how many learners a run waits for. A fresh run waits for all unless `--start-learners`
says less. A resumed one waits for one, so that an island that never came back cannot keep a fleet
down; a fixed roster needs everybody either way, and waiting is what it would do in round 1.

rule 1.9, how long a run is. T is how many merges were asked for. The steps that were added to a
renumbered run (rule 1.8) are none.

rule 5.8, what a push weighs. tokens^2 / steps is the mean tokens per step times the tokens: a
learner counts for how much it has seen, and for how large its batches are.
"""

cdef double LONGEST_NS = 3.2e18                  # about a century: keeps deadlines in 64 bits
cdef int TIMEOUTS_MAX = 16                       # of an attempt whose answers come too late


cdef long long ns_of(double seconds) noexcept:
    return <long long>min(seconds * 1e9, LONGEST_NS)


cdef object millionths(object value):
    """A capacity or a share as a whole number, so that sums and comparisons are exact."""
    return round(value * MILLION)


# rule 1.4
cdef Py_ssize_t start_learners_of(object config, bint resumed):
    if config.start_learners is not None:
        return config.start_learners
    return 1 if resumed and not config.fixed_roster else config.learners


# rule 1.9
cdef long long last_step_of(object config, object resumed):
    """The step that ends the run: so many more as its steps were raised."""
    return config.total_steps + (0 if resumed is None else resumed.renumbered)


cdef class Policy:
    """What the flags of a run mean for its rounds.

    Large: one attribute per flag that a rule reads, and no behaviour.
    """

    def __init__(self, config, resumed=None):
        self.learners = config.learners
        self.quorum = config.quorum
        self.pipeline = config.pipeline
        self.total_steps = last_step_of(config, resumed)
        self.max_base_lag = -1 if config.max_base_lag is None else config.max_base_lag
        self.fixed_roster = config.fixed_roster
        self.equal_weights = config.learner_weight == "equal"
        self.final_state = bool(config.final_state)
        self.grace_ns = ns_of(config.grace_ms / 1e3)
        self.grace_gamma = config.grace_gamma
        self.grace_tau = config.grace_tau
        self.min_round_interval_ns = ns_of(config.min_round_interval_ms / 1e3)
        self.sync_interval_steps = config.sync_interval_steps
        self.quorum_timeout_ns = ns_of(config.quorum_timeout_s)
        self.longest_attempt_ns = ns_of(TIMEOUTS_MAX * <double>config.quorum_timeout_s)
        self.final_ack_timeout_ns = ns_of(config.final_ack_timeout_resolved_s)
        self.linger_ns = ns_of(config.linger_resolved_s)
        self.lingers_until_all_have_it = config.linger_s is None
        self.start_learners = start_learners_of(config, resumed is not None)
        self.start_timeout_ns = ns_of(config.start_timeout_s or 0)
        self.quorum_capacity = (None if config.quorum_capacity is None
                                else millionths(config.quorum_capacity))
        self.q_min = config.q_min
        self.learner_capacity = {learner: millionths(value)
                                 for learner, value in config.learner_capacity}
        self.soft_deadline_ns = ns_of(config.soft_deadline_s or 0)
        self.folds = config.fold != "batch"
        self.exact_fold = config.fold == "exact"
        self.late_carry = config.late_carry
        self.carry_answers_round = self.late_carry and config.carry_answers_round
        self.carry_gamma = config.carry_gamma
        self.max_carry_lag = config.max_carry_lag
        self.nonfinite_limit = config.nonfinite_limit
        self.least_values = config.least_values
        self.learner_budget_steps = config.learner_budget_steps or 0

    # rule 5.8
    cdef double weight(self, object push) except? -1:
        """Raw weight of a push: 1, or tokens^2 / steps in f64, multiply then divide; or 0."""
        cdef double tokens
        if self.equal_weights:
            return 1.0
        if push.c_steps == 0:
            return 0.0
        tokens = push.c_tokens
        return tokens * tokens / <double>push.c_steps

    cdef object capacity_of(self, Py_ssize_t learner):
        """What an answer of this learner counts, in millionths."""
        return self.learner_capacity.get(learner, MILLION)
