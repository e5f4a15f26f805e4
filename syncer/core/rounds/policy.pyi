from syncer.config import Config

class Policy:
    learners: int
    quorum: int
    pipeline: int
    total_steps: int
    max_base_lag: int
    fixed_roster: bool
    equal_weights: bool
    final_state: bool
    grace_ns: int
    grace_gamma: float
    grace_tau: float
    min_round_interval_ns: int
    sync_interval_steps: float
    quorum_timeout_ns: int
    final_ack_timeout_ns: int
    start_learners: int
    start_timeout_ns: int
    quorum_capacity: int | None
    q_min: int
    learner_capacity: dict[int, int]
    soft_deadline_ns: int
    folds: bool
    exact_fold: bool
    late_carry: bool
    carry_answers_round: bool
    carry_gamma: float
    max_carry_lag: int
    learner_budget_steps: int
    def __init__(self, config: Config, resumed: bool = ...) -> None: ...
