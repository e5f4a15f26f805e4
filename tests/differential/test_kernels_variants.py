"""Every kernel variant against portable, and every thread count against one, by bit pattern."""

from __future__ import annotations

import pytest

from syncer import kernels
from syncer.kernels import testing
from tests.differential.kernel_cases import CASES, run_case

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
