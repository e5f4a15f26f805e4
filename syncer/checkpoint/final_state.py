"""The final-state file: the parameters of the last cut, and nothing else.

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
from syncer.checkpoint.files import FILES, Files


def write_final_state(path: str | os.PathLike[str], fragments: Sequence[np.ndarray],
                      files: Files = FILES) -> int:
    """Write f32 arrays, one per fragment in layout order; returns the bytes written.

    Raises `WriteError` with the target untouched.
    """
    total = 4 + sum(8 + 4 * params.size for params in fragments)
    with AtomicFile(path, size_bytes=total, files=files) as file:
        file.append(struct.pack("<I", len(fragments)))
        for params in fragments:
            file.append(struct.pack("<Q", params.size))
            file.append(np.ascontiguousarray(params, "<f4"))
        file.commit()
    return total
