"""q4 and the changes that broadcasts go down as (wire 10.3, 20.3), in plain NumPy; no syncer here.

The oracle of the kernels, of a scripted learner and of the simulated ones; must not be made fast.
"""

from __future__ import annotations

import numpy as np

from tests.golden.merge_reference import bf16_decode, bf16_encode

F32 = np.float32
LEVELS = np.array([0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1], F32)


def q4_encode(x: np.ndarray) -> bytes:
    """The definition with log2; for finite x."""
    padded = np.zeros(-(-x.size // 256) * 256, F32)
    padded[: x.size] = x
    rows = padded.reshape(-1, 256)
    scale = np.abs(rows).max(axis=1)
    safe = np.where(scale > 0, scale, F32(1))
    ratio = np.abs(rows) / safe[:, None]
    with np.errstate(divide="ignore"):
        level = np.clip(np.rint(np.log2(ratio.astype(np.float64)).astype(F32)) + 7, 0, 7)
    level = np.where(ratio > 0, level, 0).astype(np.uint8)
    nibble = level | np.where((rows < 0) & (level > 0), 8, 0).astype(np.uint8)
    packed = nibble[:, 0::2] | nibble[:, 1::2] << 4
    return b"".join(s.tobytes() + p.tobytes() for s, p in zip(scale, packed, strict=True))


def q4_decode(wire: bytes, n: int) -> np.ndarray:
    blocks = np.frombuffer(wire, np.uint8).reshape(-1, 132)
    scale = blocks[:, :4].copy().view(F32)
    nibble = np.stack([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=2).reshape(-1, 256)
    value = LEVELS[nibble & 7] * scale
    return np.where(nibble >= 8, -value, value).ravel()[:n].astype(F32)


def as_bulk(values: np.ndarray, dtype: int) -> np.ndarray:
    """The value of the bulk dtype (1 f32, 2 bf16) next to each."""
    return values if dtype == 1 else bf16_decode(bf16_encode(values))


def change_of(values: np.ndarray, anchor: np.ndarray) -> bytes:
    """What is told to who has the anchor."""
    return q4_encode(values - anchor)


def changed(anchor: np.ndarray, change: bytes, dtype: int) -> np.ndarray:
    """The anchor that it makes."""
    return as_bulk(anchor + q4_decode(change, anchor.size), dtype)
