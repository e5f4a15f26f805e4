"""How much spare memory a store keeps: what was ever in use at once; must not lend any itself.

A prepared merge or an open fold uses arrays beside the current versions. When it ends, as many
arrays of an old version come back, and the next merge takes them. A store that kept fewer would ask
the system for fresh memory in every round; more could never be in use at once.
"""

from __future__ import annotations

import threading

from syncer.merge.buffers import BufferPool


class Loans:
    """Counts arrays in use beside the versions. May be called on any thread.

    pool: whose bound on spare bytes follows the count. largest: elements of the largest fragment.
    """

    def __init__(self, pool: BufferPool, largest: int):
        self._pool = pool
        self._largest = largest
        self._lock = threading.Lock()
        self._lent = 0
        self._lent_max = 0

    def lend(self, arrays: int) -> None:
        """Notes arrays in use; as many may stay as spares afterwards."""
        with self._lock:
            self._lent += arrays
            if self._lent > self._lent_max:
                self._lent_max = self._lent
                # the classes of the pool may round a capacity up by an eighth
                nbytes = self._largest * 4
                self._pool.spare_bytes_max = self._lent_max * (nbytes + nbytes // 8 + 1024)

    def take_back(self, arrays: int) -> None:
        """Notes that so many are in use no more."""
        with self._lock:
            self._lent -= arrays
