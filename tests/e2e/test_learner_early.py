"""`finish` before the run is over: with and without a quorum that needs this learner."""

import numpy as np
import pytest

from syncer.errors import LocalProtocolError
from syncer.learner import Learner, early_end

from .scripted import ServerProcess
from .scripted_server import DEADLINE_S, ScriptedServer
from .test_learner_rounds import flat, in_thread, learner_of, model, send_cut
from .waiting import step_until, until


@pytest.fixture
def server():
    with ScriptedServer() as each:
        yield each


@pytest.fixture
def impatient(monkeypatch):
    """Short absences, and no wait for a run that may be slow."""
    for name, seconds in (("WAITED_FOR_MIN_S", 0.3), ("AWAY_MIN_S", 0.2), ("AWAY_MAX_S", 0.4)):
        monkeypatch.setattr(early_end, name, seconds)


def test_a_run_that_waits_for_it_is_left_and_the_cut_is_fetched_later(server, impatient, stderr):
    with learner_of(server, model(), learner_id=1, max_reconnects=0) as learner:
        peer = server.accept()
        peer.bcast(0, 0, flat(learner, model(1), 0))
        step_until(learner, lambda s: s.applied)
        done = in_thread(learner.finish)
        peer.pull(0, 1)
        assert peer.receive() is None, "it leaves, since no step will come"
        again = server.accept()
        again.bcast(0, 0, flat(learner, model(1), 0))
        again.pull(0, 1, 2)
        assert again.receive() is None, "and again, while the run still waits"
        last = server.accept()
        send_cut(last, learner, model(2), 7)
        assert done().finished
        assert last.receive_ack().step == 7
    until(lambda: "left" in stderr.getvalue(), "the line about it")


def test_a_round_that_is_launched_again_is_left_at_once(server, monkeypatch):
    monkeypatch.setattr(early_end, "WAITED_FOR_MIN_S", 1e6)
    monkeypatch.setattr(early_end, "AWAY_MIN_S", 0.1)
    with learner_of(server, model(), learner_id=1) as learner:
        peer = server.accept()
        peer.bcast(0, 0, flat(learner, model(1), 0))
        step_until(learner, lambda s: s.applied)
        done = in_thread(learner.finish)
        peer.pull(0, 1)
        until(lambda: learner._owed, "the pull is seen")
        peer.pull(0, 1, 2)
        assert peer.receive() is None
        send_cut(server.accept(), learner, model(2), 7)
        assert done().finished


def test_what_it_can_answer_it_answers_first(server, impatient):
    with learner_of(server, model(), learner_id=1) as learner:
        peer = server.accept()
        peer.bcast(0, 0, flat(learner, model(1), 0))
        step_until(learner, lambda s: s.applied)
        learner.step(1)
        peer.pull(0, 1)
        done = in_thread(learner.finish)
        assert peer.receive_push().step == 1
        peer.bcast(0, 1, flat(learner, model(1), 0))
        peer.pull(0, 4)
        assert peer.receive() is None
        send_cut(server.accept(), learner, model(2), 7)
        assert done().finished


def flags(quorum: int, *more: str) -> list[str]:
    return ["--quorum", str(quorum), "--grace-ms", "50", "--sync-interval-steps", "0", *more]


def parameters() -> dict[str, np.ndarray]:
    return {"a": np.zeros((7, 30), np.float32), "b": np.zeros(9, np.float32)}


def of_run(port: int, learner: int, values: dict[str, np.ndarray]) -> Learner:
    return Learner(values, f"127.0.0.1:{port}", learner_id=learner, dtype="f32", fragments=2,
                   num_streams=1)


def test_with_a_quorum_of_the_others_the_run_goes_on_and_both_end_equal(tmp_path, monkeypatch):
    monkeypatch.setattr(early_end, "WAITED_FOR_MIN_S", DEADLINE_S)  # a loaded machine may pause
    first, second = parameters(), parameters()
    with ServerProcess(tmp_path, *flags(1), learners=2, steps=120) as run, \
            of_run(run.port, 0, first) as stays, of_run(run.port, 1, second) as ends:
        until(lambda: min([max(each.step(1).versions) for each in (stays, ends)]) > 3,
              "both take part")
        done = in_thread(ends.finish)
        step_until(stays, lambda s: s.finished)
        stays.finish()
        assert done().finished
        assert all(first[name].tobytes() == second[name].tobytes() for name in first)
        assert run.wait() == 0, run.log.text()


def test_with_a_quorum_of_all_the_run_waits_without_relaunches(tmp_path, impatient):
    """It is left, also in the server's log; and who takes its place finds the run as it was."""
    with ServerProcess(tmp_path, *flags(2, "--quorum-timeout-s", "2"), learners=2,
                       steps=40) as run, \
            of_run(run.port, 0, parameters()) as stays, of_run(run.port, 1, parameters()) as ends:
        until(lambda: min([max(each.step(1).versions) for each in (stays, ends)]) > 3,
              "both take part")

        def early() -> bool:
            with pytest.raises(LocalProtocolError, match="was closed"):
                ends.finish()
            return True

        done = in_thread(early)
        until(lambda: stays.step(1) and run.log.find("learner disconnected"), "it has left")
        ends.close()
        assert done()
        with of_run(run.port, 1, parameters()) as successor:
            until(lambda: all([each.step(1).finished for each in (stays, successor)]), "the end")
            finished = in_thread(successor.finish)
            stays.finish(DEADLINE_S)
            assert finished().finished
        assert run.wait() == 0, run.log.text()
