"""Compiled kernels: SHA-256, codecs, arithmetic on arrays, blocked sums. Only this room links csrc.

Must not know what a fragment, a learner or a message is. Importing it selects the best variant of
every family for this CPU, applies `SYNCER_KERNELS` and checks some known results.

`SYNCER_KERNELS=portable` forces one variant everywhere; `sha256=portable,codec=avx2` forces some
families. A name that is unknown, or that this CPU cannot run, fails the import with a sentence.

What the product uses is here; the kernels that only tests, self-checks and benchmarks call over
whole arrays are in `syncer.kernels.testing`.
"""

from __future__ import annotations

import os
from typing import Any

from syncer.kernels import loading

loading.load()

from syncer.kernels._native import (  # noqa: E402
    SUM_BLOCK,
    Sha256,
    active,
    apply_change,
    axpby_blend,
    build_facts,
    check,
    cpu_features,
    decode_bf16,
    decode_f32,
    decode_q4,
    dot,
    encode_bf16,
    encode_change,
    encode_q4,
    first_nonfinite,
    float_faults,
    set_places,
    sha256,
    sha256_pair,
    sha256_update_pair,
    sumsq,
    variants,
)
from syncer.kernels.floats import exact_floats, restore_floats  # noqa: E402
from syncer.kernels.selection import apply_override, self_check  # noqa: E402

__all__ = [
    "SUM_BLOCK",
    "Sha256",
    "active",
    "apply_change",
    "axpby_blend",
    "check",
    "decode_bf16",
    "decode_f32",
    "decode_q4",
    "describe",
    "dot",
    "encode_bf16",
    "encode_change",
    "encode_q4",
    "exact_floats",
    "first_nonfinite",
    "float_faults",
    "restore_floats",
    "self_check",
    "set_places",
    "sha256",
    "sha256_pair",
    "sha256_update_pair",
    "sumsq",
    "variants",
]


def describe() -> dict[str, Any]:
    """What runs here, as JSON: {family: {"active", "available"}, "cpu", "compiler", "openmp",
    "floats"}; the last is `float_faults` of this thread."""
    compiler, openmp = build_facts()
    chosen = active()
    facts: dict[str, Any] = {
        family: {"active": chosen[family], "available": [name for name, usable in names if usable]}
        for family, names in variants().items()
    }
    return facts | {"cpu": cpu_features(), "compiler": compiler, "openmp": openmp,
                    "floats": float_faults()}


apply_override(os.environ.get("SYNCER_KERNELS", ""))
self_check()
