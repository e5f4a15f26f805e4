"""The final-state file: the parameters of the last cut, and nothing else.

u32 number of fragments, then per fragment u64 elements and the elements as f32, all little-endian.
A reader never sees half of it: the file appears under its name when it is complete and on disk.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence

import numpy as np


def write_final_state(path: str | os.PathLike[str], fragments: Sequence[np.ndarray]) -> int:
    """Write f32 arrays, one per fragment in layout order; returns the bytes written.

    Raises OSError with the target untouched.
    """
    path = os.fspath(path)
    temporary = f"{path}.{os.getpid()}.tmp"
    total = 4
    try:
        with open(temporary, "wb") as file:
            file.write(struct.pack("<I", len(fragments)))
            for params in fragments:
                file.write(struct.pack("<Q", params.size))
                file.write(memoryview(params.astype("<f4", copy=False)).cast("B"))
                total += 8 + 4 * params.size
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise
    _sync_directory(os.path.dirname(path) or ".")
    return total


def _sync_directory(path: str) -> None:
    """The new name survives a power failure only once its directory is on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
