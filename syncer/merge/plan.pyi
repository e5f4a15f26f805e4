from collections.abc import Sequence
from typing import Self, final

@final
class Plan:
    threads: int
    numel: int
    tensors: int
    def __new__(cls, numels: Sequence[int], threads: int) -> Self: ...
    @property
    def shared(self) -> list[int]: ...
    @property
    def whole(self) -> list[tuple[int, int]]: ...
