"""Loads the compiled kernels, or says in one sentence why the system could not.

Must not use them. The usual reason is a build that is used on a system without the OpenMP runtime
it was linked with: wheels carry theirs.
"""

from __future__ import annotations

import importlib

from syncer.errors import KernelError, SyncerError


class NotLoadable(KernelError, ImportError):
    """The system's loader refuses the compiled kernels."""


def load() -> None:
    """Imports `syncer.kernels._native`; raises `NotLoadable` for what its library lacks."""
    try:
        importlib.import_module("syncer.kernels._native")
    except (ModuleNotFoundError, SyncerError):
        raise  # nothing was built: its own sentence
    except ImportError as error:
        advice = "build it again on this system"
        if "libgomp" in str(error):
            advice = ("install the OpenMP runtime, for example with: apt-get install libgomp1   "
                      "(or: dnf install libgomp), take a wheel, which has it inside, or build with "
                      "SYNCER_NO_OPENMP=1")
        raise NotLoadable(f"the compiled kernels cannot be loaded: {error}; {advice}",
                          name=error.name, path=error.path) from None
