"""error_feedback: what a delta in q4 has lost is in the next one, if the server says it counts."""

from __future__ import annotations

import numpy as np
import pytest

from syncer.errors import ConfigError
from syncer.kernels import decode_q4, encode_bf16, encode_q4
from syncer.learner import Learner
from syncer.protocol import PushFate, RunState
from syncer.wire.extended import Fate
from syncer.wire.extension import Extension
from tests.e2e.scripted import ServerThread, layout_of, wait_until
from tests.e2e.scripted_server import ScriptedServer
from tests.e2e.waiting import step_until

ONE = layout_of((700,))


def parameters() -> dict[str, np.ndarray]:
    return {"w": np.linspace(-1, 1, 300, dtype=np.float32)}


def q4(delta: np.ndarray) -> bytes:
    out = np.zeros(264, np.uint8)
    encode_q4(delta, out)
    return out.tobytes()


def lost(delta: np.ndarray) -> np.ndarray:
    kept = np.empty_like(delta)
    decode_q4(q4(delta), kept, False)
    return delta - kept


def zeros(version: int) -> np.ndarray:
    """A broadcast; each version has bits of its own."""
    out = np.empty(600, np.uint8)
    encode_bf16(np.full(300, version, np.float32), out)
    return out


class Island:
    """A learner with error feedback at a scripted server; its values never change."""

    def __init__(self, server: ScriptedServer, **options):
        self.arrays = parameters()
        self.learner = Learner(self.arrays, server.address, learner_id=1, dtype="q4", fragments=1,
                               num_streams=0, bounded_lag=False, error_feedback=True, **options)
        self.peer = server.accept()

    def sent(self, step: int, version: int | None = None, attempt: int = 1) -> bytes:
        """The delta that answers a pull, on this version if it is a new one."""
        if version is not None:
            self.peer.bcast(0, version, zeros(version))
            step_until(self.learner, lambda status: status.applied)
        self.peer.pull(0, step, attempt)
        step_until(self.learner, lambda status: status.answered)
        return bytes(self.peer.receive_push().delta)

    def delta(self, version: int) -> np.ndarray:
        return self.arrays["w"] - np.float32(version)


@pytest.fixture
def server():
    with ScriptedServer() as each:
        each.welcome = each.welcome._replace(global_step=1, state=RunState.RUNNING, epoch=2)
        yield each


def test_only_what_was_merged_is_carried_on(server):
    island = Island(server)
    with island.learner:
        assert island.peer.hello.extension.fates
        assert island.sent(2, 1) == q4(island.delta(1))
        error = lost(island.delta(1))
        island.peer.fate(0, 2, PushFate.MERGED)
        delta = None
        island.peer.bcast(0, 2, zeros(2))
        step_until(island.learner, lambda status: status.applied)
        delta = island.delta(2) + error
        assert island.sent(3) == q4(delta)
        island.peer.fate(0, 3, PushFate.GIVEN_UP)
        assert island.sent(3, attempt=2) == q4(island.delta(2))
        assert island.sent(4) == q4(island.delta(2))  # of that one nothing was said


def test_a_server_that_does_not_tell_is_named_once(server, capfd):
    island = Island(server)
    with island.learner:
        for step in (2, 3, 4, 5):
            assert island.sent(step, 1 if step == 2 else None) == q4(island.delta(1))
    assert capfd.readouterr().err.count("does not tell what becomes of a push") == 1


def test_a_state_has_the_error_that_is_to_come(server):
    first = Island(server)
    with first.learner:
        first.sent(2, 1)
        assert "error" not in first.learner.state_dict()["fragments"][0]["kept"]  # undecided
        first.peer.fate(0, 2, PushFate.MERGED)
        first.peer.bcast(0, 2, zeros(2))
        error = lost(first.delta(1))
        step_until(first.learner, lambda status: status.applied)
        state = first.learner.state_dict()
        assert state["fragments"][0]["merged"] == 2
    for kept in (True, False):
        server.welcome = server.welcome._replace(kept=(kept,))
        again = Island(server, state=state)
        with again.learner:
            np.copyto(again.arrays["w"], first.arrays["w"])
            again.learner.step(1)
            delta = again.delta(2)
            if kept:
                assert again.sent(3) == q4(delta + error)
            else:
                again.peer.bcast(0, 2, zeros(2))
                assert again.sent(3) == q4(delta)


def test_f32_loses_nothing(server):
    with pytest.raises(ConfigError, match="error_feedback needs dtype bf16 or q4"):
        Learner(parameters(), server.address, learner_id=1, dtype="f32", error_feedback=True)


def test_a_server_tells_who_asks_and_nobody_else(tmp_path):
    with ServerThread(tmp_path, learners=3, quorum=2, grace_ms=0, total_steps=3,
                      pipeline=1) as server:
        fleet = [server.learner(i, ONE, extension=said)
                 for i, said in enumerate((Extension(fates=True), Extension(), None))]
        fleet[0].send_init([np.zeros(700, np.float32)])
        pulls = [learner.pull(1) for learner in fleet]
        for learner, pull in zip(fleet[:2], pulls, strict=False):
            learner.push(pull, np.ones(700, np.float32))
        fleet[0].early.append(fleet[0].pull(2))
        assert fleet[0].seen[-3] == Fate(0, 1, 1, PushFate.MERGED)
        for learner in fleet[1:]:
            learner.push(learner.pull(2), np.ones(700, np.float32))
        fleet[0].pull(3)
        told = [message for message in fleet[0].seen if isinstance(message, Fate)]
        assert told == [Fate(0, 1, 1, PushFate.MERGED), Fate(0, 2, 1, PushFate.NOT_COME)]
        for learner in fleet[1:]:
            learner.pull(3)
            assert not any(isinstance(message, Fate) for message in learner.seen)
        server.close_learners()


def test_learners_and_their_server_agree(tmp_path):
    """Through the whole library: each learner's errors are carried on, and both end alike."""
    with ServerThread(tmp_path, learners=2, quorum=2, grace_ms=0, total_steps=12) as server:
        arrays = [parameters(), parameters()]
        learners = [Learner(each, f"127.0.0.1:{server.port}", learner_id=i, dtype="q4",
                            fragments=1, error_feedback=True) for i, each in enumerate(arrays)]
        try:
            merged = set()

            def trained() -> bool:
                for learner, each in zip(learners, arrays, strict=True):
                    each["w"] += np.float32(0.01)
                    learner.step(1)
                    merged.add(learner._session.fates.merged(0))
                return all(learner.status.finished for learner in learners)

            wait_until(trained, "the run ends")
            for learner in learners:
                learner.finish()
            assert len(merged) > 2
            assert arrays[0]["w"].tobytes() == arrays[1]["w"].tobytes()
        finally:
            for learner in learners:
                learner.close()
        assert server.wait() == 0
