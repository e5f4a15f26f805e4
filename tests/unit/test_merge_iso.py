"""iso: the flattened spectrum, its special cases, and the threads of the BLAS."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from syncer.errors import ConfigError, NumericsError
from syncer.layout import ISO, FragmentLayout, Layout
from syncer.merge import FragmentStore, blas
from syncer.merge.iso import flatten, flatten_all
from tests.golden import merge_reference as reference

F32 = np.float32


def random_matrix(rows: int, cols: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, cols)).astype(F32)


def spectrum(matrix: np.ndarray) -> np.ndarray:
    return np.linalg.svd(matrix.astype(float), compute_uv=False)


@pytest.mark.parametrize("shape", [(5, 5), (3, 17), (17, 3), (2, 2), (40, 64)])
def test_the_spectrum_becomes_flat_and_keeps_its_mean(shape):
    matrix = random_matrix(*shape)
    result = flatten(matrix)
    assert spectrum(result) == pytest.approx([spectrum(matrix).mean()] * min(shape), rel=1e-5)
    assert result == pytest.approx(reference.iso_newton_schulz(matrix), rel=1e-5, abs=1e-7)
    assert result.dtype == F32


def test_zero_rank_deficient_and_single_row_matrices():
    zero = np.zeros((3, 4), F32)
    assert flatten(zero).tobytes() == zero.tobytes()
    for shape in ((1, 9), (9, 1), (1, 1)):
        single = random_matrix(*shape)
        assert flatten(single).tobytes() == single.tobytes()
    # small integers: the product is exact, so that its rank is really 2
    left, right = (np.rint(8 * random_matrix(*shape, 1)) for shape in ((6, 2), (2, 8)))
    deficient = (left @ right).astype(F32)
    result = flatten(deficient)
    values, mean = spectrum(result), spectrum(deficient)[:2].sum() / 6
    assert values[:2] == pytest.approx([mean] * 2, rel=1e-5)
    assert values[2:] == pytest.approx([0.0] * 4, abs=1e-5 * mean)
    scale = np.float32(2.0) ** -120  # squares would vanish in f32
    assert flatten(deficient * scale) == pytest.approx(result * scale, rel=1e-5, abs=1e-42)


@pytest.mark.parametrize("threads", [1, 3])
def test_tensors_are_flattened_where_they_lie(threads):
    shapes = [(4, 6), (1, 5), (7, 2), (3, 3)]
    parts = [random_matrix(*shape, seed=i) for i, shape in enumerate(shapes)]
    flat = np.concatenate([part.ravel() for part in parts])
    flatten_all(flat, shapes, threads)
    expected = np.concatenate([flatten(part).ravel() for part in parts])
    assert flat == pytest.approx(expected, rel=1e-5)


def test_tensors_are_flattened_also_where_no_thread_can_be_had(monkeypatch):
    shapes = [(9, 4), (5, 5), (3, 8)]
    flat = random_matrix(1, sum(r * c for r, c in shapes))[0]
    alone = flat.copy()
    flatten_all(flat, shapes, 3)

    def start(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    flatten_all(alone, shapes, 3)
    assert alone == pytest.approx(flat, rel=1e-5)


def test_an_error_on_one_thread_is_that_of_all(monkeypatch):
    def broken(matrix):
        if matrix.shape == (5, 5):
            raise MemoryError
        return matrix

    monkeypatch.setattr("syncer.merge.iso.flatten", broken)
    with pytest.raises(MemoryError):
        flatten_all(np.ones(85, F32), [(9, 4), (5, 5), (3, 8)], 3)


def test_a_merge_of_iso_fragments_averages_corrects_and_steps():
    shapes = ((4, 6), (5, 3))
    layout = Layout((FragmentLayout(ISO, (24, 15), shapes),))
    params, momentum, *grads = (reference.noise(i, 39) for i in range(5))
    weights = [1.0, 2.0, 0.5]
    for correction in ("none", "heloco"):
        store = FragmentStore(layout, lr=0.7, momentum=0.9, threads=2, delta_correction=correction)
        store.adopt(0, params, state={"momentum": momentum})
        prepared = store.prepare(0, 1, [(i, 1, w, g) for i, (w, g) in
                                        enumerate(zip(weights, grads, strict=True))])
        merged = reference.merge_fragment(
            grads, weights, [24, 15], reference.MERGE_ISO, momentum,
            reference.Heloco() if correction == "heloco" else None, shapes)
        expected = reference.nesterov(params, momentum, merged, 0.7, 0.9)
        version = store.publish(prepared)
        assert version.params == pytest.approx(expected[0], rel=1e-5, abs=1e-6)
        assert version.momentum == pytest.approx(expected[1], rel=1e-5, abs=1e-6)
        assert prepared.gnorm == pytest.approx(float(reference.norm(merged)), rel=1e-5)


def test_a_result_that_is_not_finite_names_its_element():
    layout = Layout((FragmentLayout(ISO, (4, 4), ((2, 2), (2, 2))),))
    store = FragmentStore(layout, lr=1.0, momentum=0.0, threads=2)
    store.adopt(0, np.zeros(8, F32))
    big = F32(3e38)
    # rank 1: one singular value beyond f32, but half of it (the mean) fits
    fits = np.array([0] * 4 + [big] * 4, F32)
    store.discard(store.prepare(0, 1, [(0, 1, 1.0, fits)]))
    # the flattened matrix fits, the step from parameters at the other end does not
    over = np.array([0] * 4 + [big, big, big, -big], F32)
    store.adopt(0, np.array([0] * 4 + [-big] * 4, F32))
    with pytest.raises(NumericsError, match=r"iso merge of fragment 0 .* element 4 \(learners 0\)"):
        store.prepare(0, 1, [(0, 1, 1.0, over)])
    assert store.live_buffers == 2


@pytest.mark.parametrize("shapes", [(), ((2, 2),), ((2, 2), (3, 1))], ids=str)
def test_shapes_are_needed(shapes):
    with pytest.raises(ConfigError, match="rows and columns"):
        FragmentStore(Layout((FragmentLayout(ISO, (4, 4), shapes),)), lr=1.0, momentum=0.0)


def test_the_switch_is_set_while_held_and_restored_after():
    found = blas.switches()
    before = [switch.get() for switch in found]
    with blas.single_threaded() as outer:
        with blas.single_threaded():
            assert [switch.get() for switch in found] == [1] * len(found)
        assert [switch.get() for switch in found] == [1] * len(found)
        assert outer == bool(found)
    assert [switch.get() for switch in found] == before


def test_numpys_own_wheel_has_a_switch():
    name = np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]
    assert bool(blas.switches()) == ("openblas" in name)
