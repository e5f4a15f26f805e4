"""Numbers that have been seen, in memory that does not grow: none of them is ever forgotten.

Must not say of a new one that it is new for certain: some new ones look as if they had been seen,
one of 5,000 after a million, one of 25 after five millions. Whoever asks can draw another one.
"""

from __future__ import annotations

from hashlib import blake2b

BITS = 1 << 25
"""4 MiB."""
PLACES = 4
"""Bits of each number; it has been seen if all of them are set."""


class EverSeen:
    """A set of u64 that may have more in it than was added, and never less."""

    def __init__(self) -> None:
        self._bits = bytearray()
        """Made with the first number: most processes see none."""

    def _places(self, number: int) -> list[int]:
        digest = blake2b(number.to_bytes(8, "little"), digest_size=4 * PLACES).digest()
        return [int.from_bytes(digest[at : at + 4], "little") % BITS
                for at in range(0, 4 * PLACES, 4)]

    def add(self, number: int) -> None:
        if not self._bits:
            self._bits = bytearray(BITS // 8)
        for place in self._places(number):
            self._bits[place >> 3] |= 1 << (place & 7)

    def __contains__(self, number: int) -> bool:
        return bool(self._bits) and all(
            self._bits[place >> 3] >> (place & 7) & 1 for place in self._places(number))
