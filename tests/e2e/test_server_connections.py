"""The sockets of one learner: data sockets that come early, late, wrong or not, and connections."""

from __future__ import annotations

import json
import socket
import threading

import numpy as np

from syncer.protocol import CHUNK_HEAD, Msg
from syncer.server import door, promised, run_session
from syncer.server.shortened import short
from syncer.wire import encode, messages
from syncer.wire.frames import FrameReader
from tests.e2e.scripted import PATIENCE_S, ScriptedLearner, ServerThread, layout_of, wait_until

SMALL = layout_of((4,))
ONES = np.ones(4, np.float32)


def finish_alone(learner: ScriptedLearner) -> None:
    """The rest of a one-step run of one learner."""
    learner.send_init([ONES])
    learner.push(learner.pull(), ONES)
    learner.finish()
    learner.close()


def data_socket_error(port: int, stream: int, generation: int) -> str:
    with ScriptedLearner(port, 0, SMALL, connect=False, generation=generation) as other:
        other.control = other.dial_data(stream)
        return other.error()


# ------------------------------------------------------------------------------- data sockets
def test_data_sockets_may_come_before_their_hello(tmp_path):
    with ServerThread(tmp_path) as server:
        with ScriptedLearner(server.port, 0, SMALL, streams=2, connect=False) as learner:
            learner.dial_data(1)
            learner.dial_data(0)
            # Frames behind a DATA_HELLO wait with it.
            body = ONES.tobytes()
            learner.control = learner.data[1]
            learner.send_bulk(Msg.INIT_PARAMS, encode.init_head(0), body, chunked=False)
            learner.dial()
            learner.push(learner.pull(), ONES)
            learner.finish()
        assert server.wait() == 0


def test_data_sockets_that_do_not_fit_their_group(tmp_path):
    with ServerThread(tmp_path) as server:
        with ScriptedLearner(server.port, 0, SMALL, streams=1) as learner:
            learner.send_init([ONES])
            pull = learner.pull()
            generation = learner.hello.generation
            assert "out of bounds" in data_socket_error(server.port, 1, generation)
            assert "duplicate data stream" in data_socket_error(server.port, 0, generation)
            learner.push(pull, ONES)
            learner.finish()
        assert server.wait() == 0


def test_a_data_socket_whose_hello_never_comes(tmp_path, monkeypatch):
    monkeypatch.setattr(door, "DATA_HELLO_WAIT_NS", 50_000_000)
    with ServerThread(tmp_path) as server:
        with ScriptedLearner(server.port, 0, SMALL, streams=1, connect=False) as learner:
            learner.control = learner.dial_data(0)
            assert "unknown learner" in learner.error()
        assert not server.server.door.waiting
        finish_alone(ScriptedLearner(server.port, 0, SMALL))
        assert server.wait() == 0


MISSING = "data sockets that a HELLO declared have not come"


def test_a_group_goes_on_over_the_data_sockets_that_came(tmp_path, monkeypatch):
    monkeypatch.setattr(promised, "STREAMS_WAIT_NS", 50_000_000)
    with ServerThread(tmp_path) as server:
        with ScriptedLearner(server.port, 0, SMALL, streams=4, connect=False) as learner:
            learner.dial_data(1)
            wait_until(lambda: server.server.door.waiting, "it is there before the HELLO")
            learner.dial()
            line = server.log.wait(MISSING, learner=0)
            assert (line["level"], line["streams"], line["declared"]) == ("warning", "0,2,3", 4)
            learner.send_init([ONES])
            learner.push(learner.pull(), ONES)
            learner.finish()
        assert server.wait() == 0


def test_a_message_that_waits_for_a_socket_which_never_comes(tmp_path, monkeypatch):
    """Half of it is there, and the other half was to come over stream 1."""
    for name in ("STREAMS_WAIT_NS", "LOOK_NS", "INCOMPLETE_NS"):
        monkeypatch.setattr(promised, name, 50_000_000)
    with ServerThread(tmp_path) as server:
        with ScriptedLearner(server.port, 0, SMALL, streams=2, connect=False) as learner:
            data = learner.dial_data(0)
            wait_until(lambda: server.server.door.waiting, "it is there before the HELLO")
            learner.dial()
            inner = encode.frame(Msg.INIT_PARAMS, encode.init_head(0) + ONES.tobytes())
            data.sendall(encode.frame(Msg.CHUNK, CHUNK_HEAD.pack(7, len(inner), 0) + inner[:20]))
            text = learner.error()
            assert text.startswith("chunked message 7 stands still at 20 bytes")
            assert "data stream 1 of 2 never came; try again later" in text
        finish_alone(ScriptedLearner(server.port, 0, SMALL))
        assert server.wait() == 0


