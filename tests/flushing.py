"""A thread in another float mode, as libraries leave it: subnormals flushed, rounding changed.

Must not use the package: glibc's fegetenv and fesetenv alone know the register here.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

MACHINE = platform.machine()
SUPPORTED = MACHINE in ("x86_64", "aarch64")
FLUSH, UPWARD = ((0x8040, 0x4000) if MACHINE == "x86_64" else (1 << 24, 1 << 22))
_WORD = 7 if MACHINE == "x86_64" else 0  # where fenv_t has the mode: MXCSR, or FPCR
_libm = ctypes.CDLL("libm.so.6")


def mode() -> int:
    """The control bits of the calling thread that are not as IEEE-754 has them by default."""
    environment = (ctypes.c_uint32 * 8)()
    _libm.fegetenv(environment)
    usual = 0x1F80 if MACHINE == "x86_64" else 0
    return (environment[_WORD] & ~0x3F) ^ usual if MACHINE == "x86_64" else environment[_WORD]


def change(bits: int) -> None:
    """Sets these control bits of the calling thread, and clears the others of `mode`."""
    environment = (ctypes.c_uint32 * 8)()
    _libm.fegetenv(environment)
    environment[_WORD] ^= mode() ^ bits
    _libm.fesetenv(environment)


@contextmanager
def changed(bits: int) -> Iterator[None]:
    """The calling thread in another mode; it must be left in it by what runs inside."""
    change(bits)
    try:
        yield
        assert mode() == bits
    finally:
        change(0)
