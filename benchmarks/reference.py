"""The plain C loops that figures are compared with, compiled when they are first asked for.

Must not time anything. What they do stands in reference.c.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from syncer.merge.buffers import BufferPool

ALIGNMENT = 64
COPIES = {"memcpy": "reference_copy", "past the cache": "reference_copy_past"}
"""Two bounds. memcpy reads the lines that it will overwrite, where it goes by the cache; a copy
past it does not, and moves as many bytes as it says: no program that writes memory is faster."""


@functools.cache
def library() -> ctypes.CDLL:
    """reference.c, compiled with -O3; skips the test without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("the reference loops need a C compiler (cc, gcc or clang)")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "reference.so"
        source = Path(__file__).with_name("reference.c")
        subprocess.run([compiler, "-O3", "-shared", "-fPIC", str(source), "-o", str(made)],
                       check=True)
        loaded = ctypes.CDLL(str(made))
    for name in COPIES.values():
        getattr(loaded, name).argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    loaded.reference_sum.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return loaded


def aligned(nbytes: int) -> np.ndarray:
    """Bytes that begin at a cache line, in memory as fragments and decoded pushes have it: huge
    pages where the system gives them, faulted in before."""
    floats = np.frombuffer(memoryview(BufferPool().take(-(-nbytes // 4))), np.float32)
    floats.fill(1)
    return floats.view(np.uint8)[:nbytes]


def copy(nbytes: int, kind: str = "memcpy", threads: int = 1) -> Callable[[], object]:
    """A call that copies so many bytes between arrays of its own, each thread a part."""
    source, target = aligned(nbytes), aligned(nbytes)
    run = getattr(library(), COPIES[kind])
    part = -(-nbytes // threads // ALIGNMENT) * ALIGNMENT

    def one(begin: int) -> None:
        run(target.ctypes.data + begin, source.ctypes.data + begin, min(part, nbytes - begin))

    if threads == 1:
        return lambda: one(0)
    pool, begins = ThreadPoolExecutor(threads), range(0, nbytes, part)
    return lambda: list(pool.map(one, begins))
