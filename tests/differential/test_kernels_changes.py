"""Changes between versions against their NumPy oracle, by bit pattern, in every codec variant."""

from __future__ import annotations

import numpy as np
import pytest

from syncer import kernels
from syncer.kernels import testing
from syncer.protocol import tensor_bytes
from tests.golden.change_reference import as_bulk, change_of, changed
from tests.golden.merge_reference import bf16_encode

F32 = np.float32
LENGTHS = [1, 7, 255, 256, 257, 2047, 2048, 2049, 16384, 40003]


@pytest.fixture(params=[name for name, usable in kernels.variants()["codec"] if usable])
def codec(request):
    with testing.forced(codec=request.param):
        yield request.param


def on_wire(values: np.ndarray, dtype: int) -> bytes:
    return values.tobytes() if dtype == 1 else bf16_encode(values).tobytes()


def made(values: np.ndarray, base: bytes, dtype: int, threads: int) -> tuple[bytes, bytes, int]:
    """(change, what it makes, first element that is not finite)"""
    change, out = bytearray(tensor_bytes(values.size, 3)), bytearray(len(base))
    bad = kernels.encode_change(dtype, values, base, change, out, threads)
    return bytes(change), bytes(out), bad


def applied(base: bytes, change: bytes, dtype: int, threads: int) -> bytes:
    out = bytearray(len(base))
    kernels.apply_change(dtype, base, change, out, threads)
    return bytes(out)


@pytest.mark.parametrize("dtype", [1, 2])
@pytest.mark.parametrize("n", LENGTHS)
def test_against_the_definition(codec: str, n: int, dtype: int) -> None:
    rng = np.random.default_rng(n)
    anchor = as_bulk(rng.standard_normal(n).astype(F32), dtype)
    values = anchor + (rng.standard_normal(n) * 10.0 ** rng.integers(-6, 1, n)).astype(F32)
    values[::9] = anchor[::9]
    values[300:600] = anchor[300:600]  # a block that has not changed
    values[700:900] = anchor[700:900] = F32(1e-40)  # subnormals
    expected = change_of(values, anchor)
    for threads in (1, 3):
        change, out, bad = made(values, on_wire(anchor, dtype), dtype, threads)
        assert change == expected
        assert bad == -1
        assert out == on_wire(changed(anchor, change, dtype), dtype)
        assert applied(on_wire(anchor, dtype), change, dtype, threads) == out


@pytest.mark.parametrize("dtype", [1, 2])
def test_nothing_drifts(dtype: int) -> None:
    """What a change leaves out is in the next one: of values that stand still nearly all is told
    after a few; and while they move, an anchor stays about one change behind them."""
    rng = np.random.default_rng(5)
    values = rng.standard_normal(5000).astype(F32)
    base = on_wire(np.zeros(5000, F32), dtype)
    for _ in range(40):
        values += (0.01 * rng.standard_normal(5000)).astype(F32)
        _, base, _ = made(values, base, dtype, 1)
    anchor = np.frombuffer(base, "<f4") if dtype == 1 else as_bulk(
        (np.frombuffer(base, "<u2").astype(np.uint32) << 16).view(F32), 1)
    assert np.abs(values - anchor).max() < 0.04
    for _ in range(12):
        _, base, _ = made(values, base, dtype, 1)
    if dtype == 1:
        np.testing.assert_allclose(np.frombuffer(base, "<f4"), values, atol=1e-5)
    else:
        nearest = on_wire(values, 2)
        apart = np.abs(np.frombuffer(base, "<i2").astype(int) - np.frombuffer(nearest, "<i2"))
        assert (apart <= 1).mean() > 0.99


@pytest.mark.parametrize("dtype", [1, 2])
@pytest.mark.parametrize("at", [0, 2050, 16390])
def test_what_would_be_infinite_is_told(codec: str, dtype: int, at: int) -> None:
    """A difference above the largest number, and a level that rounds up above it."""
    largest = as_bulk(np.array([3.38e38], F32), 2)[0]
    anchor, values = np.zeros(20000, F32), np.zeros(20000, F32)
    anchor[at], values[at] = -largest, largest
    assert made(values, on_wire(anchor, dtype), dtype, 2)[2] == at // 256 * 256
    anchor[at], values[at] = 0, largest
    anchor[at + 1], values[at + 1] = largest / 4, largest  # 3/4 of the scale is told as all of it
    assert made(values, on_wire(anchor, dtype), dtype, 2)[2] == at + 1


@pytest.mark.parametrize("n", [256, 257, 2304, 5000])
@pytest.mark.parametrize("wrong", [np.inf, -np.inf, np.nan, 3.39e38])
def test_what_a_base_that_is_not_finite_becomes(codec: str, n: int, wrong: float) -> None:
    """As defined, whole blocks and the rest of one; the others of its block are untouched by it."""
    rng = np.random.default_rng(n)
    base = rng.standard_normal(n).astype(F32)
    base[[3, n // 2, n - 1]] = wrong
    base = as_bulk(base, 2)
    change = change_of(rng.standard_normal(n).astype(F32), np.zeros(n, F32))
    with np.errstate(invalid="ignore", over="ignore"):
        expected = on_wire(changed(base, change, 2), 2)
    assert applied(on_wire(base, 2), change, 2, 1) == expected


def test_lengths_and_dtypes_are_checked() -> None:
    values, base, change, out = np.zeros(3, F32), bytes(6), bytearray(132), bytearray(6)
    for wrong in ((3, values, base, change, out), (2, values, base[:4], change, out),
                  (2, values, base, change[:4], out), (2, values, base, change, out[:4])):
        with pytest.raises(ValueError, match=r"elements take|expected 1"):
            kernels.encode_change(*wrong)
    for wrong in ((3, base, change, out), (2, base[:5], change, out), (2, base, change[:4], out),
                  (2, base, change, out[:4])):
        with pytest.raises(ValueError, match=r"elements take|expected 1"):
            kernels.apply_change(*wrong)
