"""Kernels over whole arrays that only checks call, and the choice of variants while they run.

Must not be imported by the product. A merge runs these kernels block by block in C; here each can
be held against its definition, alone, over any length, alignment and number of threads. Arrays and
errors are as in `syncer.kernels`.
"""

from __future__ import annotations

from syncer.kernels._native import (
    accumulate,
    accumulate_first,
    decode,
    delayed_nesterov,
    encode_range,
    nesterov,
    norm,
    rotate,
    rotated_sumsq,
    scale,
    select,
    sgd,
    shrink,
    three_sums,
)
from syncer.kernels.selection import forced

__all__ = [
    "accumulate",
    "accumulate_first",
    "decode",
    "delayed_nesterov",
    "encode_range",
    "forced",
    "nesterov",
    "norm",
    "rotate",
    "rotated_sumsq",
    "scale",
    "select",
    "sgd",
    "shrink",
    "three_sums",
]
