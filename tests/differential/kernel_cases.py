"""One entry per kernel: inputs made from a seed, a call, and the bytes it produced.

Must not compare anything: the tests run an entry under two variants or thread counts and compare.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import numpy as np

from syncer import kernels
from syncer.kernels import testing
from syncer.protocol import tensor_bytes
from tests.differential.guarded import Guarded

F32 = np.float32
SPECIAL_BITS = np.array(
    [
        # zeros and subnormals; bf16 ties; bf16 edges and the largest
        *(0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000),
        *(0x3F808000, 0x3F818000, 0xBF808000, 0x3F807FFF, 0x3F808001),
        *(0x00008000, 0x00018000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0xFF7FFFFF),
    ],
    np.uint32,
)
NONFINITE_BITS = np.array(
    [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345, 0x7F800001, 0xFFBFFFFF, 0x7FFFFFFF], np.uint32
)


class Scene:
    """Makes the guarded buffers of one run and remembers them for the canary check."""

    def __init__(self, seed: int, gap: int, *, nonfinite: bool, faint: bool) -> None:
        self.rng = np.random.default_rng(seed)
        self.gap = gap
        self.nonfinite = nonfinite
        self.faint = faint
        self._made: list[Guarded] = []

    def _guarded(self, nbytes: int, *, floats: bool) -> Guarded:
        made = Guarded(nbytes, self.gap * (4 if floats else 1))
        self._made.append(made)
        return made

    def values(self, n: int) -> np.ndarray:
        """n f32 values of all magnitudes that a sum or product can take, specials strewn in."""
        out = self._guarded(4 * n, floats=True).floats
        out[:] = self.rng.standard_normal(n) * 10.0 ** self.rng.integers(-12, 9, n)
        self._strew(out.view(np.uint32), SPECIAL_BITS[:6])
        if self.faint:
            self._fade(out.view(np.uint32))
        if self.nonfinite:
            self._strew(out.view(np.uint32), NONFINITE_BITS)
        return out

    def _fade(self, u: np.ndarray) -> None:
        """Most stretches of 512 values become subnormal, zeros, or a mixture around those.

        A parameter that gets no gradient looks so for long: its momentum and its deltas do."""
        for begin in range(0, u.size, 512):
            part = u[begin : begin + 512]
            sign = part & np.uint32(1 << 31)
            fraction = self.rng.integers(0, 1 << 23, part.size, dtype=np.uint32)
            fraction >>= self.rng.integers(0, 24, part.size, dtype=np.uint32)
            exponent = self.rng.integers(0, 60, part.size, dtype=np.uint32)
            kind = self.rng.integers(0, 8)
            if kind < 3:
                part[:] = sign | fraction
            elif kind == 3:
                part[:] = sign
            elif kind == 4:
                part[:] = sign | fraction | exponent << np.uint32(23)
            elif kind == 5:
                some = self.rng.random(part.size) < 0.3
                part[some] = (sign | fraction)[some]

    def any_bits(self, n: int) -> np.ndarray:
        """n f32 of uniformly random bits, specials strewn in; NaN and Inf only when asked for."""
        out = self._guarded(4 * n, floats=True).floats
        u = out.view(np.uint32)
        u[:] = self.rng.integers(0, 1 << 32, n, dtype=np.uint32)
        self._strew(u, SPECIAL_BITS)
        if self.nonfinite:
            self._strew(u, NONFINITE_BITS)
        else:
            u[(u & 0x7F800000) == 0x7F800000] ^= np.uint32(0x40000000)
        return out

    def any_bytes(self, nbytes: int) -> np.ndarray:
        out = self._guarded(nbytes, floats=False).bytes
        out[:] = self.rng.integers(0, 256, nbytes, dtype=np.uint8)
        return out

    def out_floats(self, n: int) -> np.ndarray:
        out = self._guarded(4 * n, floats=True).floats
        out[:] = 12345.0
        return out

    def out_bytes(self, nbytes: int) -> np.ndarray:
        out = self._guarded(nbytes, floats=False).bytes
        out[:] = 0x77
        return out

    def intact(self) -> bool:
        return all(buffer.intact() for buffer in self._made)

    def _strew(self, u: np.ndarray, bits: np.ndarray) -> None:
        if u.size:
            places = self.rng.integers(0, u.size, min(u.size, len(bits)))
            u[places] = self.rng.permutation(bits)[: len(places)]


Run = Callable[[Scene, int, int], list[bytes]]


def number(value: float) -> bytes:
    return struct.pack("<d", value)


def canonical(x: np.ndarray) -> bytes:
    """Bytes with every NaN made the same: which payload an addition of NaNs keeps is the CPU's."""
    return np.where(np.isnan(x), F32(np.nan), x).tobytes()


