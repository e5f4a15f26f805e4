"""What is only computed and no longer wanted holds up no end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np

from syncer.layout import ISO, FragmentLayout, Layout
from syncer.merge import FragmentStore
from tests.e2e.scripted import (
    PATIENCE_S,
    ROOT,
    ScriptedLearner,
    ServerProcess,
    ServerThread,
    layout_of,
    wait_until,
)

NUMEL = 200_000
PLAIN = layout_of((NUMEL,))
"""A merge for a worker: a small one is made on the spot."""
SIDE = 1000
MATRIX = Layout((FragmentLayout(ISO, (SIDE * SIDE,), ((SIDE, SIDE),)),))
"""Its merge takes seconds of matrix products."""


def test_a_server_that_is_told_to_end_does_not_wait_for_a_merge(tmp_path, monkeypatch):
    """Nor does it end the process that it is a part of: the merge here ends after it."""
    entered, gate = threading.Event(), threading.Event()
    prepare = FragmentStore.prepare

    def slow(*given):
        entered.set()
        gate.wait()
        return prepare(*given)

    monkeypatch.setattr(FragmentStore, "prepare", slow)
    path = tmp_path / "c"
    with ServerThread(tmp_path, total_steps=2, checkpoint_path=str(path)) as server:
        learner = server.learner(0, PLAIN)
        learner.send_init([np.zeros(NUMEL, np.float32)])
        learner.push(learner.pull(1), np.ones(NUMEL, np.float32))
        entered.wait()
        server.server.stop()
        learner.close()
        assert server.wait() == 128 + signal.SIGTERM
        assert server.log.find("checkpoint written", kind="periodic", step=0)
        workers = list(server.server.workers.threads)
    assert any(worker.is_alive() for worker in workers)
    gate.set()
    for worker in workers:
        worker.join(PATIENCE_S)
    assert not any(worker.is_alive() for worker in workers)


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def merging(learner: ScriptedLearner, pid: int) -> None:
    """The merge has begun: nothing else here takes that much of a processor."""
    values = np.random.default_rng(1).standard_normal(SIDE * SIDE).astype(np.float32)
    learner.send_init([values])
    pull = learner.pull(1)
    before = cpu_ticks(pid)
    learner.push(pull, values)
    wait_until(lambda: cpu_ticks(pid) > before + os.sysconf("SC_CLK_TCK") / 5, "a merge")


def test_a_command_that_is_told_to_end_leaves_its_products_alone(tmp_path):
    with ServerProcess(tmp_path, "--checkpoint-path", str(tmp_path / "c"), steps=2) as server:
        learner = server.learner(0, MATRIX)
        merging(learner, server.process.pid)
        server.signal(signal.SIGTERM)
        learner.close()
        assert server.wait() == 128 + signal.SIGTERM
        assert server.log.lines()[-1]["message"] == "server totals"


def test_a_program_that_has_a_server_ends_as_it_likes():
    """Also while a worker of the server that has ended is in the middle of a product."""
    process = subprocess.Popen([sys.executable, "-m", "tests.e2e.hosting_server"], cwd=ROOT,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    with process:
        with ScriptedLearner(int(process.stdout.readline()), 0, MATRIX) as learner:
            merging(learner, process.pid)
        told, log = process.communicate("end\n", PATIENCE_S)
    assert process.returncode == 0, log
    assert told == f"{128 + signal.SIGTERM}\n"
