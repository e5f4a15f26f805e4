"""What a run may hold in memory: limits that hold on every branch, and the sum that is told."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from syncer.core import events as ev
from syncer.layout import RDA
from syncer.protocol import DTYPE_BF16, DTYPE_F32
from syncer.server import ingest, memory
from syncer.server.workers import Job
from syncer.wire import payload
from tests.e2e.scripted import PATIENCE_S, ServerProcess, ServerThread, layout_of, wait_until

LARGE, SMALL = 200_000, 10


def test_small_pushes_behind_a_large_one_are_not_read_without_limit(tmp_path):
    """The large one waits for a worker, and what comes behind it keeps its order."""
    gate = threading.Event()
    pushes = 40
    with ServerThread(tmp_path, total_steps=9, quorum=1) as server:
        learner = server.learner(0, layout_of((LARGE,), (SMALL,)))
        learner.send_init([np.zeros(LARGE, np.float32), np.zeros(SMALL, np.float32)])
        pull = learner.pull(1)
        workers = server.server.workers
        for _ in range(workers.count):
            workers.submit(Job(lambda: gate.wait(PATIENCE_S), lambda *done: None))
        wait_until(lambda: not workers.queue.jobs, "all workers are busy")
        learner.push(pull, np.zeros(LARGE, np.float32))
        for step in range(pushes):
            learner.push(pull._replace(fragment=1, step=2 + 2 * step), np.zeros(SMALL, np.float32))
        (group,) = server.server.session.groups.values()
        wait_until(lambda: group.control.paused, "the group is not read any more")
        assert len(group.work.pending) == ingest.DECODING_MAX
        gate.set()
        wait_until(lambda: sum(isinstance(event, ev.Push) for event in server.witness.events)
                   == 1 + pushes, "all are judged")
        steps = [event.step for event in server.witness.events if isinstance(event, ev.Push)]
        assert steps == [1, *range(2, 2 + 2 * pushes, 2)]


SLACK_BYTES = 32 << 20
"""For what allocators and the interpreter keep: a tenth of the smallest sum here."""


@pytest.mark.parametrize(("dtype", "flags"), [
    (DTYPE_F32, ()),
    (DTYPE_BF16, ("--outer-optimizer", "delayed-nesterov")),
    (DTYPE_F32, ("--checkpoint-every", "3", "--background-checkpoint")),
])
def test_a_run_takes_no_more_memory_than_it_says(tmp_path, dtype, flags):
    """Three fragments of 12, 8 and 12 MB, two learners, nine rounds."""
    numels = (3_000_000, 2_000_000, 3_000_000)
    if "--checkpoint-every" in flags:
        flags = (*flags, "--checkpoint-path", str(tmp_path / "c"))
    with ServerProcess(tmp_path, *flags, learners=2, steps=9) as server:
        before = server.rss_bytes
        learners = [server.learner(i, layout_of(*((n,) for n in numels), mode=RDA), dtype=dtype)
                    for i in range(2)]
        learners[0].send_init([np.ones(n, np.float32) for n in numels])

        def train(learner):
            for _ in range(9):
                pull = learner.pull()
                learner.push(pull, np.full(numels[pull.fragment], 1e-3, np.float32))
            learner.finish()

        threads = [threading.Thread(target=train, args=(learner,)) for learner in learners]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert server.wait() == 0
        (told,) = server.log.find("memory of this run at most")
        (totals,) = server.log.find("server totals")
    assert memory.RECEIVED_SPARE_MAX == payload.SPARE_BYTES_MAX
    parts = {name: told[name] for name in told if name not in ("time", "level", "message", "mib")}
    assert sum(parts.values()) == told["mib"]
    assert (parts["parameters"], parts["optimizer"]) == (31, 62 if dtype == DTYPE_BF16 else 31)
    assert totals["peak_rss_bytes"] - before <= (told["mib"] << 20) + SLACK_BYTES
