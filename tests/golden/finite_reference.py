"""What a merge goes on without, slow and obvious: the twin of syncer/merge/finite.py.

`merge` takes the outer step of the oracle, and while a result is not finite leaves out the
momentum, if it alone is too much, and then the longest contributions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tests.golden import merge_reference as reference

LARGEST = {bf16: np.uint32(bits).view(np.float32)
           for bf16, bits in ((False, 0x7F7FFFFF), (True, 0x7F7F7FFF))}
"""By `bf16`: the largest finite number, and the largest that bf16 does not round to infinity."""


class Merged(NamedTuple):
    """params, momentum, merged: None if nothing finite is left."""

    params: Any
    momentum: Any
    merged: Any
    excluded: list[tuple[int, int]]
    restarted: bool


def first_bad(arrays, bf16: bool) -> int | None:
    """First element that is not finite in one of them."""
    bad = np.zeros(len(arrays[0]), bool)
    for array in arrays:
        bad |= ~(np.abs(array) <= LARGEST[bf16])
    return int(np.argmax(bad)) if bad.any() else None


def nesterov(params, momentum, merged, lr: float, mu: float):
    """The outer step, whatever comes of it."""
    lr32, mu32 = np.float32(lr), np.float32(mu)
    new = mu32 * momentum + merged
    return params - lr32 * (merged + mu32 * new), new


def merge(grads, weights, numels, mode, before, *, lr: float, mu: float, heloco=None,
          bf16: bool = False) -> Merged:
    """avg or rda with Nesterov; gradients in learner order; before: (params, momentum)."""
    params, momentum = before
    left, excluded, restarted = list(range(len(grads))), [], False
    with np.errstate(all="ignore"):
        while left:
            merged = reference.merge_fragment(
                [grads[i] for i in left], [np.float64(weights[i]) for i in left], numels, mode,
                momentum, heloco)
            found = nesterov(params, momentum, merged, lr, mu)
            element = first_bad([*found, merged], bf16)
            if element is None:
                return Merged(*found, merged, excluded, restarted)
            alone = nesterov(params, momentum, np.zeros_like(merged), lr, mu)
            if not excluded and not restarted and first_bad(alone, bf16) is not None:
                momentum, restarted = np.zeros_like(momentum), True
                continue
            ends = np.cumsum(numels)
            tensor = int(np.searchsorted(ends, element, side="right"))
            part = slice(ends[tensor] - numels[tensor], ends[tensor])
            sizes = [weights[i] * float(reference.norm(grads[i][part])) for i in left]
            if max(sizes) == 0:
                break
            excluded.append((left.pop(int(np.argmax(sizes))), element))
    return Merged(None, None, None, excluded, restarted)
