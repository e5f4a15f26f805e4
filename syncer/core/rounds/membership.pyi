from typing import Self

class Member:
    learner: int
    generation: int
    key: tuple[int, int]
    connected: bool
    held: bool
    delivered: tuple[int, ...] | None
    step_time_s: float
    def __new__(cls, learner: int, generation: int) -> Self: ...
    def observe(self, now_ns: int, local_step: int) -> None: ...

class Membership:
    members: dict[tuple[int, int], Member]
    current: list[Member | None]
    newest: list[int]
    current_count: int
    launchable_count: int
    def __new__(cls, learners: int) -> Self: ...
