from typing import Self

class BudgetGate:
    leases: dict[int, int]
    def __new__(cls, learners: int, now_ns: int, lease_ns: int) -> Self: ...
