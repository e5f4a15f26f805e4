"""`Learner` as an object in a process: how long it waits, and how it leaves when forgotten."""

import contextlib
import gc
import itertools
import os
import signal
import warnings
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from syncer.errors import LocalProtocolError
from syncer.learner import ConnectionFailed, initial_values
from syncer.learner import client as client_module
from syncer.learner import learner as learner_module
from syncer.learner.session import Phase
from syncer.protocol import CHUNK_SIZE

from .clients import client_threads, ends
from .scripted_server import PUBLISHED_REFUSAL, ScriptedServer
from .test_learner_rounds import flat, in_thread, learner_of, model, send_cut
from .waiting import step_until, until


@pytest.fixture
def server():
    with ScriptedServer() as each:
        yield each


def test_finish_follows_the_run_unless_it_is_given_a_limit(server, monkeypatch):
    """A clock that runs hours ahead: without a limit it waits on."""
    with learner_of(server, model(), learner_id=1) as learner:
        peer, clock, lines = server.accept(), itertools.count(0.0, 3600.0), []
        monkeypatch.setattr(learner._client, "say", lines.append)
        ahead = SimpleNamespace(monotonic=lambda: next(clock))
        monkeypatch.setattr(learner_module, "time", ahead)
        done = in_thread(learner.finish)
        until(lambda: next(clock) > 1e6, "days have passed")
        assert learner._session.phase is Phase.TRAINING
        monkeypatch.undo()
        send_cut(peer, learner, model(2), 7)
        assert done().finished
    assert lines
    assert "left" not in "".join(lines)


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


def test_a_second_learner_of_a_place_closes_the_first(server, stderr):
    first = learner_of(server, model(), learner_id=1)
    peer = server.accept()
    with learner_of(server, model(), learner_id=1) as second:
        server.accept()
        assert ends(peer.sockets)
        until(lambda: "learner 1 of this process" in stderr.getvalue(), "the line about it")
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


# --- after the end, and before the beginning ------------------------------------------------------


def test_a_closed_learner_says_so(server):
    learner = learner_of(server, model(), learner_id=1)
    server.accept()
    learner.step(1)
    learner.close()
    for use in (lambda: learner.step(1), learner.finish, learner.adopt):
        with pytest.raises(LocalProtocolError, match="was closed"):
            use()
    learner.close()
    assert learner.bytes_sent >= 0


def test_a_finished_learner_keeps_its_status_when_it_is_closed(server):
    with learner_of(server, model(), learner_id=1) as learner:
        peer = server.accept()
        send_cut(peer, learner, model(2), 7)
        done = learner.finish()
    assert learner.finish().versions == done.versions
    with pytest.raises(LocalProtocolError, match="was closed"):
        learner.step(1)


@pytest.mark.parametrize("wait", ["finish", "adopt"])
def test_closing_ends_a_wait_of_another_thread(server, wait):
    learner, raised = learner_of(server, model(), learner_id=1), []

    def waits():
        with pytest.raises(LocalProtocolError, match="was closed") as error:
            getattr(learner, wait)()
        raised.append(error)
        return True

    done = in_thread(waits)
    server.accept()
    learner.close()
    assert done()
    assert raised


@pytest.mark.parametrize("streams", [0, 2])
def test_a_server_that_accepts_and_does_not_read_is_not_waited_for_for_ever(
        server, monkeypatch, stderr, streams):
    """For `connect_timeout_s` without a byte of progress, with lines about it."""
    monkeypatch.setattr(initial_values, "REPORT_S", 0.2)
    large = {"a": np.zeros(30_000_000, np.float32)}  # more than any socket buffer
    with pytest.raises(ConnectionFailed, match=r"does not read.*0 of 1 fragments sent"):
        learner_of(server, large, connect_timeout_s=2.0, num_streams=streams)
    until(lambda: "initial values: 0 of 1 fragments sent" in stderr.getvalue(), "a line")
    until(lambda: not client_threads(), "the threads end")


def test_a_slow_server_is_waited_for(server, monkeypatch):
    """It takes a little every 60 s of a clock of the test; a first connection may take 100 s."""
    seconds = [0.0]
    monkeypatch.setattr(initial_values, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    large = {"a": np.zeros(30_000_000, np.float32)}  # more than any socket buffer
    made = in_thread(lambda: learner_of(server, large, connect_timeout_s=100.0, num_streams=0))
    peer, ticks = server.accept(), 0
    (client,) = [each for each in client_module._clients if not each.session.ended
                 and each._shown == server.address]
    taken, whole = client.bytes_on_connection, 4 * 30_000_000
    while taken + 2 * CHUNK_SIZE < whole:  # it goes on when the server has read some
        while client.bytes_on_connection == taken:
            peer._receive_some(peer.control)
        taken, ticks = client.bytes_on_connection, ticks + 1
        seconds[0] += 60.0
    peer.receive_inits()
    with made() as learner:
        assert ticks > 3
        assert learner.step(1).connected


def test_a_forked_child_never_waits_for_a_lock_of_its_parent(server):
    with learner_of(server, model(), learner_id=1) as learner:
        server.accept()
        with learner._client.lock, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer Pythons warn about any fork beside threads
            child = in_thread(lambda: _fork(lambda: _refused(learner)))
            status = child()
        assert status == 0


def _fork(body) -> int:
    """The exit status of a child that runs `body` and must not take long."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(body())
        finally:
            os._exit(99)
    ended = []
    try:
        until(lambda: ended.append(os.waitpid(child, os.WNOHANG)) or ended[-1][0], "the child ends")
    except AssertionError:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    return os.waitstatus_to_exitcode(ended[-1][1])


def _refused(learner) -> int:
    """How many uses of a parent's learner go through, in a child."""
    uses = [lambda: learner.bytes_sent, lambda: learner.bytes_received, lambda: learner.step(1),
            learner.finish, learner.adopt]
    through = 0
    for use in uses:
        with contextlib.suppress(LocalProtocolError):
            use()
            through += 1
    learner.close()
    return through


def test_a_learner_says_where_the_run_and_itself_are(server, monkeypatch, stderr):
    """At the start, and on every connection: what protocol 4 lets it know."""
    server.refusal = PUBLISHED_REFUSAL
    monkeypatch.setattr("syncer.learner.client.backoff_s", lambda attempt: 0.0)

    def line(text: str) -> bool:
        return text in stderr.getvalue()

    with learner_of(server, model(), learner_id=1) as learner:
        peer, fragments = server.accept(), len(learner.layout.fragments)
        for f in range(fragments - 1):
            peer.bcast(f, 40 + f, flat(learner, model(1), f))
        step_until(learner, lambda s: s.versions[fragments - 2] > 0)
        assert not line("the run is at"), "not before it is known of every fragment"
        peer.bcast(fragments - 1, 42, flat(learner, model(1), fragments - 1))
        until(lambda: line("the run is at step 42; learner 1 has made "), "the line")
        peer.close()
        again, steps = server.accept(), learner.step(5).step
        for f in range(fragments):
            again.bcast(f, 50 + f, flat(learner, model(2), f))
        where = f"the run is at step {49 + fragments}; learner 1 has made {steps} steps"
        until(lambda: line(where), "the line of the new connection")
