"""What a server of two bf16 learners holds at most, and the pages its rounds fault in.

Must not ask the server: the peak and the faults are the system's account of its process.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from benchmarks.limits.figure import Figure, on, sides
from syncer.protocol import DTYPE_BF16, tensor_bytes
from syncer.server.memory import WORKING_BYTES
from tests.e2e.scripted import ServerProcess
from tests.e2e.steady import faults_per_gb, play

LEARNERS, FRAGMENTS = 2, 2
FAULTS_PER_GB = 500
"""A fifth of the huge pages that what is received, its values and results are made of."""


@cache
def measured(numel: int, rounds: int) -> tuple[float, float]:
    """(bytes that the server takes at most beside its process at the start, faults for each GB
    received), with fragments of so many elements, one in flight."""
    ours, others = sides()
    numels = (numel,) * FRAGMENTS
    with tempfile.TemporaryDirectory() as directory:
        with on(ours):
            server = ServerProcess(Path(directory), "--quorum", str(LEARNERS), "--grace-ms", "0",
                                   "--pipeline", "1", learners=LEARNERS, steps=rounds * FRAGMENTS)
        with server, on(others):
            before = server.rss_bytes
            faults = play(server, numels, LEARNERS, DTYPE_BF16)
            (totals,) = server.log.find("server totals")
    return (totals["peak_rss_bytes"] - before,
            faults_per_gb(faults, numels, LEARNERS, DTYPE_BF16))


def both(short: bool) -> tuple[float, float, int]:
    numel, rounds = (4 << 20, 4) if short else (16 << 20, 8)
    return *measured(numel, rounds), numel


def peak(short: bool) -> Figure:
    """Against 8 P + 3 fragments + the wire of the open round, two pushes and a broadcast; and what
    a server allows itself for working memory."""
    used, _, numel = both(short)
    bound = (8 * FRAGMENTS * numel + 3 * 4 * numel + 3 * tensor_bytes(numel, DTYPE_BF16)
             + WORKING_BYTES)
    parameters = FRAGMENTS * numel
    return Figure(bound / used, used / parameters, bound / parameters, "B/param")


def faults(short: bool) -> Figure:
    _, per_gb, _ = both(short)
    return Figure(FAULTS_PER_GB / max(per_gb, 1.0), per_gb, FAULTS_PER_GB, "per GB")
