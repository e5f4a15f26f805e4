"""How many sockets there may be: what the descriptors of this process leave; must not open any.

Files come first: a checkpoint must always be possible. Then whoever was let in, with the data
sockets it has declared (rule 14.9). Strangers and goodbyes have the rest, of which some is never
promised away, so that there is always room to dial.
"""

from __future__ import annotations

from typing import NamedTuple

from syncer.errors import ConfigError

FILES_RESERVED = 64
"""Descriptors for files: a checkpoint being written, another one read, directories, and what else
this process may open."""
STRANGERS_MIN = 16
"""Sockets that no learner is promised."""
USUAL_SOCKETS = 5
"""Of a learner: its control socket, and the data sockets of the library."""


class Descriptors(NamedTuple):
    """Of this process: how many it may have, and how many it has while nobody is connected."""

    limit: int
    used: int


class Capacity:
    """Counts promised sockets. Raises `ConfigError` if there is none for a learner."""

    def __init__(self, descriptors: Descriptors):
        self.limit = descriptors.limit
        self.sockets = self.limit - descriptors.used - FILES_RESERVED
        self.promised = 0
        if self.sockets <= STRANGERS_MIN:
            raise ConfigError(f"{self.limit} descriptors leave none for a learner: raise the "
                              "limit of this process (ulimit -n)")

    @property
    def learners_fit(self) -> int:
        """How many of the usual kind."""
        return (self.sockets - STRANGERS_MIN) // USUAL_SOCKETS

    @property
    def rest(self) -> int:
        """What strangers and goodbyes may have together."""
        return self.sockets - self.promised

    # rule 14.9
    def has_room(self, sockets: int) -> bool:
        """Whether a learner of so many may be let in."""
        return self.rest - sockets >= STRANGERS_MIN

    def promise(self, sockets: int) -> None:
        """They are a member's, whether it has dialed them or not; a negative number ends that."""
        self.promised += sockets
