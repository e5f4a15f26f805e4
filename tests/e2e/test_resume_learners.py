"""Real learners across a killed server: they find the resumed one, and all end with its bits."""

from __future__ import annotations

import signal

import numpy as np
import pytest
from safetensors.numpy import load_file

from syncer.cli import main
from tests.e2e.convex_learner import distance
from tests.e2e.scripted import ServerProcess
from tests.e2e.test_learner_server import Learners, check_equal_to_the_server
from tests.e2e.waiting import DEADLINE_S, until


@pytest.mark.parametrize(("every", "signum", "status", "oldest"), [
    (("1",), signal.SIGKILL, -signal.SIGKILL, 11),
    (("4", "--background-checkpoint"), signal.SIGTERM, 128 + signal.SIGTERM, 11),
    (("4",), signal.SIGKILL, -signal.SIGKILL, 8),
], ids=["every step, killed", "every fourth, stopped", "every fourth, killed"])
def test_learners_live_through_the_end_of_a_server(tmp_path, every, signum, status, oldest):
    """In the middle; another server on the same port with --resume; then a late joiner.

    Whatever was broadcast is on disk with a checkpoint of every step, or after a signal, which
    saves the last cut. Killed otherwise, the server goes back some steps and the learners follow.
    """
    path, state, export = tmp_path / "c", tmp_path / "final.bin", tmp_path / "model"
    held = tmp_path / "go-on"
    flags = ["--checkpoint-path", str(path), "--checkpoint-every", *every, "--quorum", "1",
             "--grace-ms", "200", "--outer-momentum", "0.5", "--final-state", str(state)]
    with (ServerProcess(tmp_path, *flags, learners=3, steps=60) as server,
          Learners(server, tmp_path, "--hold", str(held), "--hold-at", "20") as learners):
        processes = [learners.start(learner) for learner in range(3)]
        until(lambda: len(server.log.find("outer step")) >= 12, "twelve outer steps")
        processes[2].kill()
        processes[2].wait(DEADLINE_S)
        server.signal(signum)
        assert server.wait() == status
        port = ("--port", str(server.port))
        with ServerProcess(tmp_path, *flags, "--resume", *port, learners=3, steps=60) as second:
            step = second.log.wait("resumed from checkpoint")["step"]
            assert step >= oldest
            until(lambda: second.log.find("learner connected"), "a learner that found its way back")
            processes[2] = learners.start(2)
            for learner in range(3):  # they come back at random moments, and the run is short
                until(lambda who=learner: second.log.find("learner connected", learner=who),
                      f"learner {learner} is there")
            held.touch()
            until(lambda: second.log.find("outer step"), "a step of the resumed run")
            raised = sum(line["by"] for line in second.log.find("steps were raised"))
            assert bool(raised) == (signum == signal.SIGKILL and every[0] != "1")
            assert second.log.find("outer step")[0]["step"] == step + raised + 1
            assert [p.wait(DEADLINE_S) for p in processes] == [0, 0, 0], learners.logs()
            assert second.wait() == 0, second.log.text()
        check_equal_to_the_server(learners, range(3), state)
        assert distance(learners.parameters(0)) < 0.2
        assert main(["checkpoint", "export", str(path), str(export)]) == 0, "learner 0 told names"
        expected = learners.parameters(0)
    found = load_file(export)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].shape == values.shape
        assert np.array_equal(found[name], values)
