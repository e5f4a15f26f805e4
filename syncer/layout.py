"""The shape of a model as the protocol sees it: fragments, tensors, merge modes.

Names never travel, so none are here; must not import NumPy or any room but errors.
"""

from __future__ import annotations

from typing import NamedTuple

AVG, RDA, ISO = 0, 1, 2
MERGE_MODES = {AVG: "avg", RDA: "rda", ISO: "iso"}


class FragmentLayout(NamedTuple):
    """One fragment: a merge mode and its tensors in wire order."""

    merge_mode: int
    numels: tuple[int, ...]
    """Elements of each tensor, all > 0."""
    shapes: tuple[tuple[int, int], ...] = ()
    """(rows, cols) of each tensor, for `ISO` fragments only."""

    @property
    def numel(self) -> int:
        """Elements of the whole fragment."""
        return sum(self.numels)


class Layout(NamedTuple):
    """All fragments of a model, in HELLO order."""

    fragments: tuple[FragmentLayout, ...]

    @property
    def numel(self) -> int:
        """Elements of the whole model."""
        return sum(fragment.numel for fragment in self.fragments)

    @property
    def largest(self) -> int:
        """Elements of the largest fragment: what payload limits are made from."""
        return max(fragment.numel for fragment in self.fragments)
