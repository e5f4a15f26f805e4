"""Fragment versions, buffers and exact formulas of the merge; must not use golden values."""

from __future__ import annotations

import gc
import itertools

import numpy as np
import pytest

from syncer import pages
from syncer.errors import ConfigError, InvariantViolation, NumericsError
from syncer.layout import AVG, RDA, FragmentLayout, Layout
from syncer.merge import OPTIMIZERS, FragmentStore, HelocoConstants
from syncer.merge.buffers import BufferPool
from syncer.ranges import OUTER_OPTIMIZER
from syncer.steps import version_at
from tests.golden import merge_reference as reference

F32 = np.float32


def f32(values) -> np.ndarray:
    return np.array(values, F32)


def store_of(mode=AVG, numels=(4, 2), *, lr=0.7, momentum=0.9, params=None, fragments=1, **options):
    store = FragmentStore(Layout((FragmentLayout(mode, tuple(numels)),) * fragments),
                          lr=lr, momentum=momentum, **options)
    for p in range(fragments):
        store.adopt(p, np.zeros(sum(numels), F32) if params is None else f32(params))
    return store


def push(*grads, weights=None):
    weights = weights or [1.0] * len(grads)
    return [(i, 7, w, f32(g)) for i, (w, g) in enumerate(zip(weights, grads, strict=True))]


def commit(store, contributions, step=1, fragment=0):
    return store.publish(store.prepare(fragment, step, contributions))


# ---------------------------------------------------------------- formulas


def test_rda_of_two_orthogonal_vectors_of_norm_2_has_norm_2():
    prepared = store_of(RDA, (2,)).prepare(0, 1, push([2, 0], [0, 2]))
    assert prepared.gnorm == pytest.approx(2.0, rel=1e-7)


@pytest.mark.parametrize("mode", [AVG, RDA])
def test_one_learner_is_the_identity(mode):
    gradient = [3.0, -4.0]  # norm 5: every step of rda is near-exact
    store = store_of(mode, (2,), lr=1.0, momentum=0.0)
    assert commit(store, push(gradient)).params == pytest.approx([-3.0, 4.0], rel=1e-6)


def test_nesterov_from_zero_state_sums_to_the_known_factors():
    lr, mu = 0.5, 0.75  # exact in f32, like every product below
    store = store_of(AVG, (1,), lr=lr, momentum=mu)
    assert commit(store, push([1.0])).params[0] == -lr * (1 + mu)
    for step in (2, 3, 4):
        commit(store, push([1.0]), step)
    assert store.current(0).params[0] == -lr * (4 + 4 * mu + 3 * mu**2 + 2 * mu**3 + mu**4)


def test_delayed_nesterov_over_n_arrivals_equals_one_nesterov_step_on_their_mean():
    arrivals = [f32([1, -2]), f32([3, 5]), f32([-8, 0.5]), f32([4, 1])]
    delayed = store_of(AVG, (2,), lr=0.5, momentum=0.5, outer_optimizer="delayed-nesterov",
                       dn_period=4)
    for step, g in enumerate(arrivals, start=1):
        commit(delayed, push(g), step)
    plain = store_of(AVG, (2,), lr=0.5, momentum=0.5)
    commit(plain, push(sum(arrivals) / F32(4)))
    assert delayed.current(0).params.tolist() == plain.current(0).params.tolist()
    assert delayed.current(0).momentum.tolist() == plain.current(0).momentum.tolist()
    assert delayed.current(0).state["accumulator"].tolist() == [0.0, 0.0]


def test_with_one_local_step_a_convex_fleet_is_data_parallel_sgd():
    # H = 1, outer lr 1, momentum 0: theta <- theta - mean of the learners' local steps
    rng = np.random.default_rng(3)
    a = [rng.standard_normal((16, 5)) for _ in range(4)]
    b = [rng.standard_normal(16) for _ in range(4)]
    store = store_of(AVG, (3, 2), lr=1.0, momentum=0.0)
    theta = np.zeros(5)
    for step in range(1, 51):
        anchor = store.current(0).params.astype(float)
        local = [anchor - 0.02 * x.T @ (x @ anchor - y) for x, y in zip(a, b, strict=True)]
        commit(store, push(*[anchor - x for x in local]), step)
        theta -= 0.02 * np.mean([x.T @ (x @ theta - y) for x, y in zip(a, b, strict=True)], axis=0)
    assert store.current(0).params == pytest.approx(theta, abs=2e-6)


