"""Who gets in, over real sockets: HELLO, keys, sessions, data sockets, and limits for strangers."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import contextmanager

import numpy as np
import pytest

from syncer.errors import ConfigError
from syncer.protocol import DTYPE_BF16, HASH_BYTES, Msg
from syncer.server import door, merging
from syncer.server.shortened import short
from syncer.wire import encode, messages
from syncer.wire.contracts import rl_contract
from tests.e2e.scripted import (
    ScriptedLearner,
    ServerProcess,
    ServerThread,
    layout_of,
    wait_until,
)

SMALL = layout_of((4,))
ONES = np.ones(4, np.float32)


def finish_alone(learner: ScriptedLearner) -> None:
    """The rest of a one-step run of one learner."""
    learner.send_init([ONES])
    learner.push(learner.pull(), ONES)
    learner.finish()
    learner.close()


def refused(port: int, learner: int = 0, layout=SMALL, **settings) -> str:
    """The ERROR that a new connection gets."""
    with ScriptedLearner(port, learner, layout, **settings) as other:
        return other.error()


def test_a_huge_first_frame_is_refused_from_its_header(tmp_path):
    with ServerThread(tmp_path) as server:
        with ScriptedLearner(server.port, 0, SMALL, connect=False) as stranger:
            stranger.control = stranger.open_socket()
            stranger.send(encode.frame_header(Msg.HELLO, 2**40))
            assert "exceeds limit" in stranger.error()
        finish_alone(ScriptedLearner(server.port, 0, SMALL))
        assert server.wait() == 0


@pytest.mark.parametrize(("first_bytes", "text"), [
    (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", "invalid first frame: bad magic"),
    (encode.encode_heartbeat(messages.Heartbeat(0, 1)), "invalid first frame: unexpected"),
    (encode.frame(Msg.HELLO, b"\3\0"), "protocol version mismatch"),
    (encode.frame(Msg.HELLO, b""), "invalid HELLO: payload truncated"),
    (encode.frame(Msg.DATA_HELLO, b"\4\0"), "invalid DATA_HELLO: "),
])
def test_a_bad_first_frame_gets_one_error_and_an_end(tmp_path, first_bytes, text):
    with ServerThread(tmp_path) as server:
        with ScriptedLearner(server.port, 0, SMALL, connect=False) as stranger:
            stranger.control = stranger.open_socket()
            stranger.send(first_bytes)
            assert text in stranger.error()
        finish_alone(ScriptedLearner(server.port, 0, SMALL))
        assert server.wait() == 0


def test_an_error_is_not_lost_when_the_peer_goes_on_sending(tmp_path):
    """A socket that is closed with unread input is reset; the ERROR must be readable anyway."""
    with ServerThread(tmp_path) as server:
        with ScriptedLearner(server.port, 0, SMALL, connect=False) as stranger:
            stranger.control = stranger.open_socket()
            stranger.send(encode.frame_header(Msg.HELLO, 2**40) + bytes(3_000_000))
            assert "exceeds limit" in stranger.error()
        finish_alone(ScriptedLearner(server.port, 0, SMALL))
        assert server.wait() == 0


def test_ids_and_sessions(tmp_path):
    """Each refusal ends one connection; the session that stands is not touched."""
    with ServerThread(tmp_path, learners=2) as server:
        port = server.port
        assert "outside configured range" in refused(port, learner=2)
        with ScriptedLearner(port, 0, SMALL) as first:
            server.log.wait("learner connected", learner=0)
            text = refused(port, 1, layout_of((5,)))
            assert text.startswith("session mismatch")
            assert f"expected session_contract_hash={'11' * 32}" in text
            assert f"got session_contract_hash={'11' * 32}" in text
            assert refused(port, 1, dtype=DTYPE_BF16).startswith("session mismatch")
            assert "22" * 32 in refused(port, 1, contract=b"\x22" * 32)
            text = refused(port, 1, compat_group="nvidia")
            assert "兼容组不同：未声明 对 nvidia，容差未标定" in text
            generation = first.hello.generation
            text = refused(port, 0, generation=generation)
            assert text.startswith("duplicate connection generation")
            with ScriptedLearner(port, 1, SMALL) as second:
                first.send_init([ONES])
                for learner in (first, second):
                    learner.push(learner.pull(), ONES)
                for learner in (first, second):
                    learner.take_cut()
                for learner in (first, second):
                    learner.until(Msg.SHUTDOWN)
        assert server.wait() == 0


def test_a_layout_that_cannot_be_merged_is_refused_and_fixes_no_session(tmp_path, monkeypatch):
    real = merging.FragmentStore

    def store(layout, **constants):
        if layout.largest == 5:
            raise ConfigError("no such merge mode")
        return real(layout, **constants)

    monkeypatch.setattr(merging, "FragmentStore", store)
    with ServerThread(tmp_path) as server:
        assert refused(server.port, layout=layout_of((5,))) == "invalid HELLO: no such merge mode"
        finish_alone(ScriptedLearner(server.port, 0, SMALL))
        assert server.wait() == 0


def test_keys(tmp_path):
    with ServerThread(tmp_path, island_hmac_key="secret") as server:
        for key in (None, b"wrong"):
            assert refused(server.port, key=key).startswith("HELLO authentication failed")
        finish_alone(ScriptedLearner(server.port, 0, SMALL, key=b"secret"))
        assert server.wait() == 0
        assert "secret" not in server.log.text()


def test_profiles(tmp_path):
    with ServerThread(tmp_path, require_profile_binding=True) as server:
        assert refused(server.port).startswith("HELLO is missing the required syncer semantic")
        other = refused(server.port, profile_hash=bytes(HASH_BYTES))
        assert other.startswith("HELLO syncer semantic profile")
        own = server.config.profile_hash
        finish_alone(ScriptedLearner(server.port, 0, SMALL, profile_hash=own))
        assert server.wait() == 0


def test_a_pinned_island_contract(tmp_path):
    identity, fingerprint = b"\x42" * HASH_BYTES, b"\x11" * HASH_BYTES
    with ServerThread(tmp_path, expected_island_contract=identity) as server:
        assert refused(server.port).startswith("session mismatch")
        contract = rl_contract(fingerprint, identity)
        finish_alone(ScriptedLearner(server.port, 0, SMALL, contract=contract))
        assert server.wait() == 0


# -------------------------------------------------------------------------------- large HELLOs
MANY = layout_of((1,) * 9000)
"""A HELLO of 72,106 bytes."""


def test_rounds_go_on_while_a_large_hello_is_read(tmp_path, monkeypatch):
    """It waits on a worker, and the next one for it; both are told off, and the session stands."""
    read, may_end = door.read_hello, threading.Event()
    readers: list[str] = []

    def slowly(payload, **settings):
        if len(payload) > 65_536:
            readers.append(threading.current_thread().name)
            assert may_end.wait(60)
        return read(payload, **settings)

    monkeypatch.setattr(door, "read_hello", slowly)
    with ServerThread(tmp_path, total_steps=21) as server, ScriptedLearner(
            server.port, 0, SMALL) as learner:
        learner.send_init([ONES])
        with ScriptedLearner(server.port, 0, MANY) as one, ScriptedLearner(
                server.port, 0, MANY, dtype=DTYPE_BF16) as two:
            wait_until(lambda: readers, "a HELLO is being read")
            for _ in range(20):
                learner.push(learner.pull(), ONES)
            pull = learner.pull()
            assert len(readers) == 1
            may_end.set()
            for other in (one, two):
                text = other.error()
                assert text.startswith("session mismatch: expected session_contract_hash=")
                assert "fragments=1 elements=9000" in text
        assert len(readers) == 2
        assert all(name.startswith("syncer-worker") for name in readers)
        learner.push(pull, ONES)
        learner.finish()
        assert server.wait() == 0


def test_a_large_hello_makes_a_session_and_equal_ones_share_its_layout(tmp_path, monkeypatch):
    """The first is read on the workers, the others' bytes are compared where they arrive."""
    read, readers = door.read_hello, []

    def watched(payload, **settings):
        readers.append(threading.current_thread().name)
        return read(payload, **settings)

    monkeypatch.setattr(door, "read_hello", watched)
    with ServerThread(tmp_path, learners=3, island_hmac_key="k") as server:
        learners = [ScriptedLearner(server.port, i, MANY, key=b"k") for i in range(3)]
        for learner in learners:
            server.log.wait("learner connected", learner=learner.learner)
        groups = server.server.session.groups.values()
        assert len({id(group.hello.layout) for group in groups}) == 1
        assert {group.hello.layout for group in groups} == {MANY}
        assert sum(name.startswith("syncer-worker") for name in readers) >= 1
        alone = ScriptedLearner(server.port, 0, MANY, key=b"k")
        server.log.wait("learner connected", generation=short(alone.hello.generation))
        assert not readers[-1].startswith("syncer-worker")
        assert refused(server.port, 0, MANY, key=b"other").startswith("HELLO authentication")
        for learner in (*learners, alone):
            learner.close()
        server.server.stop()


