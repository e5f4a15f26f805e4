"""What a merge goes on without: who is dropped, and that the rest is merged as if alone."""

from __future__ import annotations

import numpy as np
import pytest

from syncer.layout import AVG, ISO, RDA, FragmentLayout, Layout
from syncer.merge import FragmentStore
from syncer.merge.finite import NothingFinite

F32 = np.float32
HUGE = F32(3.3e38)
BF16_INFINITE = np.uint32(0x7F7F8000).view(F32)
NUMELS = (4, 2)


def store_of(mode=AVG, *, params=(0,) * 6, momentum=None, lr=0.7, mu=0.9, **options):
    shapes = ((2, 2), (1, 2)) if mode == ISO else ()
    store = FragmentStore(Layout((FragmentLayout(mode, NUMELS, shapes),)), lr=lr, momentum=mu,
                          **options)
    state = None if momentum is None else {"momentum": np.array(momentum, F32)}
    store.adopt(0, np.array(params, F32), state=state)
    return store


def pushes(*grads, weights=None):
    weights = weights or [1.0] * len(grads)
    return [(i, 7, w, np.array(g, F32)) for i, (w, g) in enumerate(zip(weights, grads,
                                                                       strict=True))]


def bits(prepared):
    return [buffer_bytes.tobytes() for buffer_bytes in
            (prepared.result.params, *prepared.result.state.values())]


HONEST = [1, 2, 3, 4, 5, 6], [0.5, 0, -1, 4, 2, 6], [1, 1, 1, 1, 1, 2]
WILD = [0, 0, HUGE, 0, 0, 0]


@pytest.mark.parametrize("mode", [AVG, RDA, ISO])
@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("options", [
    {}, {"delta_correction": "heloco"}, {"threads": 3}, {"outer_optimizer": "delayed-nesterov"}],
    ids=["plain", "heloco", "threads", "delayed"])
def test_one_that_overflows_is_dropped_and_the_rest_is_merged_as_if_alone(mode, place, options):
    params = [0, 0, -np.finfo(F32).max, 0, 0, 0]
    grads = list(HONEST)
    grads.insert(place, WILD)
    found = store_of(mode, params=params, **options).prepare(0, 1, pushes(*grads))
    assert [e.position for e in found.excluded] == [place]
    alone = store_of(mode, params=params, **options).prepare(0, 1, pushes(*HONEST))
    assert alone.excluded == ()
    assert bits(found) == bits(alone)
    assert found.gnorm == alone.gnorm


def test_the_element_is_the_first_that_was_not_finite():
    store = store_of(params=[0, -HUGE, 0, 0, 0, -HUGE])
    found = store.prepare(0, 1, pushes([0, HUGE, 0, 0, 0, 0], [0, 0, 0, 0, 0, HUGE], [1] * 6))
    assert found.excluded == ((0, 1), (1, 5))


def test_two_that_only_overflow_together_lose_the_longer_one():
    # each alone fits beside the others; the sum of both does not
    store = store_of(lr=1.0, mu=0.0, params=[-F32(1.6e38)] + [0] * 5)
    grads = [3e38, 0, 0, 0, 0, 0], [3.2e38, 0, 0, 0, 0, 0], [0] * 6
    assert store.prepare(0, 1, pushes(*grads)).excluded == ((1, 0),)


def test_of_equals_the_first_learner_is_dropped():
    store = store_of(lr=1.0, mu=0.0, params=[-F32(1.6e38)] + [0] * 5)
    wild = [3.2e38, 0, 0, 0, 0, 0]
    assert store.prepare(0, 1, pushes(wild, wild, [0] * 6)).excluded == ((0, 0),)


def test_weights_count_and_a_push_without_weight_is_never_to_blame():
    store = store_of(lr=1.0, mu=0.0, params=[-HUGE] + [0] * 5)
    grads = [1e38, 0, 0, 0, 0, 0], [2e38, 0, 0, 0, 0, 0], [3e38, 0, 0, 0, 0, 0], [1] * 6
    found = store.prepare(0, 1, pushes(*grads, weights=[8.0, 2.0, 0.0, 1.0]))
    assert [e.position for e in found.excluded] == [0, 1]


