"""Learners whose values have blown up, against real servers: the others train on."""

from __future__ import annotations

import numpy as np
import pytest

from syncer.protocol import DTYPE_BF16, DTYPE_F32, DTYPE_Q4, bulk_dtype
from syncer.wire import messages
from tests.e2e.scripted import ServerThread, from_wire, layout_of
from tests.e2e.tape import records as tape_records

SMALL = layout_of((4,))
EDGE = np.array([0, 0, 3.3895e38, 0], np.float32)
"""Initial values that bf16 can just carry."""
OVER = np.array([0, 0, 2e36, 0], np.float32)
"""A delta whose half takes them to what f32 can carry and bf16 cannot."""
WILD = np.array([0, -3.3e38, 3.3e38, 0], np.float32)
CALM = np.array([1, 1, 0, 1], np.float32)


def broadcasts(learner, dtype):
    return [from_wire(m.tensor, bulk_dtype(dtype)) for m in learner.seen
            if isinstance(m, messages.Bcast)]


@pytest.mark.parametrize("fold", ["batch", "streaming", "exact"])
@pytest.mark.parametrize("dtype", [DTYPE_F32, DTYPE_BF16, DTYPE_Q4])
def test_one_that_has_blown_up_is_left_out_and_named(tmp_path, dtype, fold):
    """Every learner gets finite values, and the run ends as it should."""
    tape, steps = tmp_path / "tape", 4
    wild = OVER if dtype != DTYPE_F32 else WILD
    settings = {"fold": fold, "learner_weight": "equal", "delta_correction": "none"}
    with ServerThread(tmp_path, learners=2, quorum=2, total_steps=steps, event_tape=str(tape),
                      outer_lr=1.0, outer_optimizer="sgd", **settings) as server:
        honest, other = (server.learner(i, SMALL, dtype=dtype) for i in (0, 1))
        honest.send_init([EDGE])
        for _ in range(steps + (fold != "batch")):  # a fold has to be gathered again once
            for learner, delta in ((honest, CALM), (other, wild)):
                learner.push(learner.pull(), delta)
        for learner in (honest, other):
            learner.take_cut()
        assert server.wait() == 0
        assert len(broadcasts(honest, dtype)) >= steps
        assert all(np.isfinite(values).all() for values in broadcasts(honest, dtype))
        named = server.log.find("contribution left out: the merge would not be finite")
        assert {(line["learner"], line["fragment"], line["element"]) for line in named} == {
            (1, 0, 2)}
    merges = [record for record in tape_records(tape) if "responders" in record]
    assert [record["step"] for record in merges] == list(range(1, steps + 1))
    for record in merges:
        assert [entry["id"] for entry in record["responders"]] == [0]
        assert [entry["id"] for entry in record["excluded"]] == [1]


def test_a_run_of_which_nothing_finite_is_left_ends_after_the_limit(tmp_path):
    with ServerThread(tmp_path, total_steps=3, nonfinite_limit=3) as server:
        learner = server.learner(0, SMALL)
        learner.send_init([np.full(4, 3e38, np.float32)])
        for attempt in (1, 2, 3):
            pull = learner.pull()
            assert (pull.step, pull.attempt) == (1, attempt)
            learner.push(pull, np.full(4, 3.4e38, np.float32))
        learner.ended()
        assert server.wait() == 1
        assert [m.version for m in learner.seen if isinstance(m, messages.Bcast)] == [0]
        assert len(server.log.find("contribution left out: the merge would not be finite")) == 3
        server.log.wait("--nonfinite-limit", level="error")


def test_a_learner_that_is_always_first_and_never_finite_does_not_end_the_run(tmp_path):
    """With quorum 1 its push alone closes the round; the other one is asked then."""
    steps = 12
    with ServerThread(tmp_path, learners=2, quorum=1, grace_ms=0, total_steps=steps,
                      nonfinite_limit=2, pipeline=1) as server:
        honest, other = (server.learner(i, SMALL) for i in (0, 1))
        honest.send_init([np.array([0, 0, 3.3e38, 0], np.float32)])
        for step in range(1, steps + 1):
            other.push(other.pull(step), WILD)
            pull = honest.pull(step)
            while pull.attempt == 1:
                pull = honest.pull(step)
            honest.push(pull, CALM)
        for learner in (honest, other):
            learner.take_cut()
        assert server.wait() == 0
