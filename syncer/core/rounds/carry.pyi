from typing import Self

from syncer.core.events import Push

class Carried:
    push: Push
    lag: int
    discount: float
    holds: bool

class CarryQueue:
    waiting: dict[int, dict[int, Push]]
    merged: dict[int, list[tuple[int, frozenset[int]]]]
    fragments: int
    def __new__(cls, fragments: int, max_lag: int) -> Self: ...

def version_index(version: int, fragment: int, fragments: int) -> int: ...
