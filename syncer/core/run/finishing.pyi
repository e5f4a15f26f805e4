class FinalCut:
    step: int
    deadline_ns: int
    expected: frozenset[int]
    eligible: set[tuple[int, int]]
    acknowledged: dict[int, tuple[int, int]]
    def __init__(self, step: int, deadline_ns: int, expected: object) -> None: ...
