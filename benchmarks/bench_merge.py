"""One merge of a fragment, against the same computed with NumPy; must not use private parts.

Every figure is a ratio to a reference timed in interleaved pairs of the same run.
"""

from __future__ import annotations

import os
from time import perf_counter_ns, process_time, process_time_ns

import numpy as np
import pytest

from benchmarks import merge_round, reference
from benchmarks.limits.figure import Figure, in_turns, on
from benchmarks.pairs import ratio
from syncer.config import available_cores
from syncer.layout import AVG, RDA, FragmentLayout, Layout
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


MI = 1 << 20
COPIES = 4
"""In a turn, so that it takes about as long as a round."""
LAYOUTS = {
    "one tensor of 64 Mi": [64 * MI],
    "64 tensors of 1 Mi": [MI] * 64,
}


def share_of_copy(alignment: str | None, mi: int, turns: int = 5) -> Figure:
    """A round of 4 learners on one thread and one core, rda with HeLoCo or with None avg, against
    copying past the cache as many bytes as its passes count, in CPU time."""
    n = mi * MI
    given = merge_round.inputs([n], alignment or "kept")
    call = merge_round.ours([n], given, 1, mode=RDA if alignment else AVG)
    moved = merge_round.bytes_moved([n], alignment)
    copy = reference.copy(4 * n, "past the cache")

    def copies() -> None:
        for _ in range(COPIES):
            copy()

    copied = COPIES * 8 * n
    with on({min(os.sched_getaffinity(0))}):
        found = in_turns(copies, call, moved / 1e9, turns, clock=process_time)
    share = moved / copied
    return found._replace(ratio=found.ratio * share, bound=found.bound / share,
                          bound_cpu=found.bound_cpu * share)


@pytest.mark.timeout(900)  # a slow reference on a busy machine
@pytest.mark.parametrize(("layout", "alignment"), [
    *(("one tensor of 64 Mi", alignment) for alignment in merge_round.ALIGNMENTS),
    ("64 tensors of 1 Mi", "mixed"),
])
@pytest.mark.parametrize("threads", sorted({1, min(2, available_cores())}))
def test_round_against_numpy_and_the_copy_bandwidth(benchmark, layout, alignment, threads):
    """rda + HeLoCo + Nesterov, 4 learners x 64 Mi parameters. One thread in CPU time, two by the
    clock. The bound is the faster of two copies of as many bytes; both are printed."""
    numels = LAYOUTS[layout]
    clock = process_time_ns if threads == 1 else perf_counter_ns
    given = merge_round.inputs(numels, alignment)
    call = merge_round.ours(numels, given, threads)
    numpy_call = merge_round.rounds_of(numels, given, merge_round.NumpyLibrary)
    assert call() == pytest.approx(numpy_call(), rel=1e-5)
    against = ratio(numpy_call, call, rounds=1)
    moved = merge_round.bytes_moved(numels, alignment) / (8 * sum(numels))
    benchmark.pedantic(call, rounds=1)
    report(benchmark, f"round, {layout}, {alignment}, {threads} threads, against NumPy", against)
    for kind in reference.COPIES:
        copying = ratio(reference.copy(4 * sum(numels), kind, threads), call, rounds=5, clock=clock)
        bound_ns = moved * copying.reference_ns
        share = moved * copying.ratio
        benchmark.extra_info[f"share of {kind}"] = share
        print(f"  {share:.2f} of the bound, {kind}: {copying.ours_ns / 1e6:.1f} ms against "
              f"{bound_ns / 1e6:.1f} ms, {copying.ours_ns / sum(numels):.2f} ns per parameter")
    assert against.ratio > 1.0


@pytest.mark.timeout(900)
@pytest.mark.parametrize("alignment", list(merge_round.ALIGNMENTS))
def test_round_against_torch(benchmark, alignment):
    """The same against torch on as many threads; needs torch."""
    torch = pytest.importorskip("torch")
    numels, threads = LAYOUTS["one tensor of 64 Mi"], min(2, available_cores())
    params, momentum, weights, gradients = given = merge_round.inputs(numels, alignment)
    call = merge_round.ours(numels, given, threads)
    torch.set_num_threads(threads)
    in_torch = (torch.from_numpy(params), torch.from_numpy(momentum), weights,
                [torch.from_numpy(g) for g in gradients])
    torch_call = merge_round.rounds_of(numels, in_torch, merge_round.TorchLibrary)
    assert call() == pytest.approx(torch_call(), rel=1e-5)
    against = ratio(torch_call, call, rounds=2)
    benchmark.pedantic(call, rounds=1)
    report(benchmark, f"round, {alignment}, {threads} threads, against torch", against)
    assert against.ratio > 1.0


def per_parameter_ns(mi: int, learners: int) -> float:
    """Best of a few runs of avg and Nesterov on one thread, per parameter."""
    params, momentum, weights, gradients = merge_round.inputs([mi * MI], "kept", learners)
    store = FragmentStore(Layout((FragmentLayout(AVG, (mi * MI,)),)), lr=LR, momentum=MU)
    store.adopt(0, params, state={"momentum": momentum})
    contributions = [(i, 1, w, g) for i, (w, g) in enumerate(zip(weights, gradients, strict=True))]
    times = []
    for _ in range(5):
        start = perf_counter_ns()
        store.discard(store.prepare(0, 1, contributions))
        times.append(perf_counter_ns() - start)
    return min(times[1:]) / (mi * MI)


def test_cost_is_linear_in_parameters_and_learners(benchmark):
    """1 to 64 Mi parameters with 4 learners, and 1 to 32 learners with 4 Mi: printed."""
    sizes = {mi: per_parameter_ns(mi, 4) for mi in (1, 4, 16, 64)}
    learners = {m: per_parameter_ns(4, m) for m in (1, 2, 8, 32)}
    benchmark.pedantic(lambda: None, rounds=1)
    print("\nns per parameter, 4 learners:", {k: round(v, 3) for k, v in sizes.items()})
    print("ns per parameter, 4 Mi, by learners:", {k: round(v, 3) for k, v in learners.items()})
    benchmark.extra_info.update(sizes=sizes, learners=learners)
