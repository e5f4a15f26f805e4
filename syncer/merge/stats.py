"""Numbers that explain a merge, from sums its passes compute; must not influence a result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

Turned = tuple[int, int, int]
"""Elements that the correction kept, shrunk and rotated."""
LearnerSums = tuple[float, float | None, float, Turned]
"""d.d, d.merged, d.m, and what the correction did."""
Statistics = tuple[list[LearnerSums], list[float]]
"""Per learner, and m.m, m.merged, step.step."""


class LearnerStats(NamedTuple):
    """One learner's delta, as received. A cosine is None where a vector is zero or absent."""

    learner: int
    generation: int
    norm: float
    """Of its outer gradient."""
    cos_merged: float | None
    """With the merged gradient; None under a fold, where the delta is gone by then."""
    cos_momentum: float | None
    """With the momentum before the step."""
    kept: float
    """Shares of its elements that the HeLoCo correction left alone, rotated or shrunk; all three
    are 0 without a correction."""
    rotated: float
    shrunk: float


class MergeStats(NamedTuple):
    """One merge."""

    learners: tuple[LearnerStats, ...]
    merged_ratio: float | None
    """Norm of the merged gradient over the mean norm of the deltas: 1 where all agree."""
    step_norm: float
    """Norm of what the outer step added to the parameters."""
    gain: float | None
    """Step along the merged gradient over lr times the gradient, 1 + mu + mu^2 <b,g>/|g|^2 with b
    the momentum before the step; for nesterov."""

    def record(self) -> dict[str, Any]:
        """As JSON-ready values, for the event tape."""
        return {"learners": [learner._asdict() for learner in self.learners],
                "merged_ratio": self.merged_ratio, "step_norm": self.step_norm,
                "gain": self.gain}


def cosine(dot: float | None, xx: float, yy: float) -> float | None:
    """Of two vectors, from x.y (None: not known), x.x and y.y."""
    size = math.sqrt(xx) * math.sqrt(yy)
    return dot / size if dot is not None and size > 0.0 else None


def explain(sums: Statistics, members: Sequence[tuple[int, int]], gnorm: float, numel: int,
            momentum: float | None) -> MergeStats:
    """The numbers of a merge. momentum: mu of nesterov, or None for another optimizer."""
    per_learner, (mm, along, step) = sums
    gg = gnorm * gnorm
    learners = tuple(
        LearnerStats(*member, math.sqrt(dd), cosine(dg, dd, gg), cosine(dm, dd, mm),
                     kept / numel, rotated / numel, shrunk / numel)
        for member, (dd, dg, dm, (kept, shrunk, rotated)) in zip(members, per_learner, strict=True))
    mean = math.fsum(learner.norm for learner in learners) / len(learners) if learners else 0.0
    gain = None
    if momentum is not None and gg > 0.0:
        gain = 1.0 + momentum + momentum * momentum * along / gg
    return MergeStats(learners, gnorm / mean if mean > 0.0 else None, math.sqrt(step), gain)
