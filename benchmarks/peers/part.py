"""What every participant does, whatever it runs: read its part, say when a sync is complete.

Must import nothing but the standard library: it runs in the environments of all peers.
"""

from __future__ import annotations

import json
import sys
import time
from typing import NamedTuple


class Part(NamedTuple):
    """Which participant this is, and where and what it syncs."""

    rank: int
    world: int
    own: str
    hub: str
    """Addresses: of this host, and of the one with the server or coordinator."""
    first: str
    """Address of participant 0."""
    interface: str
    numel: int
    form: str
    """What goes over the wire, by the name that the peer has for it."""
    syncs: int
    """After so many it ends; 0: never."""

    @property
    def counted(self) -> range:
        return range(self.syncs or 10**9)


def given() -> Part:
    return Part(*json.loads(sys.argv[1]))


def synced(members: int) -> None:
    """A sync of so many participants is complete; 0: it came to nothing."""
    print(json.dumps([time.monotonic(), members]), flush=True)
