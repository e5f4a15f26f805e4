"""Reference of clipping and trimmed means in plain NumPy; must not be made fast or import syncer.

Run:  python -m tests.golden.robust_reference > tests/golden/robust_golden.json
"""

from __future__ import annotations

import itertools
import json
import statistics

import numpy as np

from tests.golden.merge_reference import (
    F32,
    F64,
    G0,
    G1,
    MERGE_AVG,
    MERGE_RDA,
    MOM,
    NUMELS,
    Heloco,
    bits,
    f32,
    merge_fragment,
    norm,
    seq_sum,
    sumsq,
)

G2 = f32([4.0, -3.5, 2.25, 0.5, -6.0, 1.75])
G3 = f32([0.01, 0.2, -0.6, 0.3, 0.2, -0.1])
G4 = f32([-0.0, 0.1, 0.65, -9.0, 0.3, 7.5])
WEIGHTS = [F64(w) for w in (3.0, 1.0, 2.0, 1.0, 0.5)]


def cuts(gradient, numels):
    offsets = np.cumsum([0, *numels])
    return [gradient[a:b] for a, b in itertools.pairwise(offsets)]


def whole_norm(gradient, numels) -> np.float64:
    """Root of the tensors' blocked sums of squares, added in tensor order."""
    return np.sqrt(seq_sum([sumsq(part) for part in cuts(gradient, numels)]))


def clip(grads, numels, limit):
    """Every delta longer than `limit` ("median": of their norms) times f32(limit / norm)."""
    norms = [float(whole_norm(g, numels)) for g in grads]
    if limit == "median":
        limit = statistics.median(norms)
    return [g * F32(F64(limit) / F64(n)) if n > limit else g.copy()
            for g, n in zip(grads, norms, strict=True)]


def robust_rda(grads, drop):
    """rda of one tensor without outliers: the trimmed mean of the unit vectors, as long as the
    trimmed mean of the norms."""
    norms = [norm(g) for g in grads]
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        factors = [F32(F64(1) / n) for n in norms]
    units = [g * k if n != 0 and np.isfinite(k) else np.zeros_like(g)
             for g, k, n in zip(grads, factors, norms, strict=True)]
    direction = trimmed_mean(units, drop)
    length = norm(direction)
    if length < 1e-12:
        return trimmed_mean(grads, drop)
    kept = sorted(norms)[drop:len(norms) - drop]
    return direction * F32(seq_sum(kept) / F64(len(kept)) / length)


def trimmed_mean(grads, drop):
    """Per element: values sorted, `drop` left out at each end, the rest added ascending in f64 from
    +0, divided by their number, rounded to f32 once."""
    ordered = np.sort(np.stack(grads), axis=0)
    kept = ordered[drop:len(grads) - drop].astype(F64)
    total = np.zeros(kept.shape[1], F64)
    for row in kept:
        total = total + row
    return (total / F64(len(kept))).astype(F32)


def robust_fragment(grads, drop, correction):
    """rda of a fragment without outliers: corrected first, then tensor by tensor."""
    entering = [merge_fragment([g], [F64(1)], NUMELS, MERGE_AVG, MOM, correction) for g in grads]
    return robust_directions(entering, drop, NUMELS)


def robust_directions(grads, drop, numels):
    """rda of corrected gradients without outliers, tensor by tensor."""
    tensors = zip(*(cuts(g, numels) for g in grads), strict=True)
    return np.concatenate([robust_rda(list(tensor), drop) for tensor in tensors])


def median(grads):
    return trimmed_mean(grads, (len(grads) - 1) // 2)


def golden() -> dict:
    grads = [G0, G1, G2, G3, G4]
    out = {"g2": bits(G2), "g3": bits(G3), "g4": bits(G4), "weights": [float(w) for w in WEIGHTS],
           "norms": [float(whole_norm(g, NUMELS)).hex() for g in grads]}
    for name, limit in (("median", "median"), ("value", 1.5)):
        clipped = clip(grads, NUMELS, limit)
        for mode_name, mode in (("avg", MERGE_AVG), ("rda", MERGE_RDA)):
            for correction in (None, Heloco()):
                merged = merge_fragment(clipped, WEIGHTS, NUMELS, mode, MOM, correction)
                out[f"clip_{name}_{'heloco_' if correction else ''}{mode_name}"] = bits(merged)
    for drop in (0, 1, 2):
        out[f"trimmed_mean_{drop}"] = bits(trimmed_mean(grads, drop))
    for drop in (0, 1, 2):
        for correction in (None, Heloco()):
            name = f"rda_trimmed_{'heloco_' if correction else ''}{drop}"
            out[name] = bits(robust_fragment(grads, drop, correction))
    out["rda_trimmed_cancelling"] = bits(robust_fragment([G0, -G0, f32(np.zeros(6))], 0, None))
    out["median_of_five"] = bits(median(grads))
    out["median_of_four"] = bits(median(grads[:4]))
    out["median_of_two"] = bits(median(grads[:2]))
    return out


if __name__ == "__main__":
    print(json.dumps(golden(), indent=1))