# ------------------------------------------------------------------- connections of one learner
def test_neither_log_nor_tape_shows_a_whole_generation(tmp_path):
    """Who reads it there could dial as a data socket of that connection."""
    tape, used = tmp_path / "tape", []
    with ServerThread(tmp_path, event_tape=str(tape)) as server:
        for _ in range(2):
            learner = server.learner(0, SMALL, streams=1)
            used.append(learner.hello.generation)
            assert "out of bounds" in data_socket_error(server.port, 1, used[-1])
            with ScriptedLearner(server.port, 0, SMALL, generation=used[-1]) as twice:
                assert twice.error().startswith(f"duplicate connection generation {used[-1]} ")
        finish_alone(learner)
        assert server.wait() == 0
        text = server.log.text()
    records = [json.loads(line) for line in tape.read_text().splitlines()]
    pushed = [entry["generation"] for record in records for entry in record.get("responders", ())]
    assert set(pushed) == {used[1] >> 32}
    assert f'"generation": "{short(used[1])}"' in text
    for generation in used:
        for written in (str(generation), f"{generation:x}"):
            assert written not in text + tape.read_text()


def test_a_learner_has_at_most_four_connections(tmp_path):
    with ServerThread(tmp_path) as server:
        learners = [server.learner(0, SMALL, streams=1) for _ in range(9)]
        for learner in learners:
            server.log.wait("learner connected", generation=short(learner.hello.generation))
        for learner in learners[:5]:
            learner.ended()
            server.log.wait("connection ended", generation=short(learner.hello.generation))
        left = [generation for _, generation in server.server.session.groups]
        assert left == [learner.hello.generation for learner in learners[5:]]
        finish_alone(learners.pop())
        assert server.wait() == 0


TWICE = "learner connected again while its older connection is alive"


def test_an_older_connection_that_still_speaks_is_another_process(tmp_path, monkeypatch):
    """On one machine, where the first of two may also be as good as gone."""
    monkeypatch.setattr(run_session, "TWO_ALIVE_NS", 50_000_000)
    beat = encode.encode_heartbeat(messages.Heartbeat(0, 1))
    with ServerThread(tmp_path) as server:
        def connected():
            learner = server.learner(0, SMALL)
            server.log.wait("learner connected", generation=short(learner.hello.generation))
            return learner

        first, second = connected(), connected()
        wait_until(lambda: not server.server.session.looks, "it was looked at")
        assert not server.log.find(TWICE)
        while not server.log.find(TWICE):
            first, second = second, connected()
            while server.server.session.looks:
                first.send(beat)
        assert server.log.find(TWICE)[0]["learner"] == 0
        finish_alone(second)
        assert server.wait() == 0


class Elsewhere(ScriptedLearner):
    """Another machine, as far as its address says so."""

    def open_socket(self, receive_buffer_bytes: int = 0) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port), source_address=("127.0.0.2", 0))
        self.readers[sock] = FrameReader(self.limits, self.reassembly)
        return sock


def test_a_learner_that_comes_from_elsewhere_is_told_of_at_once(tmp_path):
    with ServerThread(tmp_path) as server:
        first = server.learner(0, SMALL)
        server.log.wait("learner connected", generation=short(first.hello.generation))
        with Elsewhere(server.port, 0, SMALL) as second:
            line = server.log.wait(TWICE)
            assert line["level"] == "warning"
            assert line["peer"].startswith("127.0.0.2:")
            assert line["older_peer"].startswith("127.0.0.1:")
            finish_alone(second)
        assert server.wait() == 0


def test_what_was_said_before_a_socket_went_is_heard(tmp_path):
    """A learner acknowledges and closes everything: its data socket may be looked at first."""
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        go_on.wait(PATIENCE_S)

    with (ServerThread(tmp_path) as server,
          ScriptedLearner(server.port, 0, SMALL, streams=1) as learner):
        learner.send_init([ONES])
        learner.push(learner.pull(), ONES)
        manifest = learner.until(messages.Manifest)
        server.server.loop.post(hold)
        assert held.wait(PATIENCE_S)
        learner.data[0].close()  # so that it is ready first
        learner.acknowledge(manifest.step)
        learner.control.shutdown(socket.SHUT_WR)
        go_on.set()
        assert server.wait() == 0
