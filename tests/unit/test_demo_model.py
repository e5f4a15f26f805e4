"""The byte model: gradients against finite differences, a uniform start, learning on real text."""

import numpy as np
import pytest

from syncer.demo.model import byte_model, corpus
from syncer.demo.model.adamw import AdamW


def some_windows(count, seed=0):
    rng = np.random.default_rng(seed)
    text = np.frombuffer(b"def spam(eggs):\n    return eggs * 2\n" * 40, np.uint8)
    return byte_model.sample_windows(text, count, rng)


def spread(seed=3):
    """A float64 model away from its initial values, so that no gradient is accidentally zero."""
    net = byte_model.ByteModel(seed, np.float64)
    net.flat += 0.05 * np.random.default_rng(seed).standard_normal(net.flat.shape)
    return net


@pytest.mark.parametrize("name", list(byte_model.SHAPES))
def test_gradient_matches_finite_differences(name):
    net, windows = spread(), some_windows(24)
    net.loss_and_gradient(windows)
    analytic = byte_model.named_views(net.gradient.copy())[name]
    tensor = net.parameters[name]
    rng = np.random.default_rng(len(name))
    largest = np.argsort(np.abs(analytic).ravel())[-6:]
    checked = np.concatenate((largest, rng.integers(0, tensor.size, 6)))
    step = 1e-6
    for index in checked:
        kept = tensor.flat[index]
        tensor.flat[index] = kept + step
        above = net.bits_per_byte(windows)
        tensor.flat[index] = kept - step
        below = net.bits_per_byte(windows)
        tensor.flat[index] = kept
        numeric = (above - below) / (2 * step) / byte_model.BITS_PER_NAT
        assert numeric == pytest.approx(analytic.flat[index], rel=1e-4, abs=1e-8)
    assert np.abs(analytic).max() > 1e-4, "a gradient of zeros would prove nothing"


def test_loss_of_both_paths_agrees():
    net, windows = spread(), some_windows(100)
    assert net.loss_and_gradient(windows) == pytest.approx(net.bits_per_byte(windows, batch=7))


def test_starts_at_eight_bits_per_byte():
    text = corpus.load(0, 3).held_out
    for seed in range(3):
        bits = byte_model.ByteModel(seed).bits_per_byte(byte_model.even_windows(text, 2048))
        assert abs(bits - 8.0) < 0.3


def test_same_seed_same_model_and_views_share_memory():
    one, two = byte_model.ByteModel(5), byte_model.ByteModel(5)
    assert np.array_equal(one.flat, two.flat)
    assert not np.array_equal(one.flat, byte_model.ByteModel(6).flat)
    assert sum(view.size for view in one.parameters.values()) == byte_model.NUMEL == one.flat.size
    for view in one.parameters.values():
        assert view.flags.c_contiguous
        assert np.shares_memory(view, one.flat)
    assert 100_000 <= byte_model.NUMEL < 1_000_000


def test_rows_are_summed_by_byte():
    values = np.array([3, 255, 3, 0, 3], np.uint8)
    rows = np.arange(10, dtype=np.float32).reshape(5, 2)
    out = np.full((256, 2), 7, np.float32)
    byte_model.sum_rows_by_byte(values, rows, out)
    expected = np.zeros((256, 2), np.float32)
    np.add.at(expected, values, rows)
    assert np.array_equal(out, expected)


def test_windows():
    text = np.arange(200, dtype=np.uint8)
    windows = byte_model.even_windows(text, 5)
    assert windows.shape == (5, byte_model.CONTEXT + 1)
    assert (np.diff(windows.astype(int), axis=1) == 1).all()
    assert windows[0, 0] == 0
    assert len(byte_model.even_windows(text, 10_000)) == len(text) - byte_model.CONTEXT
    last = byte_model.even_windows(text, 10_000)[-1, -1]
    assert last == 199, "every byte of the text can be a target"


def test_model_learns_real_text():
    text = corpus.load(0, 1)
    net, optimizer = byte_model.ByteModel(0), AdamW(byte_model.NUMEL)
    held_out, rng = byte_model.even_windows(text.held_out, 256), np.random.default_rng(0)
    before = net.bits_per_byte(held_out)
    for _ in range(40):
        net.loss_and_gradient(byte_model.sample_windows(text.shard, 32, rng))
        optimizer.step(net.flat, net.gradient, lr=2e-3)
    assert net.bits_per_byte(held_out) < before - 2.0
