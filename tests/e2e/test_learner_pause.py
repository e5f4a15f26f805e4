"""A training loop that makes no step for a while: what the server hears of it, and when."""

import contextlib
import ctypes

import pytest

from syncer.wire.messages import Heartbeat

from .scripted_server import ScriptedServer
from .test_learner_rounds import learner_of, model
from .waiting import until


@pytest.fixture
def server():
    with ScriptedServer() as each:
        yield each


def hold_the_gil(seconds: float) -> None:
    """As C code does that does not care: no Python thread of this process runs meanwhile."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def heard_by_now(peer) -> list[Heartbeat]:
    """The heartbeats that the kernel has for the server at the moment of the call."""
    peer.control.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            peer._receive_some(peer.control)
    peer.control.settimeout(60.0)
    return [message for message in peer.waiting if isinstance(message, Heartbeat)]


@pytest.mark.parametrize("seconds", [4, pytest.param(30, marks=pytest.mark.slow)])
def test_a_pause_is_heard_while_the_gil_is_held(server, seconds):
    """Of a learner without data sockets, and of one with two beside it."""
    with (
        learner_of(server, model(), learner_id=1, num_streams=0) as bare,
        learner_of(server, model(), learner_id=2, num_streams=2) as striped,
    ):
        peers = [server.accept(), server.accept()]
        for peer, learner in zip(peers, (bare, striped), strict=True):
            for _ in range(3):
                learner.step(1)
            peer.receive(Heartbeat, heartbeats=True)
            peer.waiting.clear()
        hold_the_gil(seconds)
        for heard in [heard_by_now(peer) for peer in peers]:
            assert len(heard) >= seconds / 2 - 1, "about one a second"
            assert len({beat.local_step for beat in heard}) == 1, "no sample of a step"
            assert heard[0].local_step <= 3
        assert [bare.step(1).step, striped.step(1).step] == [4, 4]


def test_a_learner_that_has_made_no_step_is_heard(server):
    """Its data are prepared, its step is compiled: nothing to time, but it is there."""
    with learner_of(server, model(), learner_id=1):
        peer = server.accept()
        assert peer.receive(Heartbeat, heartbeats=True).local_step == 0


def test_the_pulse_goes_on_on_the_next_connection(server, monkeypatch):
    monkeypatch.setattr("syncer.learner.client.backoff_s", lambda attempt: 0.0)
    with learner_of(server, model(), learner_id=1) as learner:
        first = server.accept()
        learner.step(1)
        first.close()
        again = server.accept()
        again.waiting.clear()
        assert again.receive(Heartbeat, heartbeats=True).local_step == 1


def test_no_count_is_repeated_once_the_learner_has_left(server):
    with learner_of(server, model(), learner_id=1) as learner:
        peer = server.accept()
        pulse = learner._client._group._pulse
        peer.receive(Heartbeat, heartbeats=True)
        learner.close()
        until(lambda: peer.receive(Heartbeat, heartbeats=True) is None, "the connection ends")
        assert not pulse.running
