"""One thread per matrix product while tensors run side by side; must not multiply matrices itself.

NumPy has no switch for the threads of its BLAS. NumPy's own wheels and most distributions carry
OpenBLAS, whose switch is found here among the libraries that are already loaded, and set to one
while it is held. With another BLAS nothing is found, and the callers then work on one tensor after
the other instead, with whatever threads that library uses.

This is the small part of threadpoolctl that is needed here: one library, found by name, and set to
one thread. threadpoolctl itself, which knows MKL, BLIS and OpenMP too, is not used: NumPy is the
only dependency of the package, and iso the only place that needs this.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

# as exported by NumPy's wheels, by builds with 64-bit integers, and by plain OpenBLAS
NAMES = (("scipy_openblas_", "64_"), ("openblas_", "64_"), ("scipy_openblas_", ""),
         ("openblas_", ""))


class ThreadSwitch(NamedTuple):
    """Reads and sets the number of threads of one loaded BLAS."""

    library: str
    get: Callable[[], int]
    set: Callable[[int], None]


@cache
def switches() -> tuple[ThreadSwitch, ...]:
    """Every OpenBLAS in this process, found by the names of its mapped files."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "openblas" in line}
    found = []
    for path in sorted(paths):
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        for prefix, suffix in NAMES:
            get = getattr(library, f"{prefix}get_num_threads{suffix}", None)
            put = getattr(library, f"{prefix}set_num_threads{suffix}", None)
            if get is not None and put is not None:
                get.restype, get.argtypes = ctypes.c_int, []
                put.restype, put.argtypes = None, [ctypes.c_int]
                found.append(ThreadSwitch(path, get, put))
                break
    return tuple(found)


_lock = threading.Lock()
_holders = 0
_before: list[int] = []


@contextmanager
def single_threaded() -> Iterator[bool]:
    """Sets every switch to one thread; the last of several holders restores what was before.

    Yields whether there is a switch at all. The setting is the process's, not the thread's.
    """
    global _holders, _before  # noqa: PLW0603 - the BLAS itself is one per process
    with _lock:
        if _holders == 0:
            _before = [switch.get() for switch in switches()]
            for switch in switches():
                switch.set(1)
        _holders += 1
    try:
        yield bool(switches())
    finally:
        with _lock:
            _holders -= 1
            if _holders == 0:
                for switch, threads in zip(switches(), _before, strict=True):
                    switch.set(threads)
