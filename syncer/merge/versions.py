"""Versions of fragments: what was published, and what was prepared; must not merge or swap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from syncer.merge.buffers import Buffer
from syncer.merge.finite import Excluded
from syncer.merge.stats import MergeStats

if TYPE_CHECKING:
    from numpy.typing import NDArray


def floats(buffer: Buffer) -> NDArray[np.float32]:
    """The elements as an array over the same memory, which it keeps alive."""
    return np.frombuffer(memoryview(buffer), np.float32)


class FragmentVersion:
    """One immutable version of a fragment: its parameters and optimizer state, f32, read-only."""

    __slots__ = ("__weakref__", "_names", "buffers", "commits", "fragment", "params", "version")

    def __init__(self, fragment: int, version: int, commits: int, names: Sequence[str],
                 buffers: Sequence[Buffer]):
        self.fragment = fragment
        self.version = version
        """Step of the merge that made it, 0 for the initial parameters."""
        self.commits = commits
        """Merges of this fragment up to this version."""
        self._names = tuple(names)
        self.buffers = tuple(buffer.freeze() for buffer in buffers)
        """Parameters, then the optimizer's arrays, as `engine` takes them."""
        self.params = floats(buffers[0])

    @property
    def state(self) -> dict[str, NDArray[np.float32]]:
        """The optimizer's arrays by name, in the order of its table entry."""
        return {name: floats(buffer)
                for name, buffer in zip(self._names, self.buffers[1:], strict=True)}

    @property
    def momentum(self) -> NDArray[np.float32] | None:
        """The momentum, or None if the optimizer keeps none."""
        return self.state.get("momentum")


class Prepared:
    """A merge result that is not published: finite, complete, and invisible to every reader."""

    __slots__ = ("base", "excluded", "fragment", "gnorm", "restarted", "result", "stats", "step")

    def __init__(self, step: int, gnorm: float, base: FragmentVersion, result: FragmentVersion,
                 stats: MergeStats | None = None):
        self.step = step
        self.fragment = base.fragment
        self.gnorm = gnorm
        """Norm of the merged gradient (f64 root of its blocked sums)."""
        self.stats = stats
        """Numbers that explain the merge, if they are on."""
        self.excluded: tuple[Excluded, ...] = ()
        """Contributions that would have made it infinite, and are not in it."""
        self.restarted = False
        """The momentum would have, and began anew."""
        self.base: FragmentVersion | None = base
        self.result: FragmentVersion | None = result

    def drop(self) -> None:
        """Lets go of both versions; the object keeps its numbers."""
        self.base = self.result = None
