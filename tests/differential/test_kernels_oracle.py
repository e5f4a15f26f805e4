"""Every kernel variant against the NumPy oracle of the merge, by bit pattern."""

from __future__ import annotations

import numpy as np
import pytest

from syncer import kernels
from syncer.kernels import testing
from syncer.protocol import tensor_bytes
from tests.golden import merge_reference as oracle
from tests.golden.change_reference import q4_decode, q4_encode

F32 = np.float32
LENGTHS = [0, 1, 7, 8, 9, 17, 1003, 16383, 16384, 16385, 40003]


def variants(family: str) -> list[str]:
    return [name for name, usable in kernels.variants()[family] if usable]


@pytest.fixture(params=variants("codec"))
def codec(request):
    with testing.forced(codec=request.param):
        yield request.param


@pytest.fixture(params=variants("blend"))
def blend(request):
    with testing.forced(blend=request.param):
        yield request.param


@pytest.fixture(params=variants("reduce"))
def reduce(request):
    with testing.forced(reduce=request.param):
        yield request.param


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def test_bf16_encode_of_every_high_half(codec: str) -> None:
    """All 65,536 high halves with the low halves around every rounding decision."""
    high = np.arange(65536, dtype=np.uint32) << 16
    for low in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xC000, 0xFFFF):
        values = (high | np.uint32(low)).view(F32)
        out = np.empty(values.size, np.uint16)
        kernels.encode_bf16(values, out)
        assert same_bits(out, oracle.bf16_encode(values)), hex(low)


def test_bf16_decode_of_every_value(codec: str) -> None:
    wire = np.arange(65536, dtype=np.uint16)
    out = np.empty(65536, F32)
    assert kernels.decode_bf16(wire, out, False) == 0x7F80
    assert same_bits(out, oracle.bf16_decode(wire))
    kernels.decode_bf16(wire, out, True)
    assert same_bits(out.view(np.uint32), oracle.bf16_decode(wire).view(np.uint32) ^ (1 << 31))


@pytest.mark.parametrize("n", LENGTHS)
def test_q4_against_the_definition(codec: str, n: int) -> None:
    rng = np.random.default_rng(n)
    x = (rng.standard_normal(n) * 10.0 ** rng.integers(-3, 3, n)).astype(F32)
    x[::7] = 0
    x[300:600] = 0  # a zero block
    x[700:900] *= F32(1e-40)  # subnormals
    wire = bytearray(tensor_bytes(n, 3))
    kernels.encode_q4(x, wire)
    assert bytes(wire) == q4_encode(x)
    out = np.empty(n, F32)
    assert kernels.decode_q4(wire, out, False) == -1
    assert same_bits(out, q4_decode(bytes(wire), n))


@pytest.mark.parametrize("n", LENGTHS)
def test_blocked_sums(reduce: str, n: int) -> None:
    rng = np.random.default_rng(n)
    x = (rng.standard_normal(n) * 10.0 ** rng.integers(-6, 6, n)).astype(F32)
    y = rng.standard_normal(n).astype(F32)
    assert kernels.sumsq(x) == oracle.sumsq(x)
    assert testing.norm(x, 3) == oracle.norm(x)
    assert kernels.dot(x, y) == oracle.dot(x, y)
    assert testing.three_sums(x, y) == (oracle.sumsq(x), oracle.dot(x, y), oracle.sumsq(y))
    t = 0.7312 * x.astype(np.float64) + -1.1e-3 * y.astype(np.float64)
    assert testing.rotated_sumsq(x, y, 0.7312, -1.1e-3) == oracle.blocked_sum(t * t)


def test_sum_over_more_blocks_than_one_window(reduce: str) -> None:
    x = oracle.noise(3, 515 * 16384 + 11)
    expected = oracle.sumsq(x)
    assert [kernels.sumsq(x, threads) for threads in (1, 2, 3)] == [expected] * 3


def heloco_with_kernels(d: np.ndarray, m: np.ndarray) -> tuple[np.ndarray, str]:
    """The correction written with kernels, in the order the numerics fix."""
    h = oracle.Heloco()
    dd, dm, mm = testing.three_sums(d, m)
    du, length = np.sqrt(dd), np.sqrt(mm)
    out = d.copy()
    if du < h.eps or length < h.eps:
        return out, "skip"
    c = dm / (du * length)
    if c >= h.c_ok:
        return out, "pass"
    conf = du / (du + h.kappa * length + h.eps)
    if c < 0.0:
        beta = min(h.k_s * (-c) * conf, h.beta_max)
        testing.shrink(out, d, m, -beta * c * du / length)
        return out, "shrink"
    lam = min(h.k_d * (1.0 - c) * conf, 1.0)
    wu, wv = (1.0 - lam) / du, lam / length
    s = du / max(np.sqrt(testing.rotated_sumsq(d, m, wu, wv)), h.eps)
    testing.rotate(out, d, m, wu, wv, s)
    return out, "rotate"


@pytest.mark.parametrize("n", [7, 1003, 40003])
def test_heloco_branches(blend: str, n: int) -> None:
    m = oracle.noise(9, n)
    seen = set()
    for pull in (0.6, 0.05, 0.0, -0.05, -0.7):
        d = oracle.noise(2, n) + F32(pull) * m
        expected, branch, _ = oracle.heloco_correct(d, m)
        found, ours = heloco_with_kernels(d, m)
        assert (ours, found.tobytes()) == (branch, expected.tobytes())
        seen.add(ours)
    assert {"pass", "shrink"} <= seen
    assert "rotate" in seen or n == 7


@pytest.mark.parametrize("n", LENGTHS)
def test_average_and_nesterov(blend: str, n: int) -> None:
    grads = [oracle.noise(seed, n) for seed in (1, 2, 3)]
    weights = [1024.0, 333.25, 2.5e6]
    merged = np.empty(n, F32)
    for i, (g, w) in enumerate(zip(grads, weights, strict=True)):
        fold = testing.accumulate if i else testing.accumulate_first
        fold(merged, g, w / sum(weights))
    assert same_bits(merged, oracle.merge_avg(grads, weights))
    params, momentum = oracle.noise(4, n), oracle.noise(5, n)
    expected = oracle.nesterov(params, momentum, merged, 0.7, 0.9)
    out_params, out_momentum = np.empty(n, F32), np.empty(n, F32)
    bad = testing.nesterov(params, momentum, merged, 0.7, 0.9, out_params, out_momentum)
    assert bad == -1
    assert same_bits(out_params, expected[0])
    assert same_bits(out_momentum, expected[1])
    testing.sgd(params, merged, 0.7, out_params)
    assert same_bits(out_params, params - F32(0.7) * merged)


@pytest.mark.parametrize("c", [0.0, 0.25])
@pytest.mark.parametrize("n", LENGTHS)
def test_delayed_nesterov(blend: str, n: int, c: float) -> None:
    state = [oracle.noise(4, n), np.zeros(n, F32), np.zeros(n, F32)]
    ours = [x.copy() for x in state]
    for count in range(5):
        g = oracle.noise(20 + count, n)
        *state, _ = oracle.delayed_nesterov(*state, count, g, 0.7, 0.9, 2, c)
        fresh = [np.full(n, np.nan, F32) for _ in range(3)]
        apply = (count + 1) % 2 == 0
        assert testing.delayed_nesterov(*ours, g, 0.7, 0.9, 2, c, apply, *fresh) == -1
        ours = fresh
        for found, expected in zip(ours, state, strict=True):
            assert same_bits(found, expected)