@pytest.mark.parametrize("mode", [AVG, RDA])
def test_scaling_all_weights_by_2_changes_no_bit(mode):
    rng = np.random.default_rng(5)
    grads = [rng.standard_normal(6).astype(F32) for _ in range(3)]
    weights = [0.3, 1e9, 7.7]
    once = commit(store_of(mode), push(*grads, weights=weights)).params
    twice = commit(store_of(mode), push(*grads, weights=[2 * w for w in weights])).params
    assert once.tobytes() == twice.tobytes()


@pytest.mark.parametrize("mode", [AVG, RDA])
def test_every_order_of_arrival_gives_the_same_bits(mode):
    rng = np.random.default_rng(6)
    contributions = push(*[rng.standard_normal(6) for _ in range(4)], weights=[1.0, 3.0, 0.5, 2.0])
    results = {commit(store_of(mode), order).params.tobytes()
               for order in itertools.permutations(contributions)}
    assert len(results) == 1


@pytest.mark.parametrize("mode", [AVG, RDA])
@pytest.mark.parametrize("weights", [[0.0, 0.0], [0.0, 5.0]])
def test_weights_of_zero(mode, weights):
    store = store_of(mode, (2,), lr=1.0, momentum=0.0)
    params = commit(store, push([3, 4], [-6, 8], weights=weights)).params
    assert params == pytest.approx([6.0, -8.0] if weights[1] else [0.0, 0.0], rel=1e-6)
    if not weights[1]:
        assert params.tobytes() == bytes(8)  # +0, not -0


def test_cancelling_directions_fall_back_to_the_average():
    store = store_of(RDA, (2,), lr=1.0, momentum=0.0)
    params = commit(store, push([1, 1], [-1, -1], weights=[1.0, 1.0])).params
    assert params.tobytes() == bytes(8)


def test_a_zero_gradient_has_no_direction_but_counts_in_the_radius():
    store = store_of(RDA, (2,), lr=1.0, momentum=0.0)
    assert commit(store, push([0, 0], [0, 4])).params == pytest.approx([0, -2.0], rel=1e-6)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_gradient_too_short_for_a_unit_vector_has_no_direction(threads):
    """All subnormal: w/n is beyond f32. It counts in the radius, and does not end the run."""
    g0 = np.linspace(-1, 1, 70_000, dtype=np.float32)
    tiny = np.full(70_000, 1e-44, np.float32)
    store = store_of(RDA, (70_000,), lr=1.0, momentum=0.0, threads=threads,
                     outer_optimizer="sgd")
    params = commit(store, push(g0, tiny, weights=[1.0, 1.0])).params
    n0, n1 = reference.norm(g0), reference.norm(tiny)
    out = np.float32(0.5 / n0) * g0
    expected = out * np.float32((n0 + n1) / 2.0 / reference.norm(out))
    assert (-params).tobytes() == expected.tobytes()
    alone = commit(store_of(RDA, (70_000,), lr=1.0, momentum=0.0, outer_optimizer="sgd"),
                   push(tiny)).params
    assert (-alone).tobytes() == tiny.tobytes()


def test_subnormals_are_not_flushed():
    tiny = np.float32(1e-44)
    store = store_of(AVG, (1,), lr=1.0, momentum=0.0)
    assert commit(store, push([tiny])).params[0] == -tiny


def test_initial_values_ask_for_no_memory(monkeypatch):
    """Whoever brings them could do nothing about it, and a run that has no step yet would end."""
    class Full:
        def __init__(self, pool):
            self.adopt = pool.adopt

        def take(self, *given, **named):
            raise MemoryError

    def nothing(*given, **named):
        raise MemoryError

    layout = Layout((FragmentLayout(AVG, (4, 2)), FragmentLayout(AVG, (3,))))
    store = FragmentStore(layout, lr=0.7, momentum=0.9)
    pool, store._pool = store._pool, Full(store._pool)
    monkeypatch.setattr(np, "zeros", nothing)
    for fragment, numel in enumerate((6, 3)):
        store.adopt(fragment, np.ones(numel, np.float32))
        assert store.current(fragment).momentum.tolist() == [0.0] * numel
    monkeypatch.undo()
    store._pool = pool
    commit(store, [(0, 1, 1.0, f32([1, 1, 1, 1, 1, 1]))])
    assert store.current(1).momentum.tolist() == [0.0] * 3