def test_memory_that_is_lacking_for_a_hello_ends_its_connection(tmp_path, monkeypatch):
    read, refuse = door.read_hello, [True]

    def watched(payload, **settings):
        if len(payload) > 65_536 and refuse:
            raise MemoryError(refuse.pop())
        return read(payload, **settings)

    monkeypatch.setattr(door, "read_hello", watched)
    with ServerThread(tmp_path) as server:
        with ScriptedLearner(server.port, 0, MANY) as other:
            other.ended()
        server.log.wait("the system failed a connection", error="Cannot allocate memory")
        finish_alone(ScriptedLearner(server.port, 0, SMALL))
        assert server.wait() == 0


# ---------------------------------------------------------------------------------- strangers
def test_a_socket_without_a_first_frame_is_closed_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr(door, "FIRST_FRAME_NS", 50_000_000)
    with ServerThread(tmp_path) as server:
        with ScriptedLearner(server.port, 0, SMALL, connect=False) as stranger:
            stranger.control = stranger.open_socket()
            stranger.send(b"\xde\xc0")
            stranger.ended()
        monkeypatch.undo()
        finish_alone(ScriptedLearner(server.port, 0, SMALL))
        assert server.wait() == 0


def test_the_oldest_stranger_goes_when_there_are_too_many(tmp_path, monkeypatch):
    monkeypatch.setattr(door, "STRANGERS_MAX", 8)
    with (
        ServerThread(tmp_path) as server,
        ScriptedLearner(server.port, 0, SMALL, connect=False) as crowd,
    ):
        crowd.control = crowd.open_socket()
        for _ in range(8):
            crowd.open_socket()
        crowd.ended()
        # With the crowd still there a learner gets in.
        finish_alone(ScriptedLearner(server.port, 0, SMALL))
        assert server.wait() == 0


