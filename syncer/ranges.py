"""What more than one room knows about settings: names, ranges, published constants.

The command line refuses with these what the merges would refuse. Must not read or decide anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from syncer.protocol import RUN_NAME, RUN_NAME_RULE
from syncer.values import U32, Choice, Matching, MedianOrNorm, MedianOrTrim, Real, Single, Whole

OuterOptimizer = Literal["nesterov", "delayed-nesterov", "sgd"]
DeltaCorrection = Literal["heloco", "none"]
FoldKind = Literal["batch", "exact", "streaming"]
CheckpointFormat = Literal["safetensors", "yeto-v3"]

OUTER_OPTIMIZER: Choice[OuterOptimizer] = Choice(get_args(OuterOptimizer))
DELTA_CORRECTION: Choice[DeltaCorrection] = Choice(get_args(DeltaCorrection))
FOLD: Choice[FoldKind] = Choice(get_args(FoldKind))
CHECKPOINT_FORMAT: Choice[CheckpointFormat] = Choice(get_args(CheckpointFormat))
RUN = Matching(RUN_NAME, RUN_NAME_RULE)
"""What a run may be called."""


class HelocoConstants(NamedTuple):
    """Constants of the HeLoCo correction (merge/correction.py), the published set by default.

    The order is that of the compiled pass.
    """

    c_ok: float = 0.2
    """A cosine with the momentum from which on a delta is left alone, -1 .. 1."""
    k_s: float = 0.5
    """Strength of shrinking, >= 0."""
    k_d: float = 1.0
    """Strength of rotating, >= 0."""
    beta_max: float = 0.5
    """Most of the opposing part that is taken away, 0 .. 1."""
    kappa: float = 3.0
    """How much a long momentum weakens a correction, >= 0."""
    eps: float = 1e-8
    """Norm below which a vector has no direction, > 0."""


@dataclass(frozen=True, kw_only=True)
class OuterConstants:
    """Constants of the outer step (merge/optimizers.py). lr and momentum are used as f32."""

    lr: float = 0.7
    momentum: float = 0.9
    dn_period: int = 4
    dn_activation: float = 0.0


HELOCO = {
    "c_ok": Real(-1.0, 1.0), "k_s": Real(0.0, 1e9), "k_d": Real(0.0, 1e9),
    "beta_max": Real(0.0, 1.0), "kappa": Real(0.0, 1e9), "eps": Real(1e-300, 1e9),
}
"""By the name of the constant."""

STEP_LR = Single()
STEP_MOMENTUM = Single(below=1.0)
DN_PERIOD = Whole(1, U32)
DN_ACTIVATION = Real(0.0, 1.0)
"""Of delayed Nesterov; `activation_fits` ties them together."""

CLIP_NORM = MedianOrNorm()
ROBUST = MedianOrTrim(1)
ROBUST_OR_MEAN = MedianOrTrim(0)
"""A trimmed mean of F = 0 is the unweighted mean: merges have it, no flag asks for it."""


def activation_fits(activation: float, period: int) -> bool:
    """Whether delayed Nesterov may apply this share of the momentum at each of `period` merges."""
    return activation * period <= 1.0
