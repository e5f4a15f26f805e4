"""What a merge goes on without so that its result is finite; must not merge or publish.

A result is finite if each of its values is a number that is no infinity, also as the session sends
it: where broadcasts are bf16, a parameter that bf16 rounds to infinity is none. Only when a result
is not finite anything here is asked for; then, in this order, until the rest merges:

  the momentum   begins anew at +0, with all optimizer state, if it alone takes a parameter beyond
                 what is finite, whatever is merged: without that no later round could end
  contributions  one at a time: the largest weight times norm in the tensor of the first bad value,
                 clipped, before a correction; of equal ones the first learner

The norm and not the value itself, because a mean direction, a correction and the spectrum carry
what is too large from one element to all of its tensor. Beside parameters of that size a step too
large is at least 1e31 long, so that a learner that trains is never the one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from syncer import kernels
from syncer.errors import NumericsError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Excluded(NamedTuple):
    """A contribution that a merge went on without."""

    position: int
    """Among the contributions, in learner order."""
    element: int
    """First element of the fragment of which a result was not finite with it."""


class NothingFinite(NumericsError):
    """No contribution leaves the merge finite. `excluded`: those that were tried and dropped."""

    def __init__(self, text: str, excluded: Sequence[Excluded] = ()):
        super().__init__(text)
        self.excluded = tuple(excluded)


def worst(gradients: Sequence[NDArray[np.float32]], factors: Sequence[float], first: int,
          end: int) -> int | None:
    """Whose share in the elements [first, end) is largest; None if nobody has any.

    factors: of each gradient, what its norm counts.
    """
    found, most = None, 0.0
    for index, (gradient, factor) in enumerate(zip(gradients, factors, strict=True)):
        part = gradient[first:end]
        size = factor * math.sqrt(kernels.dot(part, part))
        if not math.isfinite(size):
            return index
        if size > most:
            found, most = index, size
    return found
