"""What a learner trains, as its step boundary sees it: fragments that take bytes and give bytes.

Arrays of NumPy are one such holding; other rooms bring their own. Must not know versions, or
sockets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from syncer.learner.arguments import checked_parameters
from syncer.learner.fragment import Floats, Fragment, Packed


class Underway(Protocol):
    """Bytes that a device is still writing."""

    def done(self) -> bool:
        """Whether they are there."""

    def wait(self) -> None:
        """Until they are."""


class LocalFragment(Protocol):
    """The local values and the anchor of one fragment. `Fragment` says what each of these does."""

    def rebase(self, tensor: memoryview, alpha: float) -> None:
        """Takes a broadcast."""

    def restore(self) -> None:
        """Goes back to the anchor."""

    def overwrite(self, tensor: memoryview) -> None:
        """Takes the final cut."""

    def pack_values(self, out: Packed) -> None:
        """The local values as they are now; they are in `out` on return."""

    def pack_delta(self, out: Packed) -> Underway | None:
        """What they differ from the anchor now; None: it is in `out` on return. Else training may
        go on at once, and `out` must stay as it is until the bytes are there."""

    def feed_back(self) -> None:
        """From now on each delta has what the one before it has lost when it was packed."""

    def forget_error(self) -> None:
        """But the next one has not: the one before it was not merged."""

    def kept(self) -> dict[str, Floats]:
        """A copy of what is here beside the local values: the anchor, and what belongs to it."""

    def keep(self, values: Mapping[str, Floats]) -> Floats:
        """Takes what `kept` of another process gave, and shows the anchor, only to be read; raises
        `ValueError` for other sizes."""


@runtime_checkable
class Holding(Protocol):
    """All parameters of a learner."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """By the names that every learner of the model agrees on."""

    def fragment(self, names: Sequence[str], dtype: int) -> LocalFragment:
        """Some of them as one vector, in this order. dtype: that of the session."""

    def buffer(self, size: int) -> Packed:
        """Memory that fragments are packed into, contents undefined."""


class Arrays:
    """A holding of f32 arrays in this process. Raises `ConfigError` as `checked_parameters`."""

    def __init__(self, parameters: Mapping[str, np.ndarray]):
        self._arrays = checked_parameters(parameters)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: array.shape for name, array in self._arrays.items()}

    def fragment(self, names: Sequence[str], dtype: int) -> LocalFragment:
        return Fragment([self._arrays[name] for name in names], dtype)

    def buffer(self, size: int) -> Packed:
        return np.empty(size, np.uint8)
