"""Rounds of learners that answer at once and read what they are sent; what pages they fault in."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from syncer.layout import RDA
from syncer.protocol import Msg, tensor_bytes
from syncer.wire.messages import Manifest, Pull
from tests.e2e.scripted import ScriptedLearner, ServerProcess, layout_of


def minor_faults(server: ServerProcess) -> int:
    return int(Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()[7])


def play(server: ServerProcess, numels: Sequence[int], learners: int, dtype: int,
         *, initial: bool = True) -> list[int]:
    """Trains to the end; returns the minor faults of the server at every pull of the first learner.
    initial: it is given version 0, and not resumed."""
    layout = layout_of(*((n,) for n in numels), mode=RDA)
    fleet = [server.learner(i, layout, dtype=dtype) for i in range(learners)]
    if initial:
        fleet[0].send_init([np.ones(n, np.float32) for n in numels])
    deltas = {n: np.full(n, 1e-3, np.float32) for n in numels}
    faults = []

    def train(learner: ScriptedLearner) -> None:
        while True:
            message = learner.until(lambda found: isinstance(found, Pull | Manifest))
            if isinstance(message, Manifest):
                break
            if learner is fleet[0]:
                faults.append(minor_faults(server))
            learner.push(message, deltas[numels[message.fragment]])
        while len(learner.final) < len(numels):
            learner.next()
        learner.acknowledge(message.step)
        learner.until(Msg.SHUTDOWN)

    threads = [threading.Thread(target=train, args=(learner,)) for learner in fleet]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.wait() == 0
    return faults


def faults_per_gb(faults: Sequence[int], numels: Sequence[int], learners: int, dtype: int) -> float:
    """For each GB of pushes, from half of the rounds on."""
    half = len(faults) // 2
    mean = sum(tensor_bytes(numel, dtype) for numel in numels) / len(numels)
    return (faults[-1] - faults[half]) / ((len(faults) - 1 - half) * learners * mean / 1e9)
