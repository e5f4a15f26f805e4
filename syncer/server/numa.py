"""Where memory and threads lie on a machine with several memory nodes; must not touch one of one.

  spread  pages are dealt out to all nodes in turn, so that every thread has the bandwidth of all
  local   thread i of every merge keeps to one node and to its share of each tensor, and the memory
          of fragments, which is apart from that of messages, lies where it was written first
  off     as the system likes
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from syncer import pages
from syncer.kernels import set_places
from syncer.machine import Node


def place(numa: str, nodes: Sequence[Node]) -> str:
    """Has memory and threads lie so from now on; returns what is missing for it, '' if nothing."""
    if numa == "off":
        return ""
    if len(nodes) < 2:
        return "a machine with more than one memory node"
    if numa == "spread":
        try:
            pages.spread([node.number for node in nodes])
        except OSError as error:
            return f"a system that allows mbind: {os.strerror(error.errno or 0)}"
        return ""
    if not set_places([sorted(node.cores) for node in nodes]):
        return "cores on more than one memory node"
    pages.keep_apart()
    return ""
