"""The semantic profile hash: SHA-256 of everything that changes what is merged or when.

A learner may bind to it in its HELLO, and a checkpoint carries it. What is hashed:

    the domain
    the published fields, each encoded at its position, little-endian
    of every later feature that is on: name, NUL, value as Python writes it, NUL; sorted by name

so that a run without later features has the published hash. Must not know any flag: positions and
encodings stand in the rows of table.py.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from syncer.protocol import PROFILE_DOMAIN


class At(NamedTuple):
    """Where a field stands among the published ones, and how it is encoded."""

    position: int
    encode: Callable[[object], bytes]
    """Its docstring says what the bytes are, in the docs too."""


def u32(value: object) -> bytes:
    """u32."""
    return struct.pack("<I", value)


def u64(value: object) -> bytes:
    """u64."""
    return struct.pack("<Q", value)


def f32(value: object) -> bytes:
    """f32."""
    return struct.pack("<f", value)


def f64(value: object) -> bytes:
    """f64."""
    return struct.pack("<d", value)


def optional_u64(value: object) -> bytes:
    """One byte, 0 if unset; else 1 and a u64."""
    return b"\0" if value is None else b"\1" + u64(value)


def on(value: object) -> bytes:
    """One byte: 1 if on."""
    return b"\1" if value is True else b"\0"


def given(value: object) -> bytes:
    """One byte: 1 if given."""
    return b"\0" if value is None else b"\1"


def equals(name: str) -> Callable[[object], bytes]:
    """An encoder: one byte, 1 for this name."""
    def encode(value: object) -> bytes:
        return b"\1" if value == name else b"\0"
    encode.__doc__ = f"One byte: 1 for {name}."
    return encode


NEVER_SET = At(13, on), False
"""Position of a feature of other servers, policy_sweep_fragments, which this one has not."""


def profile_hash(published: Iterable[tuple[At, object]], later: Mapping[str, object]) -> bytes:
    """The 32 bytes. published: all fields but the one never set, in any order, with their values;
    later: names and values of the later features that are on."""
    encoded = PROFILE_DOMAIN
    for at, value in sorted([*published, NEVER_SET], key=lambda field: field[0].position):
        encoded += at.encode(value)
    for name, value in sorted(later.items()):
        encoded += f"{name}\0{value}\0".encode()
    return hashlib.sha256(encoded).digest()
