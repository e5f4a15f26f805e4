"""`Learner` as an object in a process: how long it waits, and how it leaves when forgotten."""

import gc
import itertools
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from syncer.learner import ConnectionFailed
from syncer.learner import learner as learner_module
from syncer.learner.session import Phase

from .clients import client_threads, ends
from .scripted_server import ScriptedServer
from .test_learner_rounds import flat, in_thread, learner_of, model, send_cut
from .waiting import step_until, until


@pytest.fixture
def server():
    with ScriptedServer() as each:
        yield each


def test_finish_follows_the_run_unless_it_is_given_a_limit(server, monkeypatch, capfd):
    """A clock that runs hours ahead: without a limit it waits on."""
    with learner_of(server, model(), learner_id=1) as learner:
        peer, clock = server.accept(), itertools.count(0.0, 3600.0)
        ahead = SimpleNamespace(monotonic=lambda: next(clock))
        monkeypatch.setattr(learner_module, "time", ahead)
        done = in_thread(learner.finish)
        until(lambda: next(clock) > 1e6, "days have passed")
        assert learner._session.phase is Phase.TRAINING
        monkeypatch.undo()
        send_cut(peer, learner, model(2), 7)
        assert done().finished
    assert "left" not in capfd.readouterr().err


def test_a_learner_that_nobody_holds_leaves_the_run(server):
    """Its threads hold the connection, never the learner; the place is free for another."""
    learner = learner_of(server, model(), learner_id=1)
    gone, peer = weakref.ref(learner), server.accept()
    assert learner.step(1).connected
    del learner
    gc.collect()
    assert gone() is None
    assert ends(peer.sockets)
    until(lambda: not client_threads(), "the threads end")


def test_a_second_learner_of_a_place_closes_the_first(server, capfd):
    first = learner_of(server, model(), learner_id=1)
    peer = server.accept()
    with learner_of(server, model(), learner_id=1) as second:
        server.accept()
        assert ends(peer.sockets)
        assert "learner 1 of this process" in capfd.readouterr().err
        with pytest.raises(ConnectionFailed, match="another Learner with id 1"):
            first.step(1)
        assert second.step(1).connected
        with learner_of(server, model(), learner_id=2):
            server.accept()
            assert second.step(1).connected


def test_empty_parameters_take_no_part(server):
    whole = model()
    parameters = {"none": np.zeros((0, 3), np.float32), **whole, "part": whole["b"][5:5]}
    with learner_of(server, parameters, learner_id=1) as learner:
        peer = server.accept()
        peer.bcast(0, 0, flat(learner, model(1), 0))
        step_until(learner, lambda s: s.applied)
        assert {t.name for f in learner.layout.fragments for t in f.tensors} == set(whole)
