"""Clipping of long deltas, and means without outliers; must not touch arrays.

Both are off by default. With n the norm of a learner's whole delta (the root of its tensors'
blocked sums of squares, in tensor order):

  clip     limit L: a value, or the median of the round's norms (of an even count, the mean of the
           middle two). Where n > L every element is multiplied by f32(L/n), before the correction.
  trimmed  each element is the mean of the learners' values without the F lowest and
           highest: sorted, added ascending in f64 from +0, divided, rounded once. Weights play no
           part, but a round of weight 0 is still +0.
           On rda fragments of the unit vectors, which give the direction, and of their norms,
           which give its length; a vector of norm 0 has values of 0. Where they cancel to less than
           1e-12, of the gradients as they are. On iso fragments as rda, then flattened.
  median   the same with the largest F that leaves one value, or two.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from syncer.ranges import CLIP_NORM, ROBUST_OR_MEAN
from syncer.values import Median

ClipNorm = float | Median | None
Robust = int | Median | None
"""None: the weighted mean. A number F: the trimmed mean. "median"."""


def checked_clip(clip_norm: ClipNorm) -> ClipNorm:
    """The setting itself. Raises ConfigError for what is neither."""
    if clip_norm is not None:
        CLIP_NORM.check("clip norm", clip_norm)
    return clip_norm


def checked_robust(robust: Robust) -> Robust:
    """The setting itself. Raises ConfigError for what is neither."""
    if robust is not None:
        ROBUST_OR_MEAN.check("robust merge", robust)
    return robust


def clip_factors(clip_norm: float | Median, norms: Sequence[float]) -> list[float]:
    """Factor of each delta, given the norms of all of a round: 1.0 leaves it alone."""
    limit = statistics.median(norms) if clip_norm == "median" else clip_norm
    return [limit / n if n > limit else 1.0 for n in norms]


def least(robust: Robust) -> int:
    """Fewest values among which the rule can do without an outlier."""
    if robust is None:
        return 1
    return 3 if robust == "median" else 2 * robust + 1


def trim(robust: Robust, pushes: int) -> int:
    """Values to drop at each end of `pushes`, or -1 for the weighted mean.

    A round that closes with fewer than 2F + 1 pushes drops as many as leave one.
    """
    if robust is None:
        return -1
    most = (pushes - 1) // 2
    return most if robust == "median" else min(robust, most)
