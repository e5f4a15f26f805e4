from collections.abc import Iterable
from typing import Self

class FinalCut:
    step: int
    deadline_ns: int
    expected: frozenset[int]
    eligible: set[tuple[int, int]]
    acknowledged: dict[int, tuple[int, int]]
    def __new__(cls, step: int, deadline_ns: int, expected: Iterable[int]) -> Self: ...