CROWD = """
import resource, socket, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
crowd = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(1100)]
print("there", flush=True)
sys.stdin.read()
"""


@contextmanager
def crowd_of_strangers(port: int):
    """1,100 sockets that say nothing, of a process of their own."""
    with subprocess.Popen([sys.executable, "-c", CROWD, str(port)], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as crowd:
        assert crowd.stdout.readline() == b"there\n"
        yield
        crowd.stdin.close()


def test_a_checkpoint_is_possible_whoever_dials(tmp_path):
    """1,100 idle strangers without the key, a server of 200 descriptors that writes every step."""
    with ServerProcess(tmp_path, "--checkpoint-path", str(tmp_path / "c"),
                       "--checkpoint-every", "1", steps=3,
                       environment={"SYNCER_HMAC_KEY": "k"}, ulimit="-n 200") as server:
        room = server.log.wait("room for learners", descriptors=200)
        assert room["learners_fit"] >= 15
        with ScriptedLearner(server.port, 0, SMALL, key=b"k", streams=2) as learner:
            learner.send_init([ONES])
            pull = learner.pull()
            with crowd_of_strangers(server.port):
                server.log.wait("too many connections without a HELLO: the oldest is closed")
                for _ in range(2):
                    learner.push(pull, ONES)
                    pull = learner.pull()
                learner.push(pull, ONES)
                # With the crowd still there another one gets in.
                with ScriptedLearner(server.port, 0, SMALL, key=b"k", streams=2) as later:
                    later.finish()
                assert server.wait() == 0
        assert (tmp_path / "c").exists()
        assert not server.log.find("cannot accept connections for a moment")


def test_learners_that_do_not_fit_are_told_to_try_again_later(tmp_path):
    """20 of 5 sockets each at 150 descriptors: as many as fit are in with all their sockets, and
    the run goes on with them; one that leaves makes room for the next."""
    with ServerProcess(tmp_path, "--checkpoint-path", str(tmp_path / "c"),
                       "--checkpoint-every", "1", "--start-learners", "1", "--quorum", "1",
                       learners=20, steps=1, ulimit="-n 150") as server:
        warning = server.log.wait("not every learner fits in the limit of descriptors")
        fit = warning["learners_fit"]
        assert 5 < fit < 20
        learners = [server.learner(i, SMALL, streams=4) for i in range(fit)]
        for learner in learners:
            server.log.wait("learner connected", learner=learner.learner)
        assert "try again later" in refused(server.port, fit, streams=4)
        assert not server.log.find("learner connected", learner=fit)
        learners.pop().close()
        server.log.wait("learner disconnected", learner=fit - 1)
        learners.append(server.learner(fit, SMALL, streams=4))
        server.log.wait("learner connected", learner=fit)
        # Its next connection takes the place of the one before, where there is no other.
        learners.append(server.learner(0, SMALL, streams=4))
        server.log.wait("connection ended", learner=0)
        learners[-1].send_init([ONES])
        learners[-1].push(learners[-1].pull(), ONES)
        for learner in learners[1:]:
            learner.take_cut()
        for learner in learners[1:]:
            learner.until(Msg.SHUTDOWN)
        assert server.wait() == 0


def test_the_limit_of_descriptors_is_raised(tmp_path):
    with ServerProcess(tmp_path, ulimit="-S -n 80") as server:
        assert server.log.wait("room for learners")["descriptors"] > 80


def test_a_server_without_a_descriptor_for_a_learner_does_not_start(tmp_path):
    with ServerProcess(tmp_path, ulimit="-n 70", wait=False) as server:
        assert server.wait() == 2
        assert "70 descriptors leave none for a learner" in server.log.text()


def test_the_largest_unfinished_first_frame_makes_room(tmp_path, monkeypatch):
    """And not the one that is too much, whose HELLO has 98 bytes."""
    monkeypatch.setattr(door, "STRANGER_BYTES_MAX", 300_000)
    with ServerThread(tmp_path) as server:
        with (ScriptedLearner(server.port, 0, SMALL, connect=False) as large,
              ScriptedLearner(server.port, 0, SMALL, connect=False) as middle,
              ScriptedLearner(server.port, 0, SMALL) as small):
            for stranger, size in ((large, 180_000), (middle, 119_950)):
                stranger.control = stranger.open_socket()
                stranger.send(encode.frame_header(Msg.HELLO, 2**20) + bytes(size))
            wait_until(lambda: server.server.door.stranger_bytes == 299_976, "all bytes are there")
            small.close()
            with ScriptedLearner(server.port, 0, SMALL) as learner:
                assert "try again later" in large.error()
                wait_until(lambda: len(server.server.door.strangers) == 1, "one stranger is left")
                finish_alone(learner)
        assert server.wait() == 0


def test_unfinished_first_frames_share_a_budget_of_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(door, "STRANGER_BYTES_MAX", 300_000)
    with ServerThread(tmp_path) as server:
        with ScriptedLearner(server.port, 0, SMALL, connect=False) as stranger:
            stranger.control = stranger.open_socket()
            stranger.send(encode.frame_header(Msg.HELLO, 2**24) + bytes(400_000))
            assert "too many large first frames" in stranger.error()
        assert server.server.door.stranger_bytes == 0
        finish_alone(ScriptedLearner(server.port, 0, SMALL))
        assert server.wait() == 0
