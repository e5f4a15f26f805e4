"""The numbers that explain a merge, against the same computed with NumPy."""

from __future__ import annotations

import json

import numpy as np
import pytest

from syncer.layout import AVG, ISO, RDA, FragmentLayout, Layout
from syncer.merge import FragmentStore
from tests.golden import merge_reference as reference

F32 = np.float32
NUMELS = (40_000, 7)
WEIGHTS = (1.0, 2.0, 0.5)


def length(x) -> float:
    return float(np.linalg.norm(x.astype(float)))


def cosine(x, y) -> float:
    return float(x.astype(float) @ y.astype(float)) / (length(x) * length(y))


def inputs():
    n = sum(NUMELS)
    momentum = reference.noise(3, n)
    grads = [reference.noise(4, n) + momentum, reference.noise(5, n),
             reference.noise(6, n) - F32(0.5) * momentum]
    return reference.noise(7, n), momentum, grads


def merge(mode, *, merge_stats=True, shapes=(), numels=NUMELS, optimizer="nesterov", threads=2):
    params, momentum, grads = inputs()
    n = sum(numels)
    store = FragmentStore(Layout((FragmentLayout(mode, numels, shapes),)), lr=0.7, momentum=0.9,
                          delta_correction="heloco", merge_stats=merge_stats, threads=threads,
                          outer_optimizer=optimizer)
    state = {"momentum": momentum[:n]} if optimizer == "nesterov" else None
    store.adopt(0, params[:n], state=state)
    prepared = store.prepare(0, 1, [(10 + i, 3, w, g[:n]) for i, (w, g) in
                                    enumerate(zip(WEIGHTS, grads, strict=True))])
    return store, prepared


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("mode", [AVG, RDA])
def test_the_numbers(mode, threads):
    params, momentum, grads = inputs()
    merged = reference.merge_fragment(grads, WEIGHTS, NUMELS, mode, momentum, reference.Heloco())
    store, prepared = merge(mode, threads=threads)
    stats = prepared.stats
    assert [(s.learner, s.generation) for s in stats.learners] == [(10, 3), (11, 3), (12, 3)]
    for s, g in zip(stats.learners, grads, strict=True):
        assert s.norm == pytest.approx(length(g))
        assert s.cos_merged == pytest.approx(cosine(g, merged), rel=1e-5, abs=1e-7)
        assert s.cos_momentum == pytest.approx(cosine(g, momentum), rel=1e-5, abs=1e-7)
        assert s.kept + s.rotated + s.shrunk == pytest.approx(1.0)
    big = NUMELS[0] / sum(NUMELS)  # what happens to the large tensor dominates
    kept, rotated, shrunk = stats.learners
    assert kept.kept >= big
    assert rotated.rotated + rotated.shrunk >= big
    assert shrunk.shrunk >= big
    mean = sum(length(g) for g in grads) / 3
    assert stats.merged_ratio == pytest.approx(length(merged) / mean, rel=1e-6)
    after = store.publish(prepared).params
    assert stats.step_norm == pytest.approx(length(after - params), rel=1e-6)
    along = float((after - params).astype(float) @ merged.astype(float))
    assert stats.gain == pytest.approx(-along / (0.7 * length(merged) ** 2), rel=1e-5)
    assert json.loads(json.dumps(stats.record()))["learners"][1]["learner"] == 11


@pytest.mark.parametrize("mode", [AVG, RDA])
def test_they_change_no_bit_and_cost_nothing_when_off(mode):
    store_on, on = merge(mode)
    store_off, off = merge(mode, merge_stats=False)
    assert off.stats is None
    assert store_on.publish(on).params.tobytes() == store_off.publish(off).params.tobytes()
    assert on.gnorm == off.gnorm


def test_iso_and_sgd():
    store, prepared = merge(ISO, numels=(12, 15), shapes=((3, 4), (5, 3)))
    params = store.current(0).params
    merged = store.publish(prepared).momentum - F32(0.9) * inputs()[1][:27]
    stats = prepared.stats
    for s, g in zip(stats.learners, inputs()[2], strict=True):
        assert s.cos_merged == pytest.approx(cosine(g[:27], merged), rel=1e-4)
        assert s.kept + s.rotated + s.shrunk == pytest.approx(1.0)
    assert stats.step_norm == pytest.approx(length(store.current(0).params - params), rel=1e-5)
    _, prepared = merge(AVG, optimizer="sgd")
    assert prepared.stats.gain is None
    assert {s.cos_momentum for s in prepared.stats.learners} == {None}
    assert {s.kept for s in prepared.stats.learners} == {0.0}


def test_a_fold_knows_all_but_the_cosine_with_the_merged_gradient():
    params, momentum, grads = inputs()
    store = FragmentStore(Layout((FragmentLayout(RDA, NUMELS),)), lr=0.7, momentum=0.9,
                          delta_correction="heloco", merge_stats=True)
    store.adopt(0, params, state={"momentum": momentum})
    fold = store.fold(0, "streaming")
    for i in (2, 0, 1):
        fold.add(i, 1, WEIGHTS[i], grads[i])
    stats = store.prepare_fold(1, fold).stats
    assert [s.learner for s in stats.learners] == [2, 0, 1]
    for s in stats.learners:
        assert s.norm == pytest.approx(length(grads[s.learner]))
        assert s.cos_momentum == pytest.approx(cosine(grads[s.learner], momentum), abs=1e-6)
        assert s.cos_merged is None
        assert s.kept + s.rotated + s.shrunk == pytest.approx(1.0)


def test_zero_gradients_have_no_cosine():
    store = FragmentStore(Layout((FragmentLayout(AVG, (3,)),)), lr=0.7, momentum=0.9,
                          merge_stats=True)
    store.adopt(0, np.ones(3, F32))
    stats = store.prepare(0, 1, [(0, 1, 1.0, np.zeros(3, F32))]).stats
    assert stats.learners[0][2:5] == (0.0, None, None)
    assert (stats.merged_ratio, stats.step_norm, stats.gain) == (None, 0.0, None)
