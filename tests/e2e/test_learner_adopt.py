"""`Learner.adopt` against a scripted server: a late learner starts from what the run has."""

import threading

import numpy as np
import pytest

from syncer.errors import SyncerError
from syncer.learner import Learner

from .scripted_server import DEADLINE_S, ScriptedServer
from .waiting import step_until

SHAPES = {"embed": (4, 6), "a": (30, 20), "b": (17,)}


def model(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


def flat(learner: Learner, parameters: dict, fragment: int) -> np.ndarray:
    return np.concatenate(
        [parameters[t.name].reshape(-1) for t in learner.layout.fragments[fragment].tensors])


@pytest.fixture
def server():
    with ScriptedServer() as each:
        yield each


def join(server: ScriptedServer, parameters: dict) -> Learner:
    return Learner(parameters, server.address, learner_id=1, dtype="f32", fragments=3, alpha=0.5,
                   num_streams=1)


def test_takes_the_merged_values_as_they_are(server):
    """Parameters equal the broadcasts, not a blend; the first delta holds the own steps alone."""
    parameters, merged = model(0), model(1)
    with join(server, parameters) as learner:
        peer = server.accept()
        statuses = []
        waiting = threading.Thread(target=lambda: statuses.append(learner.adopt(DEADLINE_S)))
        waiting.start()
        peer.pull(1, 5)
        count = len(learner.layout.fragments)
        for f in range(count):
            peer.bcast(f, 3 + f, flat(learner, merged, f))
        waiting.join(DEADLINE_S)
        assert statuses[0].step == 0
        assert statuses[0].versions == tuple(3 + f for f in range(count))
        for name, values in parameters.items():
            np.testing.assert_array_equal(values, merged[name])

        for values in parameters.values():
            np.add(values, np.float32(0.25), out=values)
        assert step_until(learner, lambda s: s.answered).answered == ((1, 5),)
        delta = np.frombuffer(peer.receive_push().delta, "<f4")
        anchor = flat(learner, merged, 1)
        np.testing.assert_array_equal(delta, (anchor + np.float32(0.25)) - anchor)


def test_again_later_drops_the_own_steps(server):
    """Called at the end of a loop it gives the newest merged model the learner holds."""
    parameters, first, second = model(0), model(1), model(2)
    with join(server, parameters) as learner:
        peer = server.accept()
        for f in range(len(learner.layout.fragments)):
            peer.bcast(f, 0, flat(learner, first, f))
        learner.adopt(DEADLINE_S)
        for values in parameters.values():
            np.add(values, np.float32(1), out=values)
        peer.bcast(1, 2, flat(learner, second, 1))
        step_until(learner, lambda s: s.versions[1] == 2)
        learner.adopt(0.0)
        newest = {t.name for t in learner.layout.fragments[1].tensors}
        for name, values in parameters.items():
            np.testing.assert_array_equal(values, (second if name in newest else first)[name])


def test_final_cut_instead_of_broadcasts(server):
    """A learner that joins a finished run leaves at once and takes the cut."""
    parameters, cut = model(0), model(3)
    with join(server, parameters) as learner:
        peer = server.accept()
        count = len(learner.layout.fragments)
        for f in range(count):
            peer.final(f, 8, flat(learner, cut, f))
        peer.manifest(8, [8] * count)
        assert learner.adopt(DEADLINE_S).finished
        learner.finish(DEADLINE_S)
        for name, values in parameters.items():
            np.testing.assert_array_equal(values, cut[name])
        assert peer.receive_ack().step == 8


def test_missing_fragments_are_named(server):
    with join(server, model(0)) as learner:
        peer = server.accept()
        peer.bcast(0, 0, flat(learner, model(1), 0))
        step_until(learner, lambda s: s.applied)
        with pytest.raises(SyncerError, match=r"no broadcast of fragments 1, 2 within 0 s"):
            learner.adopt(0.0)
