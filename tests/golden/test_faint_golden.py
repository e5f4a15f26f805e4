"""The golden results of csrc/check_faint.c, computed again with NumPy.

Must not call a kernel: what `syncer kernels --check` expects is proved here without any.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest

from tests.golden import merge_reference as oracle

F32 = np.float32
N = 40003 + 16384 + 7
SOURCE = Path(__file__).parents[2] / "csrc" / "check_faint.c"


def random_bits(seed: int) -> np.ndarray:
    """N numbers of splitmix64(seed * 2**32 + i)."""
    z = np.arange(N, dtype=np.uint64) + np.uint64((seed << 32) + 0x9E3779B97F4A7C15 & 2**64 - 1)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ z >> np.uint64(shift)) * np.uint64(factor)
    return z ^ z >> np.uint64(31)


def faint(seed: int, *, ordinary: bool = False) -> np.ndarray:
    """As `faint` of check_faint.c."""
    r = random_bits(seed)
    kind, fraction, some = r & 7, r >> 8 & 0x7FFFFF, r >> 32 & 0xFFFF
    choices = [(kind == 0, np.zeros_like(r)), (kind == 4, 1 + some % 24 << 23 | fraction)]
    if ordinary:
        choices.append((kind > 4, 80 + some % 50 << 23 | fraction))
    bits = np.select(*zip(*choices, strict=True), fraction >> some % 23)
    return (bits | r >> 63 << 31).astype(np.uint32).view(F32)


def digest(*arrays: np.ndarray) -> list[str]:
    return [hashlib.sha256(array.tobytes()).hexdigest() for array in arrays]


def sums() -> list[float]:
    x, y = faint(21), faint(22)
    t = 0.8123 * x.astype(np.float64) + -0.2511 * y.astype(np.float64)
    return [float(oracle.sumsq(x)), float(oracle.dot(x, y)), float(oracle.blocked_sum(t * t))]


def codecs() -> list[str]:
    x = faint(23)
    x[np.arange(N) % 1024 > 255] = (
        x[np.arange(N) % 1024 > 255].view(np.uint32) & 0x807FFFFF).view(F32)
    rows = np.concatenate([x, np.zeros(-N % 256, F32)]).reshape(-1, 256)
    scale = np.abs(rows).max(axis=1)
    ratio = np.abs(rows) / np.where(scale > 0, scale, F32(1))[:, None]
    with np.errstate(divide="ignore"):
        level = np.rint(np.log2(ratio.astype(np.float64)).astype(F32)) + 7
    level = np.where(ratio > 0, np.clip(level, 0, 7), 0).astype(np.uint8)
    negative = (rows < 0) & (level > 0)
    nibble = level | negative.astype(np.uint8) << 3
    wire = np.concatenate(
        [scale.view(np.uint8).reshape(-1, 4), nibble[:, 0::2] | nibble[:, 1::2] << 4], axis=1)
    table = np.array([0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1], F32)
    value = table[level] * scale[:, None]
    return digest(wire, np.where(negative, -value, value).ravel()[:N])


def blends() -> list[str]:
    x, y = faint(24, ordinary=True), faint(25, ordinary=True)
    turned = 0.8123 * x.astype(np.float64) + -0.2511 * y.astype(np.float64)
    return digest(
        x + F32(0.75) * y, F32(0) + F32(0.3) * y, x * F32(-0.375),
        F32(0.3) * x + F32(1 - 0.3) * y, x + F32(0.375) * y, turned.astype(F32) * F32(1.37))


def steps() -> list[str]:
    p, b, a, g = (faint(26 + i, ordinary=i != 1) for i in range(4))
    lr, mu, period, k = F32(0.7), F32(0.9), F32(3), F32(0.225)
    nesterov = mu * b + g
    total = a + g
    applied = mu * b + total / period
    return digest(
        p - lr * (g + mu * nesterov), nesterov,
        p - lr * g,
        p - lr * (k * b + g / period), b, total,
        p - lr * (k * applied + g / period), applied, np.zeros(N, F32))


def expected() -> tuple[list[float], list[str]]:
    with np.errstate(under="ignore"):
        return sums(), [*codecs(), *blends(), *steps()]


@pytest.mark.skipif(not SOURCE.exists(), reason="the sources are not here")
def test_the_expected_results_are_numpys() -> None:
    text = SOURCE.read_text(encoding="utf-8")
    numbers = [float.fromhex(found) for found in re.findall(r"-?0x1\.\w+p[-+]\d+", text)]
    assert (numbers, re.findall(r'"([0-9a-f]{64})"', text)) == expected()


def test_faint_values_are_faint() -> None:
    x, y = np.abs(faint(1)), np.abs(faint(1, ordinary=True))
    least = np.finfo(F32).smallest_normal
    assert ((x > 0) & (x < least)).mean() > 0.7
    assert ((y > 0) & (y < least)).mean() > 0.3
    assert (y > 1e-14).mean() > 0.3
    assert (np.signbit(faint(1)) & (x == 0)).any()
