# Compiled from engine.pyx, where the docstrings are.
from collections.abc import Sequence
from typing import Self, final

from syncer.merge.buffers import Buffer, BufferPool, _Readable
from syncer.merge.plan import Plan
from syncer.merge.stats import Statistics, Turned

STEP_NESTEROV: int
STEP_SGD: int
STEP_DELAYED_HOLD: int
STEP_DELAYED_APPLY: int
STEP_NONE: int
PASSES: tuple[str, ...]
ARRAYS: tuple[str, ...]
FINITE_F32: int
FINITE_BF16: int

@final
class FoldSums:
    def __new__(cls, plan: Plan, pool: BufferPool, directed: bool) -> Self: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def weight_sum(self) -> float: ...

def run(
    plan: Plan,
    *,
    mode: int,
    gradients: Sequence[_Readable],
    weights: Sequence[float],
    params: Buffer,
    state: tuple[Buffer, ...],
    params_out: Buffer,
    state_out: tuple[Buffer, ...],
    outer: int,
    scalars: Sequence[float],
    heloco: Sequence[float] | None = None,
    clip: Sequence[float] | None = None,
    trim: int = -1,
    merged: _Readable | None = None,
    fold: FoldSums | None = None,
    fold_scale: float = 1.0,
    stats: bool = False,
    most: int = ...,
    moved: dict[tuple[str, str], tuple[int, int]] | None = None,
) -> tuple[float, int, Statistics | None]: ...
def add(
    fold: FoldSums,
    gradient: _Readable,
    *,
    factor: float,
    weight: float,
    momentum: Buffer | None = None,
    heloco: Sequence[float] | None = None,
    clip: float = 1.0,
) -> Turned: ...
def norms(plan: Plan, gradients: Sequence[_Readable]) -> list[float]: ...
