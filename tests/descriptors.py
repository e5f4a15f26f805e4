"""Which files and sockets this process has open: what a test has opened and not closed.

Tests compare what there is and not how much: what an earlier test has left may end at any moment.
"""

from __future__ import annotations

import os
from contextlib import suppress


def open_descriptors() -> set[tuple[int, str]]:
    """Numbers, and what each is of."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing has ended
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return found