def test_sgd_is_plain_and_keeps_no_state():
    store = store_of(AVG, (2,), lr=0.25, outer_optimizer="sgd", params=[1.0, 2.0])
    version = commit(store, push([4.0, -8.0]))
    assert version.params.tolist() == [0.0, 4.0]
    assert version.state == {}
    assert version.momentum is None


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_overflow_names_the_place_and_leaves_version_and_buffers_untouched(threads):
    numels = (40_000, 3, 40_000, 5)
    store = store_of(AVG, numels, lr=1.0, momentum=0.5, threads=threads)
    commit(store, push(np.ones(sum(numels)), np.ones(sum(numels))))
    before = store.current(0)
    bits = before.params.tobytes(), before.momentum.tobytes()
    live = store.live_buffers
    bad = [np.zeros(sum(numels), F32) for _ in range(2)]
    for g in bad:
        g[[40_001, 79_999, -1]] = np.finfo(F32).max  # in tensors 1, 2 and 3
    named = r"avg merge of fragment 0 .* element 40001 \(learners 0, 1\)"
    with pytest.raises(NumericsError, match=named):
        store.prepare(0, 2, push(*bad, weights=[1.0, 1.0]))
    assert store.current(0) is before
    assert (before.params.tobytes(), before.momentum.tobytes()) == bits
    assert store.live_buffers == live


def test_a_bad_gradient_is_refused_before_anything_is_written():
    store = store_of(AVG)
    live = store.live_buffers
    for wrong in (np.zeros(5, F32), np.zeros(6), np.zeros(12, F32)[::2]):
        with pytest.raises((ValueError, BufferError)):
            store.prepare(0, 1, [(0, 1, 1.0, wrong)])
    with pytest.raises(ValueError, match="at least one gradient"):
        store.prepare(0, 1, [])
    assert store.live_buffers == live


def test_memory_that_is_no_place_for_floats_is_refused():
    """Vector loads from such an address are undefined, and a fault on some machines."""
    raw = np.zeros(4 * 6 + 4, np.uint8)
    odd = raw[1 if raw.ctypes.data % 4 == 0 else 0:][:24].view(np.float32)
    assert odd.ctypes.data % 4
    store = store_of(numels=(4, 2))
    with pytest.raises(ValueError, match="multiple of 4"):
        store.prepare(0, 1, [(0, 7, 1.0, odd)])
    with pytest.raises(ValueError, match="multiple of 4"):
        BufferPool().adopt(odd)


def test_publishing_needs_the_version_the_merge_started_from():
    store = store_of(AVG)
    first, second = (store.prepare(0, step, push([1] * 6)) for step in (1, 2))
    store.publish(first)
    with pytest.raises(InvariantViolation, match="started from version 0"):
        store.publish(second)
    with pytest.raises(InvariantViolation, match="before"):
        store.publish(first)
    store.discard(second)
    store.discard(second)
    assert store.live_buffers == 2


@pytest.mark.parametrize(("settings", "words"), [
    (dict(outer_optimizer="adam"), "give nesterov or delayed-nesterov or sgd"),
    (dict(outer_optimizer="delayed-nesterov", dn_activation=0.3), "give at most 1/4"),
    (dict(outer_optimizer="delayed-nesterov", dn_activation=1.5), "activation .* between 0 and 1"),
    (dict(outer_optimizer="delayed-nesterov", dn_period=0), "period .* between 1 and")])
def test_an_optimizer_that_cannot_be_is_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        store_of(**settings)


def test_the_optimizers_are_those_of_the_flag():
    assert tuple(OPTIMIZERS) == OUTER_OPTIMIZER.choices


def test_missing_fragment():
    layout = Layout((FragmentLayout(AVG, (1,)),))
    with pytest.raises(InvariantViolation, match="no parameters yet"):
        FragmentStore(layout, lr=1.0, momentum=0.0).current(0)


# ---------------------------------------------------------------- versions and buffers


def test_a_published_version_cannot_be_written():
    version = commit(store_of(AVG), push([1] * 6))
    for array in (version.params, version.momentum):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1.0
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True


def test_a_holder_keeps_its_bytes_through_later_commits():
    store = store_of(AVG, lr=1.0, momentum=0.0)
    held = commit(store, push([1] * 6))
    array = store.current(0).params[2:]  # a view of an array of a version
    for step in range(2, 6):
        commit(store, push([1] * 6), step)
    assert held.params.tolist() == [-1.0] * 6
    assert array.tolist() == [-1.0] * 4
    assert store.current(0).params.tolist() == [-5.0] * 6


def test_buffers_are_recycled_when_the_last_holder_lets_go():
    store = store_of(AVG)
    assert store.live_buffers == 2
    held = commit(store, push([1] * 6))
    array = held.params
    commit(store, push([1] * 6), 2)
    del held
    assert store.live_buffers == 3  # the array alone holds its buffer; the momentum came back
    del array
    assert store.live_buffers == 2


