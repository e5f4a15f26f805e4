from collections.abc import Buffer as _Readable
from collections.abc import Sequence

from syncer.merge.buffers import Buffer

STEP_NESTEROV: int
STEP_SGD: int
STEP_DELAYED_HOLD: int
STEP_DELAYED_APPLY: int
STEP_NONE: int

class Plan:
    threads: int
    numel: int
    tensors: int
    def __init__(self, numels: Sequence[int], threads: int) -> None: ...
    @property
    def shared(self) -> list[int]: ...
    @property
    def whole(self) -> list[tuple[int, int]]: ...

def run(
    plan: Plan,
    *,
    mode: int,
    gradients: list[_Readable],
    weights: list[float],
    params: Buffer,
    state: tuple[Buffer, ...],
    params_out: Buffer,
    state_out: tuple[Buffer, ...],
    outer: int,
    scalars: tuple[float, float, float, float],
    heloco: tuple[float, float, float, float, float, float] | None = None,
    merged: _Readable | None = None,
) -> tuple[float, int]: ...
