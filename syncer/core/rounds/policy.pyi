from typing import Any

class Policy:
    learners: int
    quorum: int
    pipeline: int
    total_steps: int
    max_base_lag: int
    fixed_roster: bool
    equal_weights: bool
    final_state: bool
    grace_cap_ns: int
    grace_gamma: float
    grace_tau: float
    launch_floor_ns: int
    interval_steps: float
    quorum_timeout_ns: int
    final_ack_timeout_ns: int
    start_learners: int
    start_timeout_ns: int
    capacity_quorum: int | None
    q_min: int
    capacities: dict[int, int]
    soft_deadline_ns: int
    folds: bool
    exact_fold: bool
    late_carry: bool
    carry_answers: bool
    carry_gamma: float
    max_carry_lag: int
    budget_steps: int
    def __init__(self, config: Any, resumed: bool = False) -> None: ...
