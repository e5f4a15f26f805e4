"""One merge of a fragment, against the same computed with NumPy; must not use private parts.

Every figure is a ratio to a reference timed in interleaved pairs of the same run.
"""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.pairs import ratio
from syncer.config import available_cores
from syncer.core.layout import AVG, FragmentLayout, Layout
from syncer.merge import FragmentStore

F32 = np.float32
LEARNERS = 4
LR, MU = F32(0.7), F32(0.9)
WEIGHTS = [1.0, 2.0, 3.0, 4.0]


def arrays(count: int, n: int) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.standard_normal(n, dtype=F32) for _ in range(count)]


def merge_of(mode: int, numels, *, threads: int, **options):
    """A call that merges and throws the result away, and the store's inputs."""
    n = sum(numels)
    params, momentum, *gradients = arrays(2 + LEARNERS, n)
    store = FragmentStore(Layout((FragmentLayout(mode, tuple(numels)),)), lr=LR, momentum=MU,
                          threads=threads, **options)
    store.adopt(0, params, state={"momentum": momentum})
    contributions = [(i, 1, w, g) for i, (w, g) in enumerate(zip(WEIGHTS, gradients, strict=True))]

    def call():
        prepared = store.prepare(0, 1, contributions)
        store.discard(prepared)
        return prepared.gnorm

    return call, params, momentum, gradients


def numpy_avg_nesterov(params, momentum, gradients):
    """Average, Nesterov, norm and finiteness, as one would write it with NumPy."""
    total = sum(WEIGHTS)
    g = sum(F32(w / total) * x for w, x in zip(WEIGHTS, gradients, strict=True))
    b = MU * momentum + g
    p = params - LR * (g + MU * b)
    if not (np.isfinite(p).all() and np.isfinite(b).all()):
        raise FloatingPointError
    return float(np.linalg.norm(g))


def report(benchmark, name: str, pair) -> None:
    benchmark.extra_info["ratio"] = pair.ratio
    print(f"\n{name}: {pair.ours_ns / 1e6:.2f} ms, reference {pair.reference_ns / 1e6:.2f} ms, "
          f"{pair.ratio:.2f} times as fast")


@pytest.mark.parametrize("threads", sorted({1, available_cores()}))
@pytest.mark.parametrize("shape", ["one tensor", "many tensors"])
def test_avg_and_nesterov_against_the_numpy_expression(benchmark, shape, threads):
    """4 learners, 4 Mi parameters in one tensor or in 4,096."""
    numels = [1 << 22] if shape == "one tensor" else [1 << 10] * (1 << 12)
    call, *inputs = merge_of(AVG, numels, threads=threads)
    pair = ratio(lambda: numpy_avg_nesterov(*inputs), call)
    benchmark.pedantic(call, rounds=3)
    report(benchmark, f"avg + Nesterov, {shape}, {threads} threads, against NumPy", pair)
    assert pair.ratio > 1.0


def test_many_small_tensors_cost_no_python(benchmark):
    """A 32nd of a model of 41,643 tensors, against the same elements as one tensor."""
    tensors = 41_643 // 32
    call, *_ = merge_of(AVG, [256] * tensors, threads=1)
    single, *_ = merge_of(AVG, [256 * tensors], threads=1)
    pair = ratio(single, call)
    benchmark.pedantic(call, rounds=3)
    report(benchmark, f"{tensors} tensors of 256, against one tensor", pair)
    assert pair.ratio > 0.2