def test_steady_state_is_the_model_and_one_result_per_committing_round():
    numels = (100_000, 3)
    store = store_of(AVG, numels, fragments=6)
    model = store.live_bytes
    assert model == 6 * 2 * 4 * sum(numels)
    pair = model // 6
    gradient = [(0, 1, 1.0, np.ones(sum(numels), F32))]
    for step in range(1, 31):
        fragment = (step - 1) % 6
        prepared = store.prepare(fragment, step, gradient)
        assert store.live_bytes == model + pair
        store.publish(prepared)
        assert store.live_bytes == model
        if step == 6:  # nothing of the first versions is left
            most = pages.used_bytes() + pages.kept_bytes()
    assert pages.used_bytes() + pages.kept_bytes() <= most + (2 << 20), "used again"
    gc.collect()
    assert store.live_buffers == 12


@pytest.mark.parametrize("added", [0, 8, 2_000_000_000_000])
@pytest.mark.parametrize("at", [1, 5])
def test_a_restored_cut_continues_the_same_run(added, at):
    """Also under other numbers, and if a fragment was not merged yet: what is counted is merges."""
    options = {"outer_optimizer": "delayed-nesterov", "dn_period": 3, "fragments": 2}
    grads = [push([t, 1, -t, 2, 3, t]) for t in range(1, 11)]
    whole = store_of(AVG, **options)
    for t, g in enumerate(grads, start=1):
        commit(whole, g, t, (t - 1) % 2)
        if t == at:
            cut = [whole.current(p) for p in range(2)]
    resumed = FragmentStore(whole.layout, lr=0.7, momentum=0.9, outer_optimizer="delayed-nesterov",
                            dn_period=3)
    for p, version in enumerate(cut):
        adopted = resumed.adopt(p, version.params, version=version_at(at + added, p, 2),
                                renumbered=added, state=version.state)
        assert adopted.commits == version.commits
    for t in range(at + 1, 11):
        commit(resumed, grads[t - 1], t + added, (t - 1) % 2)
    for p in range(2):
        assert resumed.current(p).params.tobytes() == whole.current(p).params.tobytes()


def test_adopt_checks_sizes_and_names():
    store = store_of(AVG)
    with pytest.raises(ValueError, match="must hold 6 elements, got 5"):
        store.adopt(0, np.zeros(5, F32))
    with pytest.raises(ValueError, match="keeps \\['momentum'\\]"):
        store.adopt(0, np.zeros(6, F32), state={"accumulator": np.zeros(6, F32)})
    assert store.live_buffers == 2


# ---------------------------------------------------------------- HeLoCo


def corrected(delta, momentum, **constants):
    """One learner's gradient after the correction: left in the momentum by mu = 0."""
    store = FragmentStore(Layout((FragmentLayout(AVG, (len(delta),)),)), lr=1.0, momentum=0.0,
                          delta_correction="heloco", heloco=HelocoConstants(**constants))
    store.adopt(0, np.zeros(len(delta), F32), state={"momentum": f32(momentum)})
    return commit(store, push(delta)).momentum.astype(float)


def test_rotation_keeps_the_norm_and_turns_towards_the_momentum():
    rng = np.random.default_rng(11)
    for _ in range(50):
        momentum = rng.standard_normal(64)
        noise = rng.standard_normal(64)
        aside = noise - noise @ momentum / (momentum @ momentum) * momentum
        delta = (aside / np.linalg.norm(aside) + 0.1 * momentum / np.linalg.norm(momentum)) * 3
        result = corrected(delta, momentum)
        assert np.linalg.norm(result) == pytest.approx(np.linalg.norm(delta), rel=1e-6)
        assert result @ momentum > delta @ momentum + 0.01


def test_shrinking_never_raises_the_opposing_part():
    rng = np.random.default_rng(12)
    for scale in (1e-3, 1.0, 1e3):
        for _ in range(20):
            momentum = rng.standard_normal(32)
            delta = scale * (rng.standard_normal(32) - rng.uniform(0.2, 3) * momentum)
            if delta @ momentum >= 0:
                continue
            result = corrected(delta, momentum)
            before, after = (x @ momentum / np.linalg.norm(momentum) for x in (delta, result))
            assert before * (1 + 1e-6) <= after <= 0.5 * before * (1 - 1e-6)
            aside = delta - delta @ momentum / (momentum @ momentum) * momentum
            rest = result - result @ momentum / (momentum @ momentum) * momentum
            assert rest == pytest.approx(aside, abs=1e-5 * scale)


def test_agreement_and_missing_directions_change_nothing():
    for delta, momentum in (([1, 0.3], [1, 0]), ([1, 2], [0, 0]), ([0, 0], [1, 0]),
                            ([1e-9, 0], [-1, 0])):
        assert corrected(delta, momentum).tolist() == f32(delta).astype(float).tolist()


