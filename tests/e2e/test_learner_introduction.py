"""`Learner` that introduces itself, against servers that answer and one that does not know how."""

import re

import numpy as np
import pytest

from syncer.errors import LocalProtocolError, SyncerError
from syncer.learner import ConnectionFailed, Learner, RunLost, RunMismatch, early_end, greeting
from syncer.protocol import RunState
from syncer.wire.contracts import run_contract
from syncer.wire.extended import LearnerReport, Welcome
from syncer.wire.extension import Held

from .clients import client_threads
from .scripted_server import PUBLISHED_REFUSAL, ScriptedServer
from .test_learner_rounds import flat, in_thread, model
from .waiting import step_until, until

RUNNING = RunState.RUNNING


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("syncer.learner.client.backoff_s", lambda attempt: 0.0)
    monkeypatch.setattr("syncer.learner.client.DRAIN_S", 0.0)


@pytest.fixture
def server():
    with ScriptedServer() as each:
        yield each


def join(server: ScriptedServer, parameters=None, *, learner_id: int = 1, **options) -> Learner:
    return Learner(model() if parameters is None else parameters, server.address,
                   learner_id=learner_id, fragments=3, **{
                       "run": "blue", "num_streams": 2, "dtype": "f32", **options})


def told(stderr, line: str) -> None:
    until(lambda: line in stderr.getvalue(), line)


def send(learner: Learner, peer, versions, seed: int = 1) -> None:
    for fragment, version in enumerate(versions):
        if version is not None:
            peer.bcast(fragment, version, flat(learner, model(seed), fragment))


# --- a server of protocol 4 ----------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, b"secret"])
def test_a_published_server_refuses_it_and_it_goes_on_without(key, stderr):
    with ScriptedServer(key=key, published=True) as server, join(server, key=key or "") as learner:
        peer = server.accept()
        assert peer.hello.extension is None
        assert peer.hello.contract == run_contract(peer.hello.fingerprint, "blue")
        told(stderr, "speaks protocol 4 alone (invalid HELLO: ")
        learner.report(loss=1.0)
        send(learner, peer, (4, 5, 6))
        told(stderr, "the run is at step 6; ")
        peer.close()
        again = server.accept()
        assert again.hello.extension is None
        send(learner, again, (7, 8, 9), 2)
        step_until(learner, lambda status: status.versions == (7, 8, 9))
        assert server.refused == 1, "it remembers"
        assert stderr.getvalue().count("protocol 4 alone") == 1


def test_after_a_welcome_a_server_of_protocol_4_is_not_followed(server):
    with join(server) as learner:
        peer = server.accept()
        server.refusal = PUBLISHED_REFUSAL
        peer.close()
        with pytest.raises(RunMismatch, match="protocol 4 alone"):
            step_until(learner, lambda status: False)


# --- a server that answers -----------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, b"secret"])
def test_a_server_that_answers_learns_who_comes_and_says_where_the_run_is(key, stderr):
    with ScriptedServer(key=key) as server:
        server.welcome = server.welcome._replace(
            global_step=17, state=RUNNING, run="blue", epoch=2)
        with join(server, learner_id=0, key=key or "") as learner:
            peer = server.accept()
            said = peer.hello.extension
            assert (said.run.name, said.run.base) == ("blue", peer.hello.fingerprint)
            assert said.client.startswith("syncer ")
            assert said.names == learner.layout.names
            assert said.held == (None,) * 3
            told(stderr, "the run blue is at step 17 of 100; learner 0 has made no step yet")
            peer.notice(1, "waiting for learner 3")
            told(stderr, f"{server.address}: waiting for learner 3")
            with pytest.raises(SyncerError, match=r"run started.*; waiting for learner 3$"):
                learner.adopt(timeout_s=0)
            learner.report(loss=2.5, tokens_per_s=1000)
            assert peer.receive_report() == LearnerReport(2.5, 1000.0)
            learner.report(loss=2.25, goodput=0.5)  # within the second: at a step boundary after it
            found = []
            reported = in_thread(lambda: found.append(peer.receive_report()) or found)
            step_until(learner, lambda _: found)
            assert reported() == [LearnerReport(2.25, None, None, 0.5)]


def test_learner_0_brings_its_values_to_a_run_that_waits_and_to_no_other(server):
    with join(server, learner_id=0) as learner:
        peer = server.accept()
        first = peer.receive_inits()
        send(learner, peer, (0, 0, 0))
        learner.adopt()
        server.welcome = server.welcome._replace(instance=78)
        peer.close()
        stepping = in_thread(
            lambda: step_until(learner, lambda status: status.versions == (4, 5, 6)))
        peer = server.accept()
        assert len(peer.receive_inits()) == len(first)
        send(learner, peer, (4, 5, 6))
        stepping()
        server.welcome = server.welcome._replace(epoch=2, instance=79, global_step=6)
        peer.close()
        peer, found = server.accept(), []
        learner.report(lr=1.0)
        received = in_thread(lambda: found.append(peer.receive()) or found)
        step_until(learner, lambda _: found)
        assert received() == [LearnerReport(lr=1.0)], "no INIT in front of it"


