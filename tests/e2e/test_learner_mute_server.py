"""A peer that accepts connections and says nothing, on real sockets: whatever waits for it says so,
and ends at its limit with the reason."""

import contextlib
import re
import socket
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from syncer.errors import SyncerError
from syncer.learner import ConnectionFailed, initial_values
from syncer.learner import client as client_module
from syncer.learner import learner as learner_module
from syncer.learner import news as news_module
from syncer.learner.client import Client
from syncer.learner.client_group import Receipt
from syncer.learner.dialing import Dialer
from syncer.learner.introduction import Introduction

from .clients import client_threads, make_session
from .scripted_server import ScriptedServer
from .test_learner_rounds import flat, in_thread, learner_of, model, send_cut
from .waiting import DEADLINE_S, step_until, until

LIMIT_S = 0.3
SILENT = "which has said nothing in"


class Mute:
    """Accepts and is silent; reads what comes, or not even that."""

    def __init__(self, reads: bool = True):
        self.listener = socket.create_server(("127.0.0.1", 0))
        host, port = self.listener.getsockname()
        self.address = f"{host}:{port}"
        self.reads = reads
        self.taken: list[socket.socket] = []
        self._doorkeeper = threading.Thread(target=self._accept, daemon=True, name="mute")
        self._doorkeeper.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self.taken.append(self.listener.accept()[0])
                if self.reads:
                    threading.Thread(target=self._read, args=(self.taken[-1],), daemon=True,
                                     name="mute-reads").start()

    def _read(self, connected: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while connected.recv(65536):
                pass

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self._doorkeeper.join(DEADLINE_S)  # who comes at this moment is closed as well
        for each in (self.listener, *self.taken):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """Learners of protocol 4 alone, who wait for nothing: who introduces himself waits for
    an answer in the constructor, which tests/e2e/test_learner_introduction.py has."""
    monkeypatch.setattr(Introduction, "extension", lambda self, held: None)


@pytest.fixture(params=[True, False], ids=["that reads", "that does not read"])
def mute(request):
    peer = Mute(request.param)
    yield peer
    peer.close()


@pytest.fixture
def often(monkeypatch):
    """Lines about waits come every moment."""
    monkeypatch.setattr(learner_module, "WAIT_REPORT_S", 0.05)
    monkeypatch.setattr(news_module, "UNKNOWN_S", 0.05)
    monkeypatch.setattr(news_module, "NEWS_AGAIN_S", 0.05)


def test_the_limits_of_a_silence_are_those_that_the_docs_promise():
    assert news_module.UNKNOWN_S == 10
    assert news_module.NEWS_AGAIN_S == learner_module.WAIT_REPORT_S == 30


def test_a_learner_says_that_its_server_says_nothing_and_again(mute, often, stderr):
    with learner_of(mute, model(), learner_id=1) as learner:
        line = rf"no news of {mute.address} for \d+ s: it has said nothing on this connection; " \
               "training goes on, waiting for the run to begin"
        until(lambda: len(re.findall(line, stderr.getvalue())) > 2, "the line, three times")
        assert learner.step(1).connected


@pytest.mark.parametrize(("wait", "what"), [
    ("adopt", r"no broadcast of fragments 0, 1, 2 within 0.3 s: has the run started"),
    ("finish", r"the final cut was not complete after 0.3 s: manifest missing")])
@pytest.mark.parametrize("learner_id", [0, 1])
def test_a_wait_ends_at_its_limit_with_the_reason(mute, wait, what, learner_id):
    with (learner_of(mute, model(), learner_id=learner_id) as learner,
          pytest.raises(SyncerError, match=what + f".*connected to {mute.address}, {SILENT}")):
        getattr(learner, wait)(timeout_s=LIMIT_S)
    until(lambda: not client_threads(), "the threads end")


WAITED_FOR = {"adopt": "merged values of fragments 0, 1, 2",
              "finish": r"the final cut \(manifest missing\)"}


@pytest.mark.parametrize(("limit_s", "left"), [(None, ""), (1e4, r", \d+ s left")])
@pytest.mark.parametrize("wait", WAITED_FOR)
@pytest.mark.usefixtures("often")
def test_a_wait_says_what_it_waits_for(mute, stderr, wait, limit_s, left):
    line = f"waiting for {WAITED_FOR[wait]}{left}; connected to {mute.address}, {SILENT}"
    learner = learner_of(mute, model(), learner_id=1)

    def waits() -> None:
        with contextlib.suppress(SyncerError):
            getattr(learner, wait)(limit_s)

    done = in_thread(waits)
    until(lambda: len(re.findall(line, stderr.getvalue())) > 1, "two lines")
    learner.close()
    done()


def test_a_constructor_ends_at_its_limit_whatever_the_number_of_sockets(monkeypatch):
    """A HELLO that nobody reads, and each socket that is dialed after another, share one limit."""
    monkeypatch.setattr(initial_values, "REPORT_S", 0.2)
    peer = Mute(reads=False)
    large = {"a": np.zeros(30_000_000, np.float32)}  # more than any socket buffer
    with pytest.raises(ConnectionFailed, match="it accepts connections and does not read"):
        learner_of(peer, large, connect_timeout_s=2.0, num_streams=3)
    until(lambda: not client_threads(), "the threads end")
    peer.close()


def test_sockets_that_are_dialed_one_after_the_other_share_the_limit(monkeypatch):
    """Each takes 10 s of a clock of the test."""
    now, given, dial = [0.0], [], Dialer.dial

    def slow(dialer: Dialer, timeout_s: float) -> socket.socket:
        given.append(timeout_s)
        now[0] += 10.0
        return dial(dialer, DEADLINE_S)

    with ScriptedServer() as server:
        client = Client(make_session(num_streams=3), server.address)
        monkeypatch.setattr(Dialer, "dial", slow)
        monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
        group = client._connect(30.0, 25.0)
        monkeypatch.undo()
        with client.lock:
            group.end("over")
        group.close(0.0)
    assert given == [25.0, 15.0, 5.0, client_module.LAST_TRY_S]


def test_an_acknowledgement_that_is_not_taken_ends_with_the_wait(often, stderr, monkeypatch):
    """The cut is there; the connection has gone, and whoever is dialed now never answers."""
    with ScriptedServer() as server, learner_of(server, model(), learner_id=1) as learner:
        peer = server.accept()
        peer.bcast(0, 0, flat(learner, model(1), 0))
        step_until(learner, lambda s: s.applied)
        send_cut(peer, learner, model(2), 7)
        until(lambda: learner._session.final.tensors() is not None, "the cut is there")
        monkeypatch.setattr(learner._client, "send_control", lambda frame: Receipt(1))
        ahead = [0.0]
        monkeypatch.setattr(learner_module, "time", SimpleNamespace(
            monotonic=lambda: time.monotonic() + ahead[0]))

        def ends() -> bool:
            with pytest.raises(SyncerError, match=r"FINAL_ACK could not be sent .*final ones"):
                learner.finish()
            return True

        ended = in_thread(ends)
        until(lambda: "waiting to acknowledge the final cut" in stderr.getvalue(), "a line")
        ahead[0] = 1e6
        assert ended()
