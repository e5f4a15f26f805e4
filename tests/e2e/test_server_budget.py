"""A learner budget over real sockets: its checkpoint, and the run that goes on from it."""

from __future__ import annotations

import numpy as np

from syncer.checkpoint.reader import Checkpoint
from syncer.wire import encode, messages
from tests.e2e.scripted import ServerThread, layout_of

SMALL = layout_of((4,))
ONES = np.ones(4, np.float32)
STEPS = 100


def report(learner, steps=STEPS):
    learner.send(encode.encode_budget_done(messages.BudgetDone(steps)))


def test_the_cutoff_is_written_and_goes_on_in_a_second_run(tmp_path):
    """The open round is dropped whole; nobody gets a cut; the second run finishes."""
    path = tmp_path / "run.ckpt"
    with ServerThread(tmp_path, learners=2, quorum=2, total_steps=9, checkpoint_path=str(path),
                      learner_budget_steps=STEPS) as server:
        first, second = server.learner(0, SMALL), server.learner(1, SMALL)
        first.send_init([ONES])
        for learner in (first, second):
            learner.push(learner.pull(1), ONES)
        first.push(first.pull(2), ONES)
        report(first)
        second.pull(2)
        report(first)                             # again: it changes nothing
        report(second)
        assert server.wait() == 0
        for learner in (first, second):
            learner.ended()
            kinds = {type(message) for message in learner.seen}
            assert messages.Manifest not in kinds
        server.log.wait("learner-budget cutoff checkpoint written", step=1)
    assert not path.with_name("run.ckpt.final").exists()
    with Checkpoint(path) as checkpoint:
        assert checkpoint.facts.step == 1
    with ServerThread(tmp_path, learners=2, quorum=2, total_steps=2, checkpoint_path=str(path),
                      resume=True, start_learners=2) as server:
        learners = [server.learner(i, SMALL) for i in range(2)]
        for learner in learners:
            learner.push(learner.pull(2), ONES, base=1)
        for learner in learners:
            learner.take_cut()
        assert server.wait() == 0


def test_another_number_of_steps_ends_its_connection_and_not_the_run(tmp_path):
    """Its learner dials again, knows better, and the run ends as it should."""
    with ServerThread(tmp_path, total_steps=9, checkpoint_path=str(tmp_path / "c"),
                      learner_budget_steps=STEPS) as server:
        learner = server.learner(0, SMALL)
        learner.send_init([ONES])
        learner.pull(1)
        report(learner, STEPS - 1)
        assert learner.error() == (f"BUDGET_DONE({STEPS - 1}) of learner 0: expected {STEPS} "
                                   "steps, as --learner-budget-steps says")
        server.log.wait("report of a spent budget refused", level="warning", learner=0,
                        steps=STEPS - 1)
        again = server.learner(0, SMALL)
        report(again)
        again.ended()
        assert server.wait() == 0
