"""What a run may hold in memory: limits that hold on every branch, and the sum that is told."""

from __future__ import annotations

import threading

import numpy as np

from syncer.core import events as ev
from syncer.server import ingest
from syncer.server.workers import Job
from tests.e2e.scripted import PATIENCE_S, ServerThread, layout_of, wait_until

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
