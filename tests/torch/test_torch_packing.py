"""Packing with operations of torch gives the bytes of the kernels."""

import pytest

from tests.torch.island import DEVICES, torch  # isort: split

import numpy as np

from syncer.kernels import axpby_blend, decode_bf16, decode_q4, encode_bf16, encode_q4
from syncer.protocol import DTYPE_BF16, DTYPE_F32, DTYPE_Q4, tensor_bytes
from syncer.torch.packing import blend, pack, unpack, widen

SIZES = [1, 2, 255, 256, 257, 1000, 70_001]


def cases(size: int) -> list[np.ndarray]:
    rng = np.random.default_rng(size)
    plain = rng.standard_normal(size).astype(np.float32)
    bits = rng.integers(0, 0x7F7FFFFF, size).astype(np.uint32) | rng.integers(
        0, 2, size).astype(np.uint32) << 31
    faint = (plain * 1e-41).astype(np.float32)
    sparse = plain.copy()
    sparse[::2] = -0.0
    return [plain, bits.view(np.float32), faint, sparse, np.zeros(size, np.float32)]


def packed(values: np.ndarray, dtype: int, device: str) -> bytes:
    return pack(torch.from_numpy(values).to(device), dtype).cpu().numpy().tobytes()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", SIZES)
def test_the_bytes_are_those_of_the_kernels(size, device):
    for values in cases(size):
        assert packed(values, DTYPE_F32, device) == values.tobytes()
        for dtype, encode in ((DTYPE_BF16, encode_bf16), (DTYPE_Q4, encode_q4)):
            expected = np.empty(tensor_bytes(size, dtype), np.uint8)
            encode(values, expected)
            assert packed(values, dtype, device) == expected.tobytes()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", SIZES)
def test_what_comes_back_is_that_of_the_kernels(size, device):
    for values in cases(size):
        for dtype, decode in ((DTYPE_BF16, decode_bf16), (DTYPE_Q4, decode_q4)):
            there = pack(torch.from_numpy(values).to(device), dtype)
            expected = np.empty(size, np.float32)
            decode(there.cpu().numpy(), expected, False)
            assert unpack(there, dtype, size).cpu().numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_q4_block_that_is_not_finite_says_so(value, device):
    values = np.ones(300, np.float32)
    values[7] = value
    expected = np.empty(tensor_bytes(300, DTYPE_Q4), np.uint8)
    encode_q4(values, expected)
    assert packed(values, DTYPE_Q4, device) == expected.tobytes()


@pytest.mark.parametrize("device", DEVICES)
def test_every_threshold_of_q4_is_met_from_both_sides(device):
    edges = np.array([0x3C3504F2, 0x3CB504F6, 0x3D3504F2, 0x3DB504F5, 0x3E3504F3, 0x3EB504F4,
                      0x3F3504F3], np.uint32)
    ratios = np.concatenate([edges - 1, edges, edges + 1]).view(np.float32)
    values = np.concatenate([ratios, -ratios, [np.float32(1)]]).astype(np.float32)
    expected = np.empty(tensor_bytes(values.size, DTYPE_Q4), np.uint8)
    encode_q4(values, expected)
    assert packed(values, DTYPE_Q4, device) == expected.tobytes()


@pytest.mark.parametrize("device", DEVICES)
def test_bf16_comes_back_wider(device):
    values = torch.randn(1000, device=device).to(torch.bfloat16)
    assert torch.equal(widen(values.view(torch.uint8), DTYPE_BF16), values.float())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("alpha", [0.5, 0.3, 0.9])
def test_a_blend_has_the_bits_of_the_kernel(alpha, device):
    for local, anchor in zip(cases(1000)[:3], cases(1001)[:3], strict=True):
        expected = local.copy()
        axpby_blend(expected, anchor[:1000].copy(), alpha)
        there = torch.from_numpy(local.copy()).to(device)
        found = blend(there, torch.from_numpy(anchor[:1000].copy()).to(device), alpha)
        assert found.cpu().numpy().tobytes() == expected.tobytes()
