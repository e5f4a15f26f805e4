"""Folds, clipping and robust merges over random inputs against plain NumPy and the batch merge."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncer.layout import AVG, RDA, FragmentLayout, Layout
from syncer.merge import FragmentStore
from tests.golden import merge_reference as reference
from tests.golden import robust_reference

F32, F64 = np.float32, np.float64
NUMELS = st.lists(st.one_of(st.integers(1, 40), st.integers(16_380, 33_000)), min_size=1,
                  max_size=4)
MODE = st.sampled_from([AVG, RDA])
THREADS = (1, 2, 3, 8)


def store_of(mode, numels, threads=1, **options) -> FragmentStore:
    n = sum(numels)
    store = FragmentStore(Layout((FragmentLayout(mode, tuple(numels)),)), lr=0.7, momentum=0.9,
                          threads=threads, **options)
    store.adopt(0, reference.noise(90, n), state={"momentum": reference.noise(91, n)})
    return store


def gradients(learners: int, numels, seed: int) -> list[np.ndarray]:
    n = sum(numels)
    lean = [0.0, 0.5, -0.5, 0.2]
    return [reference.noise(seed + i, n) + F32(lean[i % 4]) * reference.noise(91, n)
            for i in range(learners)]


def bits(store, prepared) -> bytes:
    version = store.publish(prepared)
    return version.params.tobytes() + version.momentum.tobytes() + F64(prepared.gnorm).tobytes()


def streamed(mode, numels, pushes, heloco: bool) -> np.ndarray:
    """The streaming fold in plain NumPy: the merged gradient. pushes: (weight, gradient)."""
    parts, momentum = [], reference.noise(91, sum(numels))
    for a, b in itertools.pairwise(np.cumsum([0, *numels])):
        total, direction = np.zeros(b - a, F32), np.zeros(b - a, F32)
        weights, radial = F64(0), F64(0)
        for w, whole in pushes:
            g = whole[a:b]
            if heloco:
                g = reference.heloco_correct(g, momentum[a:b])[0]
            total = total + F32(w) * g
            size = reference.norm(g)
            if size != 0.0:
                direction = direction + F32(F64(w) / size) * g
            radial, weights = radial + size * F64(w), weights + F64(w)
        length = reference.norm(direction)
        if weights <= 0.0:
            parts.append(np.zeros(b - a, F32))
        elif mode == RDA and not length < 1e-12:
            parts.append(direction * F32((radial / weights) / length))
        else:
            parts.append(total * F32(1.0 / weights))
    return np.concatenate(parts)


@settings(deadline=None, max_examples=20)
@given(numels=NUMELS, mode=MODE, learners=st.integers(1, 5), seed=st.integers(0, 99),
       random=st.randoms(use_true_random=False))
def test_an_exact_fold_has_the_bits_of_the_batch_in_every_order(numels, mode, learners, seed,
                                                                random):
    grads = gradients(learners, numels, seed)
    batch = store_of(mode, numels)
    expected = bits(batch, batch.prepare(0, 1, [(i, 1, 1.0, g) for i, g in enumerate(grads)]))
    for threads in THREADS:
        order = list(range(learners))
        random.shuffle(order)
        store = store_of(mode, numels, threads)
        fold = store.fold(0, "exact", range(learners))
        for i in order:
            fold.add(i, 1, 1.0, grads[i])
        assert bits(store, store.prepare_fold(1, fold)) == expected, threads


@settings(deadline=None, max_examples=20)
@given(numels=NUMELS, mode=MODE, heloco=st.booleans(), seed=st.integers(0, 99),
       weights=st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 1e9)), min_size=1, max_size=5))
def test_a_streaming_fold_has_the_bits_of_its_definition_on_any_threads(numels, mode, heloco, seed,
                                                                        weights):
    grads = gradients(len(weights), numels, seed)
    order = [(seed + 3 * i) % len(weights) for i in range(len(weights))]
    order = sorted(range(len(weights)), key=lambda i: (order[i], i))
    merged = streamed(mode, numels, [(weights[i], grads[i]) for i in order], heloco)
    n = sum(numels)
    expected = reference.nesterov(reference.noise(90, n), reference.noise(91, n), merged, 0.7, 0.9)
    for threads in THREADS:
        store = store_of(mode, numels, threads, delta_correction="heloco" if heloco else "none")
        fold = store.fold(0, "streaming")
        for i in order:
            assert fold.add(i, 1, weights[i], grads[i]) == [(i, 1)]
        version = store.publish(store.prepare_fold(1, fold))
        assert version.params.tobytes() == expected[0].tobytes(), threads
        assert version.momentum.tobytes() == expected[1].tobytes(), threads


@settings(deadline=None, max_examples=10)
@given(mode=MODE, heloco=st.booleans(), seed=st.integers(0, 99))
def test_streaming_orders_differ_from_the_batch_by_rounding_only(mode, heloco, seed):
    numels = (300, 20, 1)
    grads = gradients(4, numels, seed)
    correction = "heloco" if heloco else "none"
    batch = store_of(mode, numels, delta_correction=correction)
    weights = [1.0, 2.5, 0.5, 3.0]
    expected = batch.publish(batch.prepare(
        0, 1, [(i, 1, w, g) for i, (w, g) in enumerate(zip(weights, grads, strict=True))]))
    for order in itertools.islice(itertools.permutations(range(4)), 0, 24, 5):
        store = store_of(mode, numels, delta_correction=correction)
        fold = store.fold(0, "streaming")
        for i in order:
            fold.add(i, 1, weights[i], grads[i])
        version = store.publish(store.prepare_fold(1, fold))
        assert version.params == pytest.approx(expected.params, rel=1e-6, abs=1e-6)


@settings(deadline=None, max_examples=20)
@given(numels=NUMELS, mode=MODE, heloco=st.booleans(), seed=st.integers(0, 99),
       learners=st.integers(1, 5), robust=st.sampled_from([None, 1, 2, "median"]),
       limit=st.sampled_from([None, "median", 3.0]))
def test_clipping_and_trimming_have_the_bits_of_the_reference(  # noqa: PLR0917
        numels, mode, heloco, seed, learners, robust, limit):
    grads = gradients(learners, numels, seed)
    grads[0] = grads[0] * F32(5.0)
    weights = [F64(1.0 + i) for i in range(learners)]
    n, momentum = sum(numels), reference.noise(91, sum(numels))
    clipped = grads if limit is None else robust_reference.clip(grads, numels, limit)
    constants = reference.Heloco() if heloco else None
    if robust is None:
        merged = reference.merge_fragment(clipped, weights, numels, mode, momentum, constants)
    else:
        fixed = [reference.merge_fragment([g], [F64(1)], numels, AVG, momentum, constants)
                 for g in clipped]
        drop = (learners - 1) // 2 if robust == "median" else min(robust, (learners - 1) // 2)
        merged = (robust_reference.trimmed_mean(fixed, drop) if mode == AVG
                  else robust_reference.robust_directions(fixed, drop, numels))
    expected = reference.nesterov(reference.noise(90, n), momentum, merged, 0.7, 0.9)
    for threads in THREADS:
        store = store_of(mode, numels, threads, robust=robust, clip_norm=limit,
                         delta_correction="heloco" if heloco else "none")
        version = store.publish(store.prepare(
            0, 1, [(i, 1, float(w), g) for i, (w, g) in
                   enumerate(zip(weights, grads, strict=True))]))
        assert version.params.tobytes() == expected[0].tobytes(), threads
        assert version.momentum.tobytes() == expected[1].tobytes(), threads
