from typing import Self

from syncer.core.events import Push

class Carried:
    push: Push
    lag: int
    discount: float
    holds: bool
    def __new__(cls, push: Push, lag: int, discount: float) -> Self: ...

class CarryQueue:
    waiting: dict[int, dict[int, Push]]
    merged: dict[int, list[tuple[int, frozenset[int]]]]
    fragments: int
    def __new__(cls, fragments: int, max_lag: int) -> Self: ...
