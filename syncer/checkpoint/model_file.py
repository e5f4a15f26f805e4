"""A model file: parameters alone, under the names that a program loads them by (safetensors).

Where nobody has told the names they are `fragments.<p>.params`, flat. Must not know who has them:
memory is what the caller holds, and the file appears under its name whole or not at all.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from syncer.checkpoint.atomic import AtomicFile
from syncer.checkpoint.facts import NamedDims, TensorPlace
from syncer.checkpoint.files import FILES, Files
from syncer.errors import CheckpointMismatch
from syncer.protocol import DTYPE_BF16, DTYPE_F32, tensor_bytes

if TYPE_CHECKING:
    from typing_extensions import Buffer

MODEL_ALIGN = 4096
"""The first tensor begins at a multiple of it."""
MODEL_HEADER_BYTES_MAX = 64 * 1024 * 1024
ELEMENT_TYPES = {DTYPE_F32: "F32", DTYPE_BF16: "BF16"}


def names_or_places(numels: Sequence[int], names: Sequence[NamedDims] | None) -> list[NamedDims]:
    """Name and dimensions of every tensor, by fragment."""
    if names is None:
        return [((TensorPlace(p, "params", numel).name, (numel,)),)
                for p, numel in enumerate(numels)]
    for fragment, (numel, named) in enumerate(zip(numels, names, strict=True)):
        check_filled(fragment, numel, named)
    return list(names)


def check_filled(fragment: int, numel: int, named: NamedDims) -> None:
    """Raises `CheckpointMismatch` unless these tensors are all of a fragment."""
    found = sum(math.prod(dims) for _, dims in named)
    if found != numel:
        raise CheckpointMismatch(f"fragment {fragment} has {numel} elements, the layout names "
                                 f"{found}")


def model_head(tensors: Sequence[NamedDims], dtype: int, metadata: Mapping[str, str]) -> bytes:
    """Length, JSON and padding: everything before the first tensor."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    at = 0
    for fragment in tensors:
        for name, dims in fragment:
            end = at + tensor_bytes(math.prod(dims), dtype)
            entries[name] = {"dtype": ELEMENT_TYPES[dtype], "shape": list(dims),
                             "data_offsets": [at, end]}
            at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % MODEL_ALIGN)
    return len(text).to_bytes(8, "little") + text


def write_model(path: str | os.PathLike[str], fragments: Sequence[Buffer],
                tensors: Sequence[NamedDims], *, dtype: int, metadata: Mapping[str, str],
                files: Files = FILES) -> int:
    """Replace `path` by the parameters of these fragments; returns the bytes of the file.

    fragments: their values in `dtype` (f32 or bf16), little-endian. Raises `WriteError` with the
    file that was there untouched.
    """
    head = model_head(tensors, dtype, metadata)
    bodies = [memoryview(fragment).cast("B") for fragment in fragments]
    total = len(head) + sum(map(len, bodies))
    with AtomicFile(path, size_bytes=total, files=files) as file:
        file.append(head)
        for body in bodies:
            file.append(body)
        file.commit()
    return total


def model_metadata(path: str | os.PathLike[str]) -> dict[str, str] | None:
    """What a safetensors file tells of itself; None for any other file. Raises OSError."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= MODEL_HEADER_BYTES_MAX:
            return None
        text = file.read(length)
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError):
        return None
    found = entries.get("__metadata__", {}) if type(entries) is dict else None
    if type(found) is not dict or not all(type(value) is str for value in found.values()):
        return None
    return found
