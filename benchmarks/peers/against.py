"""Our sync beside torchft's, for the table of limits. Must not draw or print."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from contextlib import ExitStack

from benchmarks.limits.figure import Figure, NotHere
from benchmarks.limits.links import found_apart
from benchmarks.peers import contest
from benchmarks.peers.contest import PEERS, Contest
from benchmarks.peers.place import Place

MIB = 1024 * 1024
OURS, TORCHFT = "syncer", "torchft DiLoCo"


def interpreter() -> str:
    """The one that PEERS_PYTHON names, else that of `make bench-peers`, else this one. Raises
    NotHere without torchft in it."""
    made = contest.ROOT / "build/peers/bin/python"
    python = os.environ.get("PEERS_PYTHON") or (str(made) if made.exists() else sys.executable)
    found = subprocess.run([python, "-c", "import torchft"], capture_output=True, check=False)
    if found.returncode:
        raise NotHere("no torchft: make bench-peers, or PEERS_PYTHON")
    return python


def against_torchft(bits_per_s: float | None, short: bool) -> Figure:
    """The fastest of our formats below f32 beside its only one, two participants, in turns."""
    pythons = contest.pythons(interpreter(), "")
    trials = [(peer, form) for peer in PEERS if peer.name in (OURS, TORCHFT)
              for form in peer.forms if peer.name == TORCHFT or form != "f32"]
    warm, syncs, turns = (1, 2, 1) if short else (2, 6, 2)

    def find() -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for _ in range(turns):
            for peer, form in trials:
                with ExitStack() as stack:
                    made = Contest(stack, peer, form, Place(stack, 2, bits_per_s),
                                   numel=(8 if short else 128) * MIB // 4,
                                   python=pythons[peer.python])
                    found.setdefault(f"{peer.name} {form}", []).extend(
                        contest.sync_seconds(made, warm, syncs))
        return found

    found = found_apart(find)
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    theirs = medians.pop(f"{TORCHFT} f32")
    ours = min(medians.values())
    return Figure(theirs / ours, ours, theirs, "s")
