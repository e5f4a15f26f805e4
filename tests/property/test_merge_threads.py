"""Random layouts, modes, learners and threads against the oracle, bit by bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncer.layout import AVG, RDA, FragmentLayout, Layout
from syncer.merge import FragmentStore
from syncer.merge.finite import NothingFinite
from syncer.merge.plan import Plan
from tests.golden import finite_reference
from tests.golden import merge_reference as reference

THREADS = (1, 2, 3, 8)
# around the block of 16,384 elements, and far below it
NUMEL = st.one_of(st.integers(1, 40), st.integers(16_380, 16_390), st.integers(32_768, 70_000))
WEIGHT = st.one_of(st.just(0.0), st.floats(1e-6, 1e12))


MOMENTUM = 5000  # seed


def gradient(seed: int, kind: str, n: int) -> np.ndarray:
    """Random values; "plain" is nearly orthogonal to the momentum, so HeLoCo rotates it."""
    values = reference.noise(seed, n).astype(np.float64)
    if kind in ("against", "along"):
        values += (-0.4 if kind == "against" else 0.6) * reference.noise(MOMENTUM, n)
    factor = {"tiny": 1e-39, "huge": 1e37, "vast": 1e38, "zero": 0.0}.get(kind, 1.0)
    return (values * factor).astype(np.float32)


KIND = st.sampled_from(["plain", "against", "along", "plain", "tiny", "huge", "vast", "zero"])


@settings(deadline=None, max_examples=25)
@given(numels=st.lists(NUMEL, min_size=1, max_size=6), mode=st.sampled_from([AVG, RDA]),
       options=st.tuples(st.booleans(), st.booleans()), seed=st.integers(0, 999),
       learners=st.lists(st.tuples(WEIGHT, KIND), min_size=1, max_size=5))
def test_every_thread_count_gives_the_bits_of_the_oracle(numels, mode, options, learners, seed):
    heloco, bf16 = options
    n = sum(numels)
    params, momentum = reference.noise(seed + 1000, n), reference.noise(MOMENTUM, n)
    grads = [gradient(seed + i, kind, n) for i, (_, kind) in enumerate(learners)]
    weights = [np.float64(w) for w, _ in learners]
    expected = finite_reference.merge(
        grads, weights, numels, mode, (params, momentum), lr=0.7, mu=0.9,
        heloco=reference.Heloco() if heloco else None, bf16=bf16)
    contributions = [(i, 1, float(w), g)
                     for i, (w, g) in enumerate(zip(weights, grads, strict=True))]
    for threads in THREADS:
        store = FragmentStore(Layout((FragmentLayout(mode, tuple(numels)),)), lr=0.7, momentum=0.9,
                              threads=threads, delta_correction="heloco" if heloco else "none",
                              bf16=bf16)
        store.adopt(0, params, state={"momentum": momentum})
        if expected.params is None:
            with pytest.raises(NothingFinite) as raised:
                store.prepare(0, 1, contributions)
            assert list(raised.value.excluded) == expected.excluded
            continue
        prepared = store.prepare(0, 1, contributions)
        assert list(prepared.excluded) == expected.excluded
        assert prepared.restarted == expected.restarted
        version = store.publish(prepared)
        assert version.params.tobytes() == expected.params.tobytes(), threads
        assert version.momentum.tobytes() == expected.momentum.tobytes(), threads
        offsets = np.cumsum([0, *numels])
        squares = [reference.sumsq(expected.merged[a:b]) for a, b in itertools.pairwise(offsets)]
        assert prepared.gnorm == float(np.sqrt(reference.seq_sum(squares))), threads


@settings(deadline=None, max_examples=60)
@given(numels=st.lists(st.integers(1, 600_000), min_size=1, max_size=40),
       threads=st.integers(1, 32))
def test_a_plan_gives_every_tensor_to_exactly_one_piece(numels, threads):
    plan = Plan(numels, threads)
    taken = list(plan.shared) + [t for first, end in plan.whole for t in range(first, end)]
    assert sorted(taken) == list(range(len(numels)))
    assert 1 <= plan.threads <= threads


def test_the_threads_of_a_plan_really_share():
    assert Plan([1_000_000], 8).shared == [0]
    assert Plan([1_000_000], 8).threads == 8
    many = Plan([1000] * 1000, 4)
    assert many.shared == []
    assert len(many.whole) >= 16
