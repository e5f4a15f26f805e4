"""One round written three ways (this package, NumPy, torch), and the bytes it must move.

Must not time anything. rda with HeLoCo and Nesterov, per tensor, the way one would write it with
vectorised expressions: in f64 where the numerics ask for it, but with the library's own dot
products instead of the blocked sum.
"""

from __future__ import annotations

import numpy as np

from syncer.layout import AVG, RDA, FragmentLayout, Layout
from syncer.merge import FragmentStore, HelocoConstants

F32 = np.float32
LR, MU = 0.7, 0.9
C = HelocoConstants()
ALIGNMENTS = {
    # share of the momentum in each learner's delta: what HeLoCo then does with it
    "kept": (1.0, 1.0, 1.0, 1.0),
    "mixed": (1.0, 0.1, -0.3, 1.0),
    "turned": (0.1, -0.3, 0.1, -0.3),
}


def inputs(numels, alignment: str, learners: int = 4):
    """params, momentum, weights and gradients: noise that leans on the momentum as asked."""
    rng, n = np.random.default_rng(1), sum(numels)
    params, momentum = (rng.standard_normal(n, dtype=F32) for _ in range(2))
    lean = ALIGNMENTS[alignment]
    gradients = []
    for i in range(learners):
        gradient = rng.standard_normal(n, dtype=F32)
        gradient += F32(lean[i % len(lean)]) * momentum
        gradients.append(gradient)
    return params, momentum, [1.0 + i for i in range(learners)], gradients


def ours(numels, given, threads: int, mode: int = RDA):
    """A call that merges what `inputs` gave and throws the result away; returns gnorm."""
    params, momentum, weights, gradients = given
    store = FragmentStore(Layout((FragmentLayout(mode, tuple(numels)),)), lr=LR, momentum=MU,
                          threads=threads, delta_correction="none" if mode == AVG else "heloco")
    store.adopt(0, params, state={"momentum": momentum})
    contributions = [(i, 1, w, g) for i, (w, g) in enumerate(zip(weights, gradients, strict=True))]

    def call() -> float:
        prepared = store.prepare(0, 1, contributions)
        store.discard(prepared)
        return prepared.gnorm

    return call


def correct(d, m, wide_m, dm, lib):
    """(corrected gradient, its norm), for arrays of either library; sums and rotation in f64."""
    wide_d = lib.wide(d)
    du = lib.norm(wide_d)
    if du < C.eps or dm < C.eps or (c := lib.dot(wide_d, wide_m) / (du * dm)) >= C.c_ok:
        return d, du
    conf = du / (du + C.kappa * dm + C.eps)
    if c < 0.0:
        beta = min(C.k_s * -c * conf, C.beta_max)
        d = d + float(-beta * c * du / dm) * m
    else:
        turn = min(C.k_d * (1.0 - c) * conf, 1.0)
        t = float((1.0 - turn) / du) * wide_d + float(turn / dm) * wide_m
        d = lib.narrow(t) * float(du / max(lib.norm(t), C.eps))
    return d, lib.norm(lib.wide(d))


def rounds_of(numels, given, lib):
    """A call that computes the round of `given` (arrays of `lib`); returns gnorm."""
    params, momentum, weights, gradients = given
    total = sum(weights)

    def tensor(cut):
        m = momentum[cut]
        wide_m = lib.wide(m)
        dm = lib.norm(wide_m)
        direction, radial = 0.0, 0.0
        for w, g in zip(weights, gradients, strict=True):
            d, length = correct(g[cut], m, wide_m, dm, lib)
            radial += length * w / total
            if length > 0.0:
                direction = direction + float(w / total / length) * d
        merged = direction * float(radial / lib.norm(lib.wide(direction)))
        b = MU * m + merged
        p = params[cut] - LR * (merged + MU * b)
        if not (lib.finite(b) and lib.finite(p)):
            raise FloatingPointError
        return p, b, lib.norm(lib.wide(merged)) ** 2

    def call() -> float:
        offset, square, results = 0, 0.0, []
        for n in numels:
            *result, part = tensor(slice(offset, offset + n))
            results.append(result)
            offset, square = offset + n, square + part
        return square ** 0.5

    return call


class NumpyLibrary:
    """What a round needs of NumPy; its dot products run on the threads of its BLAS."""

    @staticmethod
    def wide(x):
        return x.astype(np.float64)

    @staticmethod
    def narrow(x):
        return x.astype(F32)

    @staticmethod
    def norm(x) -> float:
        return float(np.linalg.norm(x))

    @staticmethod
    def dot(x, y) -> float:
        return float(np.dot(x, y))

    @staticmethod
    def finite(x) -> bool:
        return bool(np.isfinite(x).all())


class TorchLibrary:
    """What a round needs of torch (CPU)."""

    @staticmethod
    def wide(x):
        return x.double()

    @staticmethod
    def narrow(x):
        return x.float()

    @staticmethod
    def norm(x) -> float:
        return float(x.norm())

    @staticmethod
    def dot(x, y) -> float:
        return float(x.dot(y))

    @staticmethod
    def finite(x) -> bool:
        return bool(x.isfinite().all())


def bytes_moved(numels, alignment: str | None, learners: int = 4, cache_bytes: int = 0) -> int:
    """Bytes a round must read and write, with every tensor's own passes counted.

    A tensor whose gradients, momentum and result fit in `cache_bytes` is read once. Each larger one
    is read once per pass that its corrections need (see csrc/merge_fragment.c). Without an
    alignment those of avg, which is one pass.
    """
    step = 4 + 4 + 8  # momentum and params in, both out
    once = 4 * learners + step
    if alignment is None:
        return sum(numels) * once
    lean = [ALIGNMENTS[alignment][i % len(ALIGNMENTS[alignment])] for i in range(learners)]
    rotated, shrunk = sum(x == 0.1 for x in lean), sum(x < 0 for x in lean)
    measure = 4 * learners + 4
    rotate = 4 * rotated + 4 if rotated else 0
    again = 4 * (rotated + shrunk) + 4 if rotated or shrunk else 0
    direction = 4 * learners + (4 if rotated or shrunk else 0) + 4
    passes = measure + rotate + again + direction + 4 + step
    return sum(n * (once if n * (once - 8) <= cache_bytes else passes) for n in numels)
