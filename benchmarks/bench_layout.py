"""`build_layout` for a model of 41,643 tensors, against sorting its names alone.

A mixture-of-experts model has that many; time must stay that of the sort, whatever the bins.
"""

from __future__ import annotations

from time import process_time

import pytest

from syncer.learner.partition import build_layout, layout_fingerprint

TENSORS = 41_643


def expert_model(tensors: int) -> dict[str, int]:
    """Names and sizes like those of a mixture of experts: many layers, many equal sizes."""
    sizes = (2048 * 1408, 2048 * 1408, 1408 * 2048, 2048 * 2048, 2048, 64 * 2048)
    return {
        f"model.layers.{i // 700}.mlp.experts.{i % 700}.w{i % 3}.weight": sizes[i % 6] + i % 97
        for i in range(tensors)
    }


def sorted_only(tensors: dict[str, int]) -> list:
    return sorted(tensors.items(), key=lambda item: (-item[1], item[0]))


def best_of(*calls, runs: int = 7) -> list[float]:
    """Least CPU seconds of each call, in turns: other programs on the machine hardly count."""
    times = [[] for _ in calls]
    for _ in range(runs):
        for call, seconds in zip(calls, times, strict=True):
            start = process_time()
            call()
            seconds.append(process_time() - start)
    return [min(seconds) for seconds in times]


@pytest.mark.parametrize("pattern", ["binpack", "strided"])
def test_large_model(benchmark, pattern):
    model = expert_model(TENSORS)
    reference_s, ours_s = best_of(lambda: sorted_only(model),
                                  lambda: build_layout(model, 32, pattern=pattern))
    layout = benchmark(build_layout, model, 32, pattern=pattern)
    assert len(layout.fragments) == 32
    benchmark.extra_info["ratio_to_sort"] = ours_s / reference_s
    print(f"\n{TENSORS} tensors, {pattern}: {ours_s * 1e3:.0f} ms, sorting them "
          f"{reference_s * 1e3:.0f} ms, ratio {ours_s / reference_s:.1f}")


def test_fingerprint_of_large_model(benchmark):
    layout = build_layout(expert_model(TENSORS), 32)
    assert len(benchmark(layout_fingerprint, layout)) == 32


@pytest.mark.parametrize("pattern", ["binpack", "strided"])
def test_growth(benchmark, pattern):
    """Double the tensors: less than three times the time (n log n is 2.2, rescanning bins is 4)."""
    small, large = expert_model(TENSORS), expert_model(2 * TENSORS)
    benchmark.pedantic(build_layout, (large, 64), {"pattern": pattern}, rounds=1)
    small_s, large_s = best_of(lambda: build_layout(small, 32, pattern=pattern),
                               lambda: build_layout(large, 64, pattern=pattern))
    assert large_s < 3 * small_s, f"{large_s:.3f} s for twice the tensors of {small_s:.3f} s"
    benchmark.extra_info["growth"] = large_s / small_s
