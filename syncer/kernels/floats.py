"""How the calling thread computes with floats: seen, put right, for good or for a while.

Must not know who changed it. A library may have a thread flush subnormal numbers to zero, or round
another way, and new threads inherit that. Kernels put it right around every call by themselves;
this is for what is computed with NumPy and Python between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from syncer.kernels import _native


def restore_floats() -> str:
    """Puts the calling thread right for good; returns what was wrong, '' if nothing."""
    found = _native.float_faults()
    if found:
        _native.float_exact()
    return found


@contextmanager
def exact_floats() -> Iterator[None]:
    """Puts the calling thread right inside the block: its caller may have wanted it as it was."""
    mode = _native.float_exact()
    try:
        yield
    finally:
        _native.float_back(mode)
