"""Which kernel variants run: the override, forcing for a while, and the check at import.

Must not measure anything: the best variant is a fixed order in csrc, not a race at start.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

from syncer.errors import KernelError
from syncer.kernels import _native
from syncer.kernels.floats import exact_floats

SHA256_EXPECTED = "da18797ed7c3a777f0847f429724a2d8cd5138e6ed2895c3fa1a6d39d18f7ec6"
SUMSQ_EXPECTED = "0x1.1c379395df850p+54"
NESTEROV_EXPECTED = "0b2480bfec51783f"
FAINT_EXPECTED = "ab4918640c1c7f44"
FAINT_SUMSQ_EXPECTED = "0x1.c9f5bce062640p-252"


def parse_override(text: str) -> dict[str, str]:
    """`SYNCER_KERNELS` as {family: variant}; raises KernelError for what cannot be read.

    One bare name means that variant in every family, and must exist in each."""
    families = list(_native.variants())
    chosen: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        family, equals, variant = (part.strip() for part in entry.partition("="))
        if not equals:
            chosen.update(dict.fromkeys(families, family))
        elif family and variant:
            chosen[family] = variant
        else:
            raise KernelError(
                f"SYNCER_KERNELS: cannot read {entry!r}; expected a variant name, or "
                "family=variant pairs separated by commas, such as sha256=portable,codec=avx2"
            )
    return chosen


def apply_override(text: str) -> None:
    """Selects what `SYNCER_KERNELS` asks for; raises KernelError naming the variable."""
    for family, variant in parse_override(text).items():
        try:
            _native.select(family, variant)
        except KernelError as error:
            raise KernelError(f"SYNCER_KERNELS={text}: {error}") from None


@contextmanager
def forced(**variants: str) -> Iterator[None]:
    """Runs the block with the given variants, for example `forced(codec="portable")`.

    Process-wide: no other thread may run kernels meanwhile."""
    before = _native.active()
    try:
        for family, variant in variants.items():
            _native.select(family, variant)
        yield
    finally:
        for family, variant in before.items():
            _native.select(family, variant)


def self_check() -> None:
    """Known results, one per way to be miscompiled; raises KernelError. Takes some microseconds.

    The digest of 119 bytes needs two closing blocks; the sum has a term below half an ulp of its
    lane, so any other order or a fused or extended sum shows; the step rounds three times; the
    faint values are subnormal or become so, and -0 added to +0 is +0, kept alone -0."""
    with exact_floats():  # of the literals, which the interpreter converts
        _check_sums()
        _check_faint()


def _check_sums() -> None:
    digest = _native.sha256(bytes(range(119)))
    if digest.hex() != SHA256_EXPECTED:
        raise KernelError(_miscompiled("sha256", digest.hex()))
    values = array("f", [1e8, 1.0, 3.0, 1e-3, 7.0, 1e4, -0.5, 2.0, 1.0, 1e8, 0.1])
    total = _native.sumsq(values)
    if total != float.fromhex(SUMSQ_EXPECTED):
        raise KernelError(_miscompiled("sumsq", total.hex()))
    params, momentum, gradient = array("f", [0.1] * 9), array("f", [0.3] * 9), array("f", [0.7] * 9)
    _native.nesterov(params, momentum, gradient, 0.7, 0.9, params, momentum)
    found = struct.pack("<ff", params[8], momentum[0]).hex()
    if found != NESTEROV_EXPECTED or len(set(params)) != 1:
        raise KernelError(_miscompiled("nesterov", found))


def _check_faint() -> None:
    """Zeros and subnormal numbers, which a thread or a build may take for zero."""
    faint = array("f", [6e-45, -1e-40, 2.0**-126, -0.0, 1e-38, -1e-45, 3e-39, 0.0, 0.1])
    total = _native.sumsq(faint[:8])
    if total != float.fromhex(FAINT_SUMSQ_EXPECTED):
        raise KernelError(_miscompiled("sumsq of subnormal numbers", total.hex()))
    scaled, first, added = array("f", faint), array("f", faint), array("f", faint)
    _native.scale(scaled, 0.75)
    _native.accumulate_first(first, faint, 0.75)
    _native.accumulate(added, faint, 0.75)
    found = b"".join(part.tobytes() for part in (scaled, first, added))
    if _native.sha256(found).hex()[:16] != FAINT_EXPECTED:
        raise KernelError(_miscompiled("scale or a sum of subnormal numbers", found.hex()))


def _miscompiled(kernel: str, found: str) -> str:
    return (
        f"kernel self-check failed: {kernel} ({_native.active()}) gives {found}; the compiled "
        "module does not match its source, rebuild it with another compiler or other flags"
    )
