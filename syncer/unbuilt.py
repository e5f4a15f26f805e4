"""Says what to run when a compiled module of a source tree was not built for this Python.

Must not import a room. Does nothing in an installed package, which has no .pyx files.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from syncer.errors import SyncerError

HERE = Path(__file__).parent
A_SOURCE = HERE / "kernels" / "_native.pyx"


class NotBuilt(SyncerError, ImportError):
    """A module's source is here, the module is not."""


class UnbuiltModules:
    """The last finder of Python's import: knows no module, but why one was not found."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None,
                  target: ModuleType | None = None) -> ModuleSpec | None:
        """None for everything but a .pyx of this package, whose absence raises `NotBuilt`."""
        package, _, module = name.rpartition(".")
        if package.split(".")[0] == "syncer" and any(
                Path(folder, module + ".pyx").exists() for folder in path or ()):
            major, minor = sys.version_info[:2]
            raise NotBuilt(f"{name} is not built for Python {major}.{minor}: run `make build` in "
                           f"{HERE.parent}, or: pip install -e {HERE.parent}", name=name)
        return None


def install() -> None:
    """Adds the finder, once, to a source tree's imports."""
    if A_SOURCE.exists() and UnbuiltModules not in sys.meta_path:
        sys.meta_path.append(UnbuiltModules)
