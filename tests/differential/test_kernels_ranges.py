"""Byte ranges of an encoding: every cut, with NaN, -0.0, subnormals, and every variant."""

from __future__ import annotations

import numpy as np
import pytest

from syncer import kernels
from syncer.kernels import testing
from syncer.protocol import tensor_bytes

F32 = np.float32
NEAR_ZERO = [0x80000000, 0x00000001, 0x807FFFFF]
VALUES = np.array(
    [0x7FC12345, *NEAR_ZERO, 0x3F808000, 0x7F800000, 0x3F818000, 0xC0490FDB], np.uint32
).view(F32)


@pytest.fixture(params=[name for name, usable in kernels.variants()["codec"] if usable])
def codec(request):
    with testing.forced(codec=request.param):
        yield request.param


def whole(dtype: int, x: np.ndarray) -> bytes:
    out = bytearray(tensor_bytes(x.size, dtype))
    if dtype == 1:
        return x.tobytes()
    (kernels.encode_bf16 if dtype == 2 else kernels.encode_q4)(x, out)
    return bytes(out)


def cut(dtype: int, x: np.ndarray, begin: int, end: int, threads: int = 1) -> bytes:
    out = bytearray(end - begin)
    testing.encode_range(dtype, x, begin, end, out, threads)
    return bytes(out)


@pytest.mark.parametrize("dtype", [1, 2])
@pytest.mark.parametrize("n", [0, 1, 2, 3, 19])
def test_every_cut_of_short_arrays(codec: str, dtype: int, n: int) -> None:
    x = np.resize(VALUES, n)
    expected = whole(dtype, x)
    for begin in range(len(expected) + 1):
        for end in range(begin, len(expected) + 1):
            assert cut(dtype, x, begin, end) == expected[begin:end], (begin, end)


@pytest.mark.parametrize("n", [1, 256, 300])
def test_cuts_inside_and_across_q4_blocks(codec: str, n: int) -> None:
    x = np.resize(VALUES[np.isfinite(VALUES)], n)
    expected = whole(3, x)
    places = [p for p in (0, 1, 3, 4, 5, 131, 132, 133, 200, 263, 264) if p <= len(expected)]
    for begin in places:
        for end in places[places.index(begin) :]:
            assert cut(3, x, begin, end) == expected[begin:end], (begin, end)


@pytest.mark.parametrize("dtype", [1, 2, 3])
@pytest.mark.parametrize("threads", [1, 3])
def test_chunks_of_a_long_array_join_to_the_whole(codec: str, dtype: int, threads: int) -> None:
    x = np.random.default_rng(4).standard_normal(150_001).astype(F32)
    expected = whole(dtype, x)
    for chunk in (65_537, 200_000):
        starts = range(0, len(expected), chunk)
        parts = [cut(dtype, x, b, min(b + chunk, len(expected)), threads) for b in starts]
        assert b"".join(parts) == expected


def test_ranges_outside_are_refused() -> None:
    x = np.zeros(3, F32)
    for begin, end in ((0, 13), (5, 4), (13, 13)):
        with pytest.raises(ValueError, match="0 <= begin <= end <= 12"):
            testing.encode_range(1, x, begin, end, bytearray(max(0, end - begin)))
    with pytest.raises(ValueError, match="out: expected 4 bytes, found 5"):
        testing.encode_range(1, x, 0, 4, bytearray(5))
