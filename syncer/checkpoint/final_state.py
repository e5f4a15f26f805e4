"""The final-state file: the parameters of the last cut, and nothing else.

A name that ends in .safetensors makes it a model file (model_file.py). Any other one:

u32 number of fragments, then per fragment u64 elements and the elements as f32, all little-endian.
A reader never sees half of it: the file appears under its name when it is complete and on disk.
Must not know a run.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence

import numpy as np

from syncer.checkpoint.atomic import AtomicFile
from syncer.checkpoint.facts import NamedDims
from syncer.checkpoint.files import FILES, Files
from syncer.checkpoint.model_file import names_or_places, write_model
from syncer.protocol import DTYPE_F32

MODEL_ENDING = ".safetensors"


def write_final_state(path: str | os.PathLike[str], fragments: Sequence[np.ndarray],
                      files: Files = FILES, *, names: Sequence[NamedDims] | None = None,
                      step: int = 0) -> int:
    """Write f32 arrays, one per fragment in layout order; returns the bytes written.

    names, step: what a model file tells, names if they are known. Raises `WriteError` with the
    target untouched.
    """
    if os.fspath(path).endswith(MODEL_ENDING):
        tensors = names_or_places([params.size for params in fragments], names)
        return write_model(path, [np.ascontiguousarray(params, "<f4").data for params in fragments],
                           tensors, dtype=DTYPE_F32, metadata={"global_step": str(step)},
                           files=files)
    total = 4 + sum(8 + 4 * params.size for params in fragments)
    with AtomicFile(path, size_bytes=total, files=files) as file:
        file.append(struct.pack("<I", len(fragments)))
        for params in fragments:
            file.append(struct.pack("<Q", params.size))
            file.append(np.ascontiguousarray(params, "<f4"))
        file.commit()
    return total
