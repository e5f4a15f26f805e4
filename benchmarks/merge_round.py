"""One round written three ways (this package, NumPy, torch), and the bytes that it moves.

Must not time anything. rda with HeLoCo and Nesterov, per tensor, the way one would write it with
vectorised expressions: in f64 where the numerics ask for it, but with the library's own dot
products instead of the blocked sum.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from syncer import pages
from syncer.layout import AVG, RDA, FragmentLayout, Layout
from syncer.merge import FragmentStore, HelocoConstants, engine
from syncer.merge.buffers import BufferPool
from syncer.merge.plan import Plan

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
    """params, momentum, weights and gradients: noise that leans on the momentum as asked. They lie
    in memory of the kind that a server decodes pushes into."""
    rng, n = np.random.default_rng(1), sum(numels)

    def noise() -> np.ndarray:
        return rng.standard_normal(n, dtype=F32, out=in_pool(n))

    params, momentum = noise(), noise()
    lean = ALIGNMENTS[alignment]
    gradients = []
    for i in range(learners):
        gradient = noise()
        gradient += F32(lean[i % len(lean)]) * momentum
        gradients.append(gradient)
    return params, momentum, [1.0 + i for i in range(learners)], gradients


def in_pool(n: int) -> np.ndarray:
    return np.frombuffer(memoryview(BufferPool().take(n)), F32)


def ours(numels, given, threads: int, mode: int = RDA):
    """A call that merges what `inputs` gave and throws the result away; returns gnorm."""
    params, momentum, weights, gradients = given
    pages.keep_at_most(16 * sum(numels))  # for the next call, as a server keeps what it writes
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


# ---------------------------------------------------------------------------- bytes that are moved


class Round(NamedTuple):
    """A kind of merge of the table, and the share of a copy past the cache that was measured for it
    (docs/merge.md says when and where), if it was."""

    name: str
    mode: int
    alignment: str
    heloco: bool
    fold: bool = False
    share: float | None = None


ROUNDS = (
    Round("avg", AVG, "kept", heloco=False, share=0.94),
    Round("avg, HeLoCo keeps all", AVG, "kept", heloco=True),
    Round("rda", RDA, "kept", heloco=False),
    Round("rda, kept", RDA, "kept", heloco=True, share=0.84),
    Round("rda, mixed", RDA, "mixed", heloco=True, share=0.81),
    Round("rda, turned", RDA, "turned", heloco=True, share=0.75),
    Round("close of a fold, avg", AVG, "kept", heloco=False, fold=True),
    Round("close of a fold, rda", RDA, "kept", heloco=False, fold=True),
)

Moved = dict[tuple[str, str], tuple[float, float]]
"""(pass, kind of array) -> bytes read and written per parameter."""


def moved(kind: Round, learners: int = 4, n: int = 4 * 16_384) -> Moved:
    """What one round moves per parameter, as its passes counted it in a run; nesterov."""
    params, momentum, weights, gradients = inputs([n], kind.alignment, learners)
    plan, pool, found = Plan([n], 1), BufferPool(), {}
    given = {"gradients": gradients, "weights": weights}
    if kind.fold:
        fold = engine.FoldSums(plan, pool, kind.mode == RDA)
        for gradient in gradients:
            engine.add(fold, gradient, factor=1.0, weight=1.0)
        given = {"gradients": (), "weights": (), "fold": fold, "fold_scale": 1 / learners}
    engine.run(plan, mode=kind.mode, params=pool.adopt(params), state=(pool.adopt(momentum),),
               params_out=pool.take(n), state_out=(pool.take(n),), outer=engine.STEP_NESTEROV,
               scalars=(LR, MU, 1.0, 0.0), heloco=tuple(C) if kind.heloco else None, moved=found,
               **given)
    return {key: (read / n, written / n) for key, (read, written) in found.items()}


def bytes_moved(numels, alignment: str | None, learners: int = 4) -> int:
    """Bytes that a round reads and writes: rda with HeLoCo, or with None avg."""
    kind = Round("", RDA if alignment else AVG, alignment or "kept", heloco=bool(alignment))
    return round(sum(map(sum, moved(kind, learners).values())) * sum(numels))


def times_table() -> str:
    """How often each byte is read and written, for docs/merge.md."""
    learners, lines = 4, [
        "| round of 4 learners, nesterov | a gradient | momentum | parameters | sum | result | "
        "new momentum | bytes a parameter | share of a copy |", "|---" * 9 + "|"]
    for kind in ROUNDS:
        counts = moved(kind, learners)
        cells = []
        for array in engine.ARRAYS:
            each = [sum(way) / 4 / (learners if array == "gradients" else 1) for way in zip(
                *(both for (_, kind_of), both in counts.items() if kind_of == array), strict=True)]
            cells.append(", ".join(f"{verb} {times:g} ×" for verb, times in zip(
                ("read", "written"), each, strict=False) if times))
        total = sum(map(sum, counts.values()))
        share = f"{kind.share:.2f}" if kind.share else ""
        lines.append(f"| {kind.name} | {' | '.join(cells)} | {total:g} | {share} |")
    return "\n".join(lines) + "\n"


def passes_table() -> str:
    """Bytes per parameter that each pass moves, for docs/merge.md."""
    lines = [f"| bytes read + written | {' | '.join(engine.PASSES)} |",
             "|---|" + "---|" * len(engine.PASSES)]
    for kind in ROUNDS:
        counts, cells = moved(kind), []
        for name in engine.PASSES:
            ways = [both for (its, _), both in counts.items() if its == name]
            read, written = (sum(way) for way in zip(*ways, strict=True)) if ways else (0, 0)
            cells.append(f"{read:g}" + (f" + {written:g}" if written else "") if read else "")
        lines.append(f"| {kind.name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