def test_the_constants_are_used():
    assert corrected([-1, 0], [1, 0], k_s=0.0).tolist() == [-1.0, 0.0]
    assert corrected([-1, 0], [1, 0], k_s=1.0, beta_max=1.0, kappa=0.0)[0] == pytest.approx(0.0)
    assert corrected([0, 1], [1, 0], k_d=0.0)[1] == 1.0
    assert corrected([0, 1], [1, 0], kappa=0.0)[0] == pytest.approx(1.0)
    assert corrected([0.5, 1], [1, 0], c_ok=0.9)[0] > 0.5
    assert corrected([0.5, 1], [1, 0], c_ok=0.4)[0] == 0.5


def test_a_push_of_any_staleness_gives_the_same_correction():
    # the delta is relative to the learner's own anchor: its gradient does not depend on versions
    fresh = store_of(AVG, (2,), delta_correction="heloco")
    later = store_of(AVG, (2,), delta_correction="heloco", params=[100.0, -50.0])
    for store in (fresh, later):
        commit(store, push([1.0, 0.5]))
    for store in (fresh, later):
        commit(store, push([-0.25, 1.0]), 2)
    moved = [store.current(0).momentum for store in (fresh, later)]
    assert moved[0].tobytes() == moved[1].tobytes()


@pytest.mark.parametrize(("name", "value"), [
    ("c_ok", 1.5), ("k_s", -1.0), ("kappa", float("nan")), ("eps", 0.0), ("beta_max", 2.0),
    ("k_d", float("inf"))])
def test_constants_out_of_range_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"HeLoCo constant {name} {value} cannot be used: give"):
        store_of(delta_correction="heloco", heloco=HelocoConstants(**{name: value}))


def test_an_unknown_correction_is_refused():
    with pytest.raises(ConfigError, match="give heloco or none"):
        store_of(delta_correction="yes")


def test_without_a_momentum_there_is_nothing_to_correct_against():
    store = store_of(AVG, (2,), lr=1.0, outer_optimizer="sgd", delta_correction="heloco")
    assert commit(store, push([1, 2])).params.tolist() == [-1.0, -2.0]


@pytest.mark.parametrize("threads", [1, 3])
def test_outputs_that_bypass_the_cache_have_the_same_bits(threads):
    # 1.2 Mi parameters: their outputs exceed the cache; odd offsets: no vector is aligned at first
    numels = (5, 700_001, 500_000)
    n = sum(numels)
    params, momentum, g0, g1 = (reference.noise(i, n) for i in range(4))
    store = store_of(AVG, numels, threads=threads)
    store.adopt(0, params, state={"momentum": momentum})
    version = commit(store, push(g0, g1, weights=[1.0, 3.0]))
    merged = reference.merge_avg([g0, g1], [1.0, 3.0])
    expected = reference.nesterov(params, momentum, merged, 0.7, 0.9)
    assert version.params.tobytes() == expected[0].tobytes()
    assert version.momentum.tobytes() == expected[1].tobytes()


@pytest.mark.parametrize("mode", [AVG, RDA])
def test_the_largest_weight_that_counters_can_give(mode):
    # c_tokens = 2^64 - 1 in one step: its square is beyond f32, but only its share is ever rounded
    extreme = float(2**64 - 1) * float(2**64 - 1)
    store = store_of(mode, (2,), lr=1.0, momentum=0.0)
    params = commit(store, push([3, 4], [-8, 6], weights=[extreme, 1.0])).params
    assert params == pytest.approx([-3.0, -4.0], rel=1e-6)
    both = commit(store, push([3, 4], [3, 4], weights=[extreme, extreme]), 2).params
    assert both == pytest.approx([-6.0, -8.0], rel=1e-6)


@pytest.mark.parametrize("mode", [AVG, RDA])
def test_a_gradient_with_nan_is_left_out_and_alone_publishes_nothing(mode):
    store = store_of(mode, (4, 2))
    before = store.current(0)
    bad = [1, 1, 1, 1, 1, float("nan")]
    with pytest.raises(NumericsError, match=rf"element {5 - mode} \(learners 0\)"):
        store.prepare(0, 1, push(bad))
    assert store.current(0) is before
    prepared = store.prepare(0, 1, push([1] * 6, bad))
    assert prepared.excluded == ((1, 5 - mode),)  # a direction spreads it over its tensor
    assert prepared.result.params.tobytes() == commit(store_of(mode, (4, 2)),
                                                      push([1] * 6)).params.tobytes()