def test_clipped_ones_are_judged_as_they_enter():
    options = {"lr": 1.0, "mu": 0.0, "params": [-F32(3.35e38)] + [0] * 5, "clip_norm": 1e37}
    grads = [3e38, 0, 0, 0, 0, 0], [9e36, 0, 0, 0, 0, 0], [0] * 6
    found = store_of(**options).prepare(0, 1, pushes(*grads, weights=[1.0, 2.0, 1.0]))
    assert found.excluded == ((1, 0),)


def test_when_nothing_is_left_all_that_were_tried_are_named():
    store = store_of(lr=1.0, mu=0.0, params=[-HUGE] + [0] * 5)
    before = store.current(0), store.live_buffers
    with pytest.raises(NothingFinite, match=r"fragment 0 .* element 0 \(learners 0, 1\)") as raised:
        store.prepare(0, 1, pushes([3e38, 0, 0, 0, 0, 0], [HUGE, 0, 0, 0, 0, 0]))
    assert raised.value.excluded == ((1, 0), (0, 0))
    assert (store.current(0), store.live_buffers) == before


def test_a_robust_merge_goes_on_only_with_as_many_as_its_rule_needs():
    options = {"lr": 1.0, "mu": 0.0, "params": [-HUGE] + [0] * 5, "robust": "median"}
    wild = [HUGE, 0, 0, 0, 0, 0]
    fine = [1] * 6
    assert store_of(**options).prepare(0, 1, pushes(wild, fine, fine)).excluded == ()
    assert store_of(**options).prepare(
        0, 1, pushes(*[wild] * 3, *[fine] * 3)).excluded == ((0, 0),)
    with pytest.raises(NothingFinite):
        store_of(**options).prepare(0, 1, pushes(wild, wild, fine))


@pytest.mark.parametrize("optimizer", ["nesterov", "delayed-nesterov"])
def test_a_momentum_that_alone_is_too_much_begins_anew(optimizer):
    options = {"outer_optimizer": optimizer, "params": [-HUGE] + [0] * 5}
    if optimizer == "delayed-nesterov":
        options["dn_period"] = 1
    store = store_of(**options)
    state = {name: np.array([HUGE, 1, 1, 1, 1, 1], F32) * F32(name == "momentum")
             for name in store.current(0).state}
    store.adopt(0, np.array(options["params"], F32), state=state)
    found = store.prepare(0, 1, pushes(*HONEST))
    assert found.restarted
    assert found.excluded == ()
    assert bits(found) == bits(store_of(**options).prepare(0, 1, pushes(*HONEST)))


@pytest.mark.parametrize("optimizer", ["nesterov", "delayed-nesterov", "sgd"])
@pytest.mark.parametrize("numel", [1, 7, 8, 9, 40_000])
def test_what_bf16_rounds_to_infinity_is_not_finite_where_broadcasts_are_bf16(optimizer, numel):
    layout = Layout((FragmentLayout(AVG, (numel,)),))
    for place in {0, numel - 1}:
        params = np.zeros(numel, F32)
        params[place] = np.nextafter(BF16_INFINITE, F32(0))
        still = np.zeros(numel, F32)
        over = still.copy()
        over[place] = -F32(4e31)
        for bf16 in (False, True):
            store = FragmentStore(layout, lr=1.0, momentum=0.0, bf16=bf16,
                                  outer_optimizer=optimizer, dn_period=1)
            store.adopt(0, params)
            assert store.prepare(0, 1, [(0, 1, 1.0, still)]).excluded == ()
            found = store.prepare(0, 1, [(0, 1, 1.0, still), (1, 1, 1.0, over)])
            assert found.excluded == (((1, place),) if bf16 else ())


def test_a_hostile_learner_in_every_round_never_stops_the_others():
    store = store_of()
    rng = np.random.default_rng(3)
    for step in range(1, 60):
        wild = rng.choice([-1, 1]) * np.full(6, 3e38)
        prepared = store.prepare(0, step, pushes(wild, rng.standard_normal(6)))
        assert all(e.position == 0 for e in prepared.excluded)
        store.publish(prepared)
        assert np.isfinite(store.current(0).params).all()
