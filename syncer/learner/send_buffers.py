"""Memory that packed tensors are sent from; must not pack or send them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from syncer.learner.client_group import Receipt


class SendBuffers:
    """Memory for packed tensors that is used again: fresh pages cost more than packing.

    At most two buffers of the largest message are kept. One that was lent for a message comes back
    when that message was sent; that of a dropped message never does, since a writer of the ended
    connection may still be reading it. new: makes one of so many bytes.
    """

    KEPT = 2

    def __init__(self, largest_bytes: int, new: Callable[[int], np.ndarray] | None = None):
        self._largest_bytes = largest_bytes
        self._new = new or (lambda size: np.empty(size, np.uint8))
        self._free: list[np.ndarray] = []
        self._lent: list[tuple[Receipt, np.ndarray]] = []

    def take(self, size: int) -> np.ndarray:
        """A uint8 array of `size` bytes, contents undefined."""
        lent, self._lent = self._lent, []
        for receipt, buffer in lent:
            if receipt.sent:
                self._free.append(buffer)
            elif not receipt.dropped:
                self._lent.append((receipt, buffer))
        del self._free[self.KEPT:]
        buffer = self._free.pop() if self._free else self._new(self._largest_bytes)
        return buffer[:size]

    def lend(self, receipt: Receipt, array: np.ndarray) -> None:
        """Says which message uses an array of `take`."""
        assert array.base is not None  # `take` hands out views
        self._lent.append((receipt, array.base))
