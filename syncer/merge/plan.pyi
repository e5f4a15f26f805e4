from collections.abc import Sequence

class Plan:
    threads: int
    numel: int
    tensors: int
    def __init__(self, numels: Sequence[int], threads: int) -> None: ...
    @property
    def shared(self) -> list[int]: ...
    @property
    def whole(self) -> list[tuple[int, int]]: ...
