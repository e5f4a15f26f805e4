"""Every kernel variant against portable, and every thread count against one, by bit pattern."""

from __future__ import annotations

import numpy as np
import pytest

from syncer import kernels
from syncer.kernels import testing
from tests.differential.kernel_cases import CASES, run_case

F32 = np.float32
SHORT = [*range(20), 23, 24, 25, 29, 31, 32, 33, 47, 61, 63, 64, 65, 127, 128, 129]
BLOCKS = [251, 255, 256, 257, 509, 511, 512, 513, 1021, 4095, 4096, 4097, 4099, 8191]
LONG = [16381, 16383, 16384, 16385, 32767, 32768, 32769, 49157, 65535, 65536, 65537, 131_075]
STREAMED = (8 << 20) // 4 + 37  # past the size from which outputs bypass the cache
FAST = [
    (name, variant)
    for name, (family, _) in CASES.items()
    for variant, usable in kernels.variants()[family]
    if usable and variant != "portable"
]
ALL = [
    (name, variant)
    for name, (family, _) in CASES.items()
    for variant, usable in kernels.variants()[family]
    if usable
]


def both(name: str, variant: str, n: int, **how) -> tuple[list[bytes], list[bytes]]:
    family = CASES[name][0]
    with testing.forced(**{family: "portable"}):
        expected = run_case(name, n, **how)
    with testing.forced(**{family: variant}):
        if how.get("faint"):
            meet_a_subnormal()
        return expected, run_case(name, n, **how)


@pytest.mark.parametrize(("name", "variant"), FAST)
@pytest.mark.parametrize("nonfinite", [False, True], ids=["finite", "nonfinite"])
def test_short_lengths_at_every_place(name: str, variant: str, nonfinite: bool) -> None:
    for n in SHORT + BLOCKS:
        for gap in (0, 1, 3) if n < 70 else (n % 5,):
            expected, found = both(name, variant, n, seed=n, gap=gap, nonfinite=nonfinite)
            assert found == expected, f"{n} elements, {gap} before the page"


@pytest.mark.parametrize(("name", "variant"), FAST)
def test_block_edges(name: str, variant: str) -> None:
    for n in LONG:
        expected, found = both(name, variant, n, seed=n, gap=n % 4, nonfinite=n % 2 == 1)
        assert found == expected, f"{n} elements"


@pytest.mark.parametrize(("name", "variant"), FAST)
@pytest.mark.parametrize("nonfinite", [False, True], ids=["finite", "nonfinite"])
def test_subnormal_stretches(name: str, variant: str, nonfinite: bool) -> None:
    """Many seeds of few strips: which path a strip takes depends on all of its values."""
    for seed in range(24):
        n = 3 * 1024 + seed % 9
        expected, found = both(name, variant, n, seed=seed, gap=seed % 4, nonfinite=nonfinite,
                               faint=True)
        assert found == expected, f"seed {seed}"


def meet_a_subnormal() -> None:
    """After this a variant that waits for the CPU to note one has seen it."""
    testing.scale(np.full(64, 1e-40, F32), 0.3)


BLENDS = [name for name, usable in kernels.variants()["blend"] if usable]


def dead_strip(n: int, seed: int) -> tuple[np.ndarray, ...]:
    """Parameters, and momentum and gradients that are subnormal or zeros of both signs."""
    rng = np.random.default_rng(seed)
    fraction = rng.integers(0, 1 << 23, (2, n), dtype=np.uint32) >> rng.integers(0, 30, (2, n))
    fraction[1] *= rng.random(n) < 0.3
    signs = rng.integers(0, 2, (2, n), dtype=np.uint32) << np.uint32(31)
    momentum, gradient = (fraction.astype(np.uint32) | signs).view(F32)
    return rng.standard_normal(n).astype(F32), momentum, gradient


@pytest.mark.parametrize("variant", BLENDS)
@pytest.mark.parametrize("mu", [0.9, 1.0, 0.5, 0.0, 1.5, -0.9])
def test_a_step_of_a_dead_parameter(variant: str, mu: float) -> None:
    """As NumPy computes it; also where one parameter is small enough to notice the step."""
    n = 3 * 1024 + 5
    params, momentum, gradient = dead_strip(n, 7)
    params[1100:1103] = 0.0, 1e-40, -1e-30
    expected = F32(mu) * momentum + gradient
    moved = params - F32(0.7) * (gradient + F32(mu) * expected)
    with testing.forced(blend=variant):
        meet_a_subnormal()
        assert testing.nesterov(params, momentum, gradient, 0.7, mu, params, momentum) == -1
    assert momentum.tobytes() == expected.tobytes()
    assert params.tobytes() == moved.tobytes()


@pytest.mark.parametrize("variant", BLENDS)
def test_momentum_without_gradients_ends_at_four_units(variant: str) -> None:
    n = 1024
    params, momentum = np.ones(n, F32), np.full(n, 1e-3, F32)
    momentum[::2] *= -1
    with testing.forced(blend=variant):
        for _ in range(950):
            testing.nesterov(params, momentum, np.zeros(n, F32), 0.7, 0.9, params, momentum)
    assert set(momentum.view(np.uint32).tolist()) == {4, 0x80000004}
    assert len(set(params[::2].tolist())) == 1


@pytest.mark.parametrize(("name", "variant"), ALL)
def test_thread_counts_give_the_same_bits(name: str, variant: str) -> None:
    with testing.forced(**{CASES[name][0]: variant}):
        for n in (3 * 16384 - 1, 8 * 16384 + 5):
            for nonfinite in (False, True):
                one = run_case(name, n, seed=n, gap=1, nonfinite=nonfinite)
                for threads in (2, 3, 8):
                    many = run_case(name, n, seed=n, gap=1, nonfinite=nonfinite, threads=threads)
                    assert many == one, f"{n} elements, {threads} threads"


@pytest.mark.parametrize(
    ("name", "variant"), [entry for entry in FAST if CASES[entry[0]][0] != "reduce"]
)
@pytest.mark.parametrize("gap", [0, 3])
def test_stores_past_the_cache(name: str, variant: str, gap: int) -> None:
    expected, found = both(name, variant, STREAMED, seed=5, gap=gap, threads=2)
    assert found == expected
