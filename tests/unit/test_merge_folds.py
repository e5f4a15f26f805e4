"""Folds: order, parking, errors and memory; must not repeat the bit tests."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from syncer import kernels
from syncer.errors import ConfigError, InvariantViolation, NumericsError
from syncer.layout import AVG, ISO, RDA, FragmentLayout, Layout
from syncer.merge import FragmentStore, engine
from syncer.merge.finite import NothingFinite

F32 = np.float32


def store_of(mode=RDA, numels=(4, 2), shapes=(), **options) -> FragmentStore:
    store = FragmentStore(Layout((FragmentLayout(mode, tuple(numels), shapes),)), lr=1.0,
                          momentum=0.0, **options)
    store.adopt(0, np.zeros(sum(numels), F32))
    return store


def gradient(value: float, n: int = 6) -> np.ndarray:
    return np.full(n, value, F32)


def test_an_early_push_is_parked_until_those_before_it_came():
    store = store_of(AVG)
    fold = store.fold(0, "exact", [2, 0, 1])
    assert fold.add(2, 5, 1.0, gradient(3)) == []
    assert fold.parked == [(2, 5)]
    assert fold.add(0, 9, 1.0, gradient(1)) == [(0, 9)]
    assert fold.add(1, 7, 1.0, gradient(2)) == [(1, 7), (2, 5)]
    assert (fold.parked, fold.pushes) == ([], 3)
    assert store.publish(store.prepare_fold(1, fold)).params.tolist() == [-2.0] * 6


def test_a_parked_push_is_decoded_when_its_turn_comes():
    wire = bytearray(12)
    kernels.encode_bf16(gradient(-3.0), wire)
    decoded = []

    def decode():
        out = np.empty(6, F32)
        assert kernels.decode_bf16(wire, out, True) == -1
        decoded.append(out)
        return out

    fold = store_of(AVG).fold(0, "exact", [0, 1])
    fold.add(1, 1, 1.0, decode)
    assert not decoded
    fold.add(0, 1, 1.0, gradient(1))
    assert len(decoded) == 1


def test_an_exact_fold_that_closes_short_is_incomplete():
    store = store_of()
    fold = store.fold(0, "exact", [0, 1, 2])
    fold.add(0, 1, 1.0, gradient(1))
    fold.add(2, 1, 1.0, gradient(1))
    before = store.live_buffers
    with pytest.raises(NumericsError, match=r"fold incomplete: .*1 of 3 .*learners \[1, 2\]"):
        store.prepare_fold(1, fold)
    assert store.live_buffers == before
    with pytest.raises(NumericsError, match="fold incomplete"):
        store.prepare_fold(1, store.fold(0, "streaming"))


def test_a_streaming_fold_closes_at_any_count():
    store = store_of(AVG)
    fold = store.fold(0, "streaming")
    fold.add(4, 1, 1.0, gradient(1))
    fold.add(2, 1, 3.0, gradient(5))
    assert store.publish(store.prepare_fold(1, fold)).params.tolist() == [-4.0] * 6


def test_pushes_that_do_not_belong_are_refused_and_nothing_is_folded():
    store = store_of(AVG)
    fold = store.fold(0, "exact", [0, 1])
    fold.add(1, 1, 1.0, gradient(1))
    for learner, weight in ((1, 1.0), (2, 1.0), (0, 2.0)):
        with pytest.raises(InvariantViolation):
            fold.add(learner, 1, weight, gradient(1))
    with pytest.raises(ValueError, match="6 float32 elements"):
        fold.add(0, 1, 1.0, gradient(1, n=5))
    assert (fold.pushes, fold.parked) == (0, [(1, 1)])
    fold.add(0, 2, 1.0, gradient(3))
    with pytest.raises(InvariantViolation, match="one push of each"):
        fold.add(0, 3, 1.0, gradient(3))
    assert store.publish(store.prepare_fold(1, fold)).params.tolist() == [-2.0] * 6
    for roster in ([], [1, 1]):
        with pytest.raises(InvariantViolation, match="distinct learners"):
            store.fold(0, "exact", roster)


def test_settings_that_need_every_push_at_once_are_refused():
    for options in ({"clip_norm": "median"}, {"robust": 1}, {"robust": "median"}):
        with pytest.raises(ConfigError, match="batch"):
            store_of(**options).fold(0, "streaming")
    with pytest.raises(ConfigError, match="neither a delta correction nor iso"):
        store_of(delta_correction="heloco").fold(0, "exact", [0])
    with pytest.raises(ConfigError, match="neither a delta correction nor iso"):
        store_of(ISO, (6,), ((2, 3),)).fold(0, "exact", [0])
    with pytest.raises(ConfigError, match="give batch or exact or streaming"):
        store_of().fold(0, "lazy")


def test_a_fold_is_used_once():
    store = store_of(RDA)
    fold = store.fold(0, "streaming")
    fold.add(0, 1, 1.0, gradient(1))
    store.publish(store.prepare_fold(1, fold))
    assert store.live_buffers == 2  # neither sums nor the old momentum are held
    with pytest.raises(InvariantViolation, match="closed"):
        fold.add(1, 1, 1.0, gradient(1))
    with pytest.raises(InvariantViolation, match="closed"):
        store.prepare_fold(2, fold)


def test_iso_fragments_can_stream():
    rng = np.random.default_rng(0)
    grads = [rng.standard_normal(6).astype(F32) for _ in range(3)]
    stores = [store_of(ISO, (6,), ((2, 3),)) for _ in range(2)]
    fold = stores[0].fold(0, "streaming")
    for i, g in enumerate(grads):
        fold.add(i, 1, 1.0 + i, g)
    folded = stores[0].publish(stores[0].prepare_fold(1, fold))
    batch = stores[1].publish(stores[1].prepare(
        0, 1, [(i, 1, 1.0 + i, g) for i, g in enumerate(grads)]))
    assert folded.params == pytest.approx(batch.params, rel=1e-5)


@pytest.mark.parametrize("mode", [AVG, RDA])
def test_extremes_of_counters_and_of_length_do_not_end_a_streaming_round(mode):
    store = store_of(mode, (6,), outer_optimizer="sgd")
    fold = store.fold(0, "streaming")
    fold.add(0, 1, float(2**64 - 1) ** 2, gradient(3.0))
    fold.add(1, 1, 1.0, gradient(1e-44))
    params = store.publish(store.prepare_fold(1, fold)).params
    assert params == pytest.approx(-gradient(3.0), rel=1e-6)


def test_a_fold_clips_to_a_value():
    store = store_of(AVG, clip_norm=1.0)
    fold = store.fold(0, "streaming")
    fold.add(0, 1, 1.0, np.array([3, 0, 0, 0, 4, 0], F32))
    params = store.publish(store.prepare_fold(1, fold)).params
    assert params == pytest.approx([-0.6, 0, 0, 0, -0.8, 0])


def test_a_fold_belongs_to_the_version_it_was_opened_at():
    store = store_of(AVG)
    fold = store.fold(0, "streaming")
    fold.add(0, 1, 1.0, gradient(1))
    store.publish(store.prepare(0, 1, [(0, 1, 1.0, gradient(1))]))
    with pytest.raises(InvariantViolation, match="opened at version 0, which is 1"):
        store.prepare_fold(2, fold)


@pytest.mark.parametrize(("mode", "sums"), [(AVG, 1), (RDA, 2)])
def test_a_fold_keeps_its_sums_and_no_push(mode, sums):
    store = store_of(mode)
    versions = store.live_buffers
    for _ in range(3):  # as after two relaunches
        fold = store.fold(0, "streaming")
        assert store.live_buffers == versions + sums
        push = gradient(1)
        fold.add(0, 1, 1.0, push)
        alive = weakref.ref(push)
        del push
        assert alive() is None, "the fold holds a push that it has added"
        assert store.live_buffers == versions + sums
        del fold
        assert store.live_buffers == versions


def test_a_result_that_is_not_finite_names_the_folded_learners():
    store = store_of(AVG)
    fold = store.fold(0, "streaming")
    for learner in (3, 1):
        fold.add(learner, 1, 1.0, np.array([0, 0, 0, 0, 3e38, 0], F32))
    before = store.live_buffers
    with pytest.raises(NothingFinite, match=r"fragment 0 .* element 4 \(learners 1, 3\)") as raised:
        store.prepare_fold(1, fold)
    assert raised.value.excluded == ()  # whose it was is not known any more
    assert store.live_buffers == before


class Lacking(list):
    """Its memory comes to an end now and then."""

    def __init__(self, *found, lacks):
        super().__init__(found)
        self.lacks = lacks

    def append(self, what):
        self.lacks -= 1
        if self.lacks >= 0:
            raise MemoryError
        super().append(what)


@pytest.mark.parametrize(("kind", "lacking"), [
    ("exact", "members"), ("exact", "stats"), ("exact", "_untold"),
    ("streaming", "members"), ("streaming", "stats")])
def test_a_fold_names_who_is_in_its_sums_or_has_not_added_it(kind, lacking):
    """There may be no memory for an entry of a list, too."""
    store = store_of(AVG, merge_stats=True)
    fold = store.fold(0, kind, [0, 1])
    setattr(fold, lacking, Lacking(lacks=2))
    for _ in range(2):
        with pytest.raises(MemoryError):
            fold.add(0, 9, 1.0, gradient(1))
    assert fold.add(0, 9, 1.0, gradient(1)) == [(0, 9)]
    assert fold.add(1, 7, 1.0, gradient(3)) == [(1, 7)]
    assert fold.members == [(0, 9), (1, 7)]
    assert len(fold.stats) == 2
    assert store.publish(store.prepare_fold(1, fold)).params.tolist() == [-2.0] * 6


def test_a_push_that_finds_no_memory_is_added_once(monkeypatch):
    """Wherever in its work: with what is parked behind it, and told of once."""
    real, calls = engine.add, []

    def add(*given, **named):
        calls.append(None)
        if len(calls) in (1, 3):
            raise MemoryError("no memory for a merge")
        return real(*given, **named)

    monkeypatch.setattr(engine, "add", add)
    store = store_of(AVG)
    fold = store.fold(0, "exact", [0, 1, 2])
    assert fold.add(1, 7, 1.0, gradient(2)) == []
    for _ in range(2):
        with pytest.raises(MemoryError):
            fold.add(0, 9, 1.0, gradient(1))
    assert fold.add(0, 9, 1.0, gradient(1)) == [(0, 9), (1, 7)]
    with pytest.raises(InvariantViolation):
        fold.add(0, 9, 1.0, gradient(1))
    assert fold.add(2, 5, 1.0, gradient(3)) == [(2, 5)]
    assert store.publish(store.prepare_fold(1, fold)).params.tolist() == [-2.0] * 6
