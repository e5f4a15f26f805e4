"""A learner whose deltas are packed by a device: training goes on, what is packed is sent."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from syncer.learner import Learner
from syncer.learner.fragment import Fragment
from syncer.learner.holding import Arrays

from .scripted_server import DEADLINE_S, ScriptedServer
from .waiting import step_until, until


class Packing:
    """A device that packs when a test says so; it has its copy of the values from the start."""

    def __init__(self, write: Callable[[], None]):
        self.write, self.packed = write, threading.Event()

    def go(self) -> None:
        self.write()
        self.packed.set()

    def done(self) -> bool:
        return self.packed.is_set()

    def wait(self) -> None:
        assert self.packed.wait(DEADLINE_S)


class DeviceArrays(Arrays):
    """Arrays whose fragments are packed later."""

    def __init__(self, parameters):
        super().__init__(parameters)
        self.packing: list[Packing] = []

    def fragment(self, names, dtype):
        holding = self

        class Later(Fragment):
            def pack_delta(self, out) -> Packing:
                delta = np.empty_like(out)
                super().pack_delta(delta)
                holding.packing.append(Packing(lambda: np.copyto(out, delta)))
                return holding.packing[-1]

        return Later([self._arrays[name] for name in names], dtype)


@pytest.fixture
def pulled():
    """(server, its end of the connection, learner, arrays, holding) with a pull that was seen two
    steps after the anchor came."""
    arrays = {"w": np.zeros(3, np.float32)}
    holding = DeviceArrays(arrays)
    with ScriptedServer() as server, Learner(
            holding, server.address, learner_id=1, dtype="f32", num_streams=0) as learner:
        peer = server.accept()
        peer.bcast(0, 0, np.zeros(3, "<f4"))
        step_until(learner, lambda status: status.applied)
        learner.step(10)
        arrays["w"] += 1
        peer.pull(0, 1)
        step_until(learner, lambda status: holding.packing, tokens=0)
        yield server, peer, learner, arrays, holding


def test_it_is_sent_when_it_is_packed_and_says_when_it_was_asked_for(pulled):
    _, peer, learner, arrays, holding = pulled
    made = learner.step(0).step
    arrays["w"] += 5
    for _ in range(3):
        assert learner.step(100).answered == ()
    holding.packing[0].go()
    assert learner.step(100).answered == ((0, 1),)
    push = peer.receive_push()
    assert np.frombuffer(push.delta, "<f4").tolist() == [1, 1, 1]
    assert push.fragment == 0
    assert push.c_tokens == 10
    assert push.c_steps < made, "the steps that were made when the values were taken"


def test_of_a_connection_that_has_ended_nothing_is_sent(pulled):
    server, peer, learner, _, holding = pulled
    peer.close()
    again = server.accept()
    until(lambda: learner.step(0).connected, "the next connection")
    holding.packing[0].go()
    assert learner.step(0).answered == ()
    again.bcast(0, 0, np.zeros(3, "<f4"))
    again.pull(0, 1, 2)
    step_until(learner, lambda status: len(holding.packing) == 2)
    holding.packing[1].go()
    learner.step(0)
    assert again.receive_push().attempt == 2


def test_an_early_end_waits_for_the_device(pulled):
    _, peer, learner, arrays, holding = pulled
    ending = threading.Thread(target=learner.finish, args=(DEADLINE_S,))
    ending.start()
    holding.packing[0].go()
    assert peer.receive_push().step == 1
    peer.final(0, 1, np.full(3, 7, "<f4"))
    peer.manifest(1, [1])
    assert peer.receive_ack().step == 1
    ending.join(DEADLINE_S)
    assert arrays["w"].tolist() == [7, 7, 7]
