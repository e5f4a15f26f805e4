"""A learner that goes on from what an earlier process of it has kept."""

from __future__ import annotations

import copy
import pickle
import re

import numpy as np
import pytest

from syncer.errors import ConfigError
from syncer.kernels import encode_bf16
from syncer.learner import Learner, RunLost
from syncer.protocol import RunState
from syncer.wire.extension import Held

from .scripted_server import ScriptedServer
from .waiting import step_until

SHAPES = {"a": (30, 20), "b": (17,)}


@pytest.fixture
def server():
    with ScriptedServer() as each:
        each.welcome = each.welcome._replace(
            instance=78, epoch=3, global_step=6, state=RunState.RUNNING)
        yield each


def model() -> dict[str, np.ndarray]:
    return {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}


def join(server: ScriptedServer, parameters, dtype: str, **options) -> Learner:
    return Learner(parameters, server.address, learner_id=1, dtype=dtype, fragments=2,
                   num_streams=0, **options)


def broadcast(peer, fragment: int, version: int, fill: float, dtype: str) -> None:
    numel = peer.hello.layout.fragments[fragment].numel
    values = np.full(numel, fill, "<f4")
    if dtype == "f32":
        peer.bcast(fragment, version, values)
    else:
        packed = np.empty(2 * numel, np.uint8)
        encode_bf16(values, packed)
        peer.bcast(fragment, version, packed)


def trained(server: ScriptedServer, dtype: str):
    """(parameters, state) of a process that has both fragments, has made three steps on one of them
    and two on the other, and has a newer one waiting that is in no state."""
    parameters = model()
    with join(server, parameters, dtype) as learner:
        peer = server.accept()
        for fragment in (0, 1):
            broadcast(peer, fragment, 4 + fragment, 0.5, dtype)
            step_until(learner, lambda status, f=fragment: (f, 4 + f) in status.applied, tokens=0)
        begun = learner.status.step
        learner.step(10)
        learner.step(10)
        for values in parameters.values():
            np.add(values, np.float32(0.25), out=values)
        assert learner.status.step == begun + 2
        return copy.deepcopy(parameters), pickle.loads(pickle.dumps(learner.state_dict()))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "q4"])
def test_what_it_holds_is_not_sent_again_and_what_it_trained_is_not_lost(server, dtype):
    parameters, state = trained(server, dtype)
    before = copy.deepcopy(parameters)
    server.welcome = server.welcome._replace(kept=(True, True))
    with join(server, parameters, dtype, state=state) as learner:
        assert learner.resumed
        peer = server.accept()
        assert peer.hello.extension.held == (Held(78, 4), Held(78, 5))
        assert learner.status.versions == (4, 5)
        peer.pull(1, 6)
        status = step_until(learner, lambda status: status.answered, tokens=0)
        push = peer.receive_push()
        assert (push.base, push.c_tokens) == (5, 20)
        assert push.c_steps == status.step - state["fragments"][1]["steps"]
        assert push.local_step == status.step > state["steps"]
        if dtype == "f32":
            anchor = state["fragments"][1]["kept"]["anchor"]
            local = before["b" if anchor.size == 17 else "a"].reshape(-1)
            assert bytes(push.delta) == (local - anchor).tobytes()
        for name, values in parameters.items():
            np.testing.assert_array_equal(values, before[name])


def test_a_fragment_whose_newest_version_was_not_blended_yet_comes_again(server):
    parameters = model()
    with join(server, parameters, "f32") as learner:
        peer = server.accept()
        for fragment in (0, 1):
            broadcast(peer, fragment, 4, 0.5, "f32")
        step_until(learner, lambda status: status.versions == (4, 4))
        broadcast(peer, 1, 6, 1.5, "f32")
        learner._client.wait_for(lambda: learner._session.broadcasts)
        state = learner.state_dict()
    with join(server, parameters, "f32", state=state) as learner:
        peer = server.accept()
        assert peer.hello.extension.held == (Held(78, 4), None)
        broadcast(peer, 1, 6, 1.5, "f32")
        step_until(learner, lambda status: status.applied == ((1, 6),))


def test_a_state_from_before_the_run_began_is_none(server):
    with join(server, model(), "f32") as learner:
        server.accept()
        learner.step(5)
        state = learner.state_dict()
    with join(server, model(), "f32", state=state) as learner:
        assert not learner.resumed
        assert server.accept().hello.extension.held == (None, None)
        assert learner.step(1).step == 2


def test_a_run_that_was_lost_meanwhile_is_not_joined(server):
    parameters, state = trained(server, "f32")
    server.welcome = server.welcome._replace(instance=79, epoch=1, global_step=0)
    with pytest.raises(RunLost):
        join(server, parameters, "f32", state=state)


def broken(state: dict, **changes) -> dict:
    return state | changes


@pytest.mark.parametrize(("changes", "text"), [
    ({"format": "another"}, "the state has format 'another'"),
    ({"learner": 2}, "the state has learner 2, and this learner 1"),
    ({"dtype": "q4"}, "the state has dtype 'q4', and this learner 'f32'"),
    ({"fingerprint": "00"}, "the state has fingerprint '00'"),
    ({"fragments": []}, "the state is not whole"),
    ({"steps": "x"}, "the state is not whole"),
    ({"fragments": [{"version": 1}, None]}, "the state is not whole: KeyError 'source'"),
])
def test_the_state_of_another_learner_is_refused(server, changes, text):
    parameters, state = trained(server, "f32")
    with pytest.raises(ConfigError, match=re.escape(text)):
        join(server, parameters, "f32", state=broken(state, **changes))


def test_anchors_of_another_size_are_refused(server):
    parameters, state = trained(server, "f32")
    state["fragments"][0]["kept"]["anchor"] = np.zeros(3, np.float32)
    with pytest.raises(ConfigError, match="3 values of a fragment that has 600"):
        join(server, parameters, "f32", state=state)