def test_a_refusal_is_raised_by_the_constructor(server):
    server.refusal = "session mismatch: run blue, expected run green"
    with pytest.raises(ConnectionFailed, match="layout_hash_mismatch: session mismatch"):
        join(server)
    until(lambda: not client_threads(), "the threads end")


def test_a_server_that_has_no_time_now_is_dialed_again(server, stderr, monkeypatch):
    monkeypatch.setattr("syncer.learner.client.FIRST_PAUSE_S", 0.01)
    server.refusal = "try again later"
    joining = in_thread(lambda: join(server))
    until(lambda: server.refused > 1, "two attempts")
    server.refusal = None
    with joining():
        server.accept()


def test_an_answer_that_does_not_come_is_told_of_and_ends_with_close(stderr, monkeypatch):
    monkeypatch.setattr(greeting, "UNANSWERED_S", 0.1)
    with ScriptedServer() as server:
        with join(server) as learner:
            server.welcome = None  # nobody answers from now on
            server.accept().close()
            line = r"connected, and no answer for 0\.1 s; waiting for 1\d(\.\d)? s more"
            until(lambda: re.search(line, stderr.getvalue()), "the line")
        with pytest.raises(LocalProtocolError, match="was closed"):
            learner.step(1)
        until(lambda: not client_threads(), "the threads end")


def test_an_answer_that_does_not_come_ends_the_constructor_with_the_reason(server):
    server.welcome = None
    with pytest.raises(ConnectionFailed, match="no answer to the HELLO within"):
        join(server, connect_timeout_s=0.3)
    until(lambda: not client_threads(), "the threads end")


# --- one server after the other ------------------------------------------------------------------


def test_what_is_kept_is_not_sent_again_and_is_the_anchor(server):
    with join(server, alpha=0.0) as learner:
        peer = server.accept()
        send(learner, peer, (4, 5, 6))
        step_until(learner, lambda status: status.versions == (4, 5, 6))
        learner.adopt()
        server.welcome = Welcome(2, 78, 6, 100, 8, 1, 0.0, RUNNING, "s", kept=(True, False, True))
        peer.close()
        stepping = in_thread(lambda: step_until(learner, lambda status: status.answered))
        again = server.accept()
        assert again.hello.extension.held == (Held(77, 4), Held(77, 5), Held(77, 6))
        again.pull(1, 8)
        again.pull(2, 9)
        push = again.receive_push()
        assert (push.fragment, push.step, push.base) == (2, 9, 6)
        assert stepping().answered == ((2, 9),), "fragment 1 has to come again"
        send(learner, again, (None, 3, None), 2)
        step_until(learner, lambda status: status.versions == (4, 3, 6))


def test_a_run_that_is_lost_is_said(server):
    with join(server) as learner:
        peer = server.accept()
        send(learner, peer, (4, 5, 6))
        step_until(learner, lambda status: status.versions == (4, 5, 6))
        server.welcome = server.welcome._replace(instance=78)
        peer.close()
        with pytest.raises(RunLost, match=r"holds version 6.*--resume.*on_lost_run"):
            step_until(learner, lambda status: False)


def test_an_older_server_is_not_followed(server):
    server.welcome = server.welcome._replace(epoch=5, state=RUNNING, global_step=6)
    with join(server) as learner:
        peer = server.accept()
        send(learner, peer, (4, 5, 6))
        step_until(learner, lambda status: status.versions == (4, 5, 6))
        server.welcome = server.welcome._replace(epoch=4, instance=78)
        peer.close()
        with pytest.raises(RunMismatch, match=r"its epoch is 4.*has followed epoch 5"):
            step_until(learner, lambda status: False)


def test_a_lost_run_is_begun_anew_with_what_learner_0_has(server):
    parameters = model()
    with join(server, parameters, learner_id=0, on_lost_run="reseed", alpha=0.0) as learner:
        peer = server.accept()
        peer.receive_inits()
        send(learner, peer, (4, 5, 6))
        step_until(learner, lambda status: status.versions == (4, 5, 6))
        server.welcome = server.welcome._replace(instance=78)
        peer.close()
        stepping = in_thread(lambda: step_until(learner, lambda status: status.applied))
        peer = server.accept()
        inits = [np.frombuffer(init, "<f4") for init in peer.receive_inits()]
        assert all(np.array_equal(init, flat(learner, parameters, fragment))
                   for fragment, init in enumerate(inits))
        send(learner, peer, (0, 0, 0), 2)
        assert max(stepping().versions) == 0


def test_a_round_of_everybody_is_left_at_once_by_who_makes_no_more_steps(server, monkeypatch):
    """Nothing closes without it: there is no need to see whether the run waits."""
    monkeypatch.setattr(early_end, "WAITED_FOR_MIN_S", 1e6)
    monkeypatch.setattr(early_end, "AWAY_MIN_S", 1e6)
    server.welcome = server.welcome._replace(state=RUNNING, learners=2, quorum=2)
    with join(server) as learner:
        peer = server.accept()
        send(learner, peer, (1, 2, 3))
        learner.adopt()
        ending = in_thread(lambda: closed(learner.finish))
        peer.pull(0, 4)
        assert peer.receive() is None
    assert ending()


def closed(call) -> bool:
    with pytest.raises(LocalProtocolError, match="was closed"):
        call()
    return True
