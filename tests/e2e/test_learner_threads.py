"""A learner in a process that may have no more threads."""

import gc
import os
import threading

import pytest

from syncer.learner import ConnectionFailed

from .clients import client_threads
from .scripted_server import ScriptedServer
from .test_learner_rounds import learner_of, model
from .waiting import until


@pytest.fixture
def server():
    with ScriptedServer() as each:
        yield each


@pytest.fixture
def threads(monkeypatch):
    """How many of a client's threads may still be made, as `threads.left`; None: any number."""
    begun = threading.Thread.start

    class Threads:
        left: int | None = None

    def start(self):
        if self.name.startswith("syncer-") and Threads.left is not None:
            if Threads.left == 0:
                raise RuntimeError("can't start new thread")
            Threads.left -= 1
        begun(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    return Threads


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("left", [0, 1, 2, 5, 6])
def test_a_start_without_threads_is_one_sentence_and_leaves_nothing(server, threads, left):
    """Of six for three sockets, and the supervisor's."""
    with learner_of(server, model(), learner_id=1, num_streams=2):
        server.accept()  # its progress lines have their thread from now on
    gc.collect()
    before = descriptors()
    threads.left = left

    def refused() -> None:
        with pytest.raises(ConnectionFailed, match=r"no thread can be made.*ulimit -u"):
            learner_of(server, model(), learner_id=1, num_streams=2)

    refused()
    until(lambda: not client_threads(), "the threads end")
    gc.collect()  # the error knew its learner
    assert descriptors() <= before + 3  # the server's ends


@pytest.mark.parametrize("left", [0, 3])
def test_later_it_is_an_outage(server, threads, monkeypatch, stderr, left):
    monkeypatch.setattr("syncer.learner.client.backoff_s", lambda attempt: 0.0)
    with learner_of(server, model(), learner_id=1, num_streams=1) as learner:
        peer = server.accept()
        threads.left = left
        peer.close()
        until(lambda: "no thread can be made for a connection" in stderr.getvalue(), "the line")
        assert not learner.step(1).connected
        threads.left = None
        until(lambda: learner.step(1).connected, "it is connected again")
    until(lambda: not client_threads(), "the threads end")


def test_a_learner_that_nobody_holds_leaves_without_a_thread_for_that(server, threads):
    learner = learner_of(server, model(), learner_id=1, num_streams=0)
    server.accept()
    threads.left = 0
    del learner
    until(lambda: not client_threads(), "the threads end")