def _decode(dtype: int) -> Run:
    def run(scene: Scene, n: int, threads: int) -> list[bytes]:
        wire = scene.out_bytes(tensor_bytes(n, dtype))
        values = scene.any_bits(n).view(np.uint32)
        if dtype == 1:
            wire[:] = values.view(np.uint8)
        elif dtype == 2:
            wire[:] = (values >> 16).astype(np.uint16).view(np.uint8)
        else:
            wire[:] = scene.rng.integers(0, 256, wire.size, dtype=np.uint8)
            scales = scene.any_bits(wire.size // 132).view(np.uint8).reshape(-1, 4)
            blocks = wire.reshape(-1, 132)
            blocks[:, :4] = scales
            if not scene.nonfinite:
                blocks[:, 3] &= 0x7F
        found = []
        for negate in (False, True):
            out = scene.out_floats(n)
            bad = testing.decode(dtype, wire, out, negate, threads)
            found += [out.tobytes(), number(bad)]
        return found

    return run


def _encode_bf16(scene: Scene, n: int, threads: int) -> list[bytes]:
    out = scene.out_bytes(2 * n)
    kernels.encode_bf16(scene.any_bits(n), out, threads)
    return [out.tobytes()]


def _encode_q4(scene: Scene, n: int, threads: int) -> list[bytes]:
    out = scene.out_bytes(tensor_bytes(n, 3))
    found = []
    for source in (scene.any_bits(n), scene.values(n), near_thresholds(scene, n)):
        kernels.encode_q4(source, out, threads)
        found.append(out.tobytes())
    return found


def near_thresholds(scene: Scene, n: int) -> np.ndarray:
    """Values whose ratio to the block's largest falls within some ulp of a q4 threshold."""
    out = scene.out_floats(n)
    powers = 2.0 ** -(scene.rng.integers(0, 8, n) + 0.5)
    scale = scene.rng.uniform(0.5, 2.0)
    out[:] = powers * scale * np.where(scene.rng.random(n) < 0.5, -1, 1)
    out.view(np.uint32)[:] += scene.rng.integers(-6, 7, n).astype(np.int64).astype(np.uint32)
    out[::256] = scale
    return out


def _sums(scene: Scene, n: int, threads: int) -> list[bytes]:
    x, y = scene.values(n), scene.values(n)
    three = testing.three_sums(x, y, threads)
    assert three[0] == kernels.sumsq(x, threads) or scene.nonfinite
    assert three[1] == kernels.dot(x, y, threads) or scene.nonfinite
    assert three[2] == kernels.sumsq(y, threads) or scene.nonfinite
    rotated = testing.rotated_sumsq(x, y, 0.7312, -1.1e-3, threads)
    return [b"nan" if math.isnan(v) else number(v) for v in (*three, rotated)]


def _blends(scene: Scene, n: int, threads: int) -> list[bytes]:
    out, g = scene.values(n), scene.values(n)
    found = []
    testing.accumulate(out, g, 0.37, threads)
    found.append(canonical(out))
    testing.scale(out, -1.7, threads)
    found.append(canonical(out))
    kernels.axpby_blend(out, g, 0.3, threads)
    found.append(canonical(out))
    testing.accumulate_first(out, g, 0.37, threads)
    return [*found, canonical(out), number(kernels.first_nonfinite(g, threads))]


def _heloco(scene: Scene, n: int, threads: int) -> list[bytes]:
    d, m, out = scene.values(n), scene.values(n), scene.out_floats(n)
    testing.shrink(out, d, m, 0.21, threads)
    found = [canonical(out)]
    testing.rotate(out, d, m, 0.8123, -0.2511, 1.37, threads)
    found.append(canonical(out))
    testing.shrink(d, d, m, 0.21, threads)
    found.append(canonical(d))
    testing.rotate(d, d, m, 0.8123, -0.2511, 1.37, threads)
    return [*found, canonical(d)]


def _outer(scene: Scene, n: int, threads: int) -> list[bytes]:
    p, b, a, g = (scene.values(n) for _ in range(4))
    po, bo, ao = (scene.out_floats(n) for _ in range(3))
    bad = testing.nesterov(p, b, g, 0.7, 0.9, po, bo, threads)
    found = [number(bad), canonical(po), canonical(bo)]
    found += [number(testing.sgd(p, g, 0.7, po, threads)), canonical(po)]
    for apply in (False, True):
        bad = testing.delayed_nesterov(p, b, a, g, 0.7, 0.9, 3, 0.25, apply, po, bo, ao, threads)
        found += [number(bad), canonical(po), canonical(bo), canonical(ao)]
    testing.nesterov(p, b, g, 0.7, 0.9, p, b, threads)
    return [*found, canonical(p), canonical(b)]


CASES: dict[str, tuple[str, Run]] = {
    "decode_f32": ("codec", _decode(1)),
    "decode_bf16": ("codec", _decode(2)),
    "decode_q4": ("codec", _decode(3)),
    "encode_bf16": ("codec", _encode_bf16),
    "encode_q4": ("codec", _encode_q4),
    "sums": ("reduce", _sums),
    "blends": ("blend", _blends),
    "heloco": ("blend", _heloco),
    "outer": ("blend", _outer),
}


def run_case(
    name: str, n: int, *, seed: int, gap: int = 0, nonfinite: bool = False, faint: bool = False,
    threads: int = 1,
) -> list[bytes]:
    """Bytes that the kernels of one entry produced; fails when they wrote outside."""
    scene = Scene(seed, gap, nonfinite=nonfinite, faint=faint)
    with np.errstate(all="ignore"):
        found = CASES[name][1](scene, n, threads)
    assert scene.intact(), f"{name} of {n} elements wrote outside its buffers"
    return found
