"""What a learner may do wrong ends its own connection, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from syncer.protocol import DTYPE_BF16, DTYPE_Q4, Msg
from syncer.server import ingest
from syncer.wire import encode, messages
from tests.e2e.scripted import (
    ROOT,
    ScriptedLearner,
    ServerProcess,
    ServerThread,
    layout_of,
    wait_until,
)

SMALL = layout_of((4,), (3,))
ZEROS = [np.zeros(4, np.float32), np.zeros(3, np.float32)]
MEBI = 1024 * 1024


def push_frame(*, learner=1, fragment=0, attempt=1, c_steps=1, delta=b"\0" * 16):
    push = messages.Push(learner, fragment, 1, attempt, 0, 1, c_steps, 1, delta)
    head = messages.PUSH_HEAD.pack(*push[:-1])
    return encode.frame(Msg.PUSH_FRAGMENT, head + delta)


def chunk(message, total, offset, piece):
    head = message.to_bytes(8, "little") + total.to_bytes(8, "little")
    return encode.frame(Msg.CHUNK, head + offset.to_bytes(8, "little") + piece)


def floats(*values):
    return np.array(values, "<f4").tobytes()


CRIMES = {
    "garbage": (b"\0" * 64, "bad magic"),
    "second HELLO": (encode.frame(Msg.HELLO, b"\4\0"), "unexpected message type"),
    "a message for learners": (encode.frame(Msg.SHUTDOWN, b""), "unexpected message type"),
    "unknown type": (encode.frame(99, b""), "unexpected message type"),
    "oversized": (encode.frame_header(Msg.PUSH_FRAGMENT, 2**40), "exceeds limit"),
    "one byte over": (encode.frame_header(Msg.PUSH_FRAGMENT, 65), "exceeds limit"),
    "foreign id": (push_frame(learner=0), "does not match connected group"),
    "attempt 0": (push_frame(attempt=0), "must be positive"),
    "c_steps 0": (push_frame(c_steps=0), "must be positive"),
    "unknown fragment": (push_frame(fragment=99), "unknown fragment"),
    "short delta": (push_frame(delta=b"\0" * 12), "expected 16"),
    "short push": (encode.frame(Msg.PUSH_FRAGMENT, b"\1"), "truncated"),
    "NaN": (push_frame(delta=floats(0, 0, np.nan, 0)), "element 2"),
    "infinite": (push_frame(delta=floats(-np.inf, 0, 0, 0)), "element 0"),
    "INIT of learner 1": (encode.frame(Msg.INIT_PARAMS, bytes(20)), "only learner 0"),
    "heartbeat of another": (encode.encode_heartbeat(messages.Heartbeat(0, 1)), "does not match"),
    "short heartbeat": (encode.frame(Msg.HEARTBEAT, bytes(11)), "expected 12"),
    "other finalization": (encode.frame(Msg.FINAL_ACK, b"\2\0" + bytes(8)),
                           "unsupported finalization revision"),
    "empty chunk": (chunk(1, 50, 0, b""), "empty chunk"),
    "chunked giant": (chunk(1, 2**63, 0, b"x"), "exceeds"),
    "chunks overlap": (chunk(1, 50, 0, b"ab") + chunk(1, 50, 1, b"c"), "overlap"),
    "chunked garbage": (chunk(1, 20, 0, b"x" * 20), "bad magic"),
}


@pytest.mark.parametrize("crime", CRIMES)
def test_one_crime_ends_one_connection(tmp_path, crime):
    """The other learner and the round go on, and the same id may come back at once."""
    data, text = CRIMES[crime]
    with ServerThread(tmp_path, learners=2, quorum=2) as server:
        with (
            ScriptedLearner(server.port, 0, SMALL) as good,
            ScriptedLearner(server.port, 1, SMALL) as bad,
        ):
            good.send_init(ZEROS)
            pull = good.pull()
            bad.pull()
            good.push(pull, np.ones(4))
            bad.send(data)
            assert text in bad.error()
            with ScriptedLearner(server.port, 1, SMALL) as back:
                again = back.pull()
                assert again[:2] == pull[:2]
                back.push(again, np.ones(4))
                for learner in (good, back):
                    learner.take_cut()
                for learner in (good, back):
                    learner.until(Msg.SHUTDOWN)
                assert good.final[0].tolist() == pytest.approx([1.33] * 4)
        assert server.wait() == 0


def test_the_error_goes_to_the_control_socket(tmp_path):
    """Whichever socket carried the bad frame, the ERROR is where the learner looks for it."""
    with ServerThread(tmp_path) as server:
        with ScriptedLearner(server.port, 0, SMALL, streams=2) as learner:
            learner.send_init(ZEROS)
            learner.pull()
            learner.data[1].sendall(b"\0" * 64)
            assert "bad magic" in learner.error()
        server.log.wait("connection ended", learner=0)


def test_a_bad_scale_of_a_q4_push(tmp_path):
    layout = layout_of((300,))
    with (
        ServerThread(tmp_path) as server,
        ScriptedLearner(server.port, 0, layout, dtype=DTYPE_Q4) as learner,
    ):
        learner.send_init([np.zeros(300, np.float32)])
        learner.pull()
        blocks = bytearray(2 * 132)
        blocks[132:136] = floats(-1.0)
        learner.send(push_frame(learner=0, delta=bytes(blocks)))
        assert "element 256" in learner.error()


def test_a_bad_init_waits_for_a_new_generation(tmp_path):
    with ServerThread(tmp_path) as server:
        with ScriptedLearner(server.port, 0, SMALL, dtype=DTYPE_BF16) as learner:
            learner.send_init([np.array([0, 0, np.nan, 0], np.float32), ZEROS[1]])
            assert "INIT_PARAMS fragment 0" in learner.error()
        with ScriptedLearner(server.port, 0, SMALL, dtype=DTYPE_BF16) as learner:
            learner.send_init(ZEROS)
            learner.push(learner.pull(), ZEROS[0])
            learner.finish()
        assert server.wait() == 0


def test_at_most_four_payloads_of_a_connection_are_decoded_at_a_time(tmp_path, monkeypatch):
    """Six INITs come in one burst: reading pauses at four and goes on, and nothing is lost. All are
    too large to be decoded on the spot."""
    counts = []
    tensor = ingest.Ingest._tensor

    def counting(self, group, *given):
        tensor(self, group, *given)
        counts.append(len(group.work.pending))

    monkeypatch.setattr(ingest.Ingest, "_tensor", counting)
    layout = layout_of(*[(200_000,)] * 6)
    values = [np.full(200_000, p, np.float32) for p in range(6)]
    with ServerThread(tmp_path) as server:
        with ScriptedLearner(server.port, 0, layout) as learner:
            learner.send_init(values)
            pull = learner.pull()
            learner.holding(dict.fromkeys(range(6), 0))
            learner.push(pull, np.zeros(200_000))
            assert [learner.params[p][0] for p in range(6)] == [0, 1, 2, 3, 4, 5]
            learner.finish()
        assert server.wait() == 0
    assert len(counts) == 7
    assert max(counts) <= 4


def test_a_reader_that_stops_is_cut_off_and_slows_nobody(tmp_path):
    """63: the others go on at once, memory does not grow with the rounds, the timeout ends it."""
    layout, steps = layout_of((MEBI,)), 60  # 240 MiB of broadcasts
    with (
        ServerProcess(tmp_path, "--grace-ms", "0", "--write-timeout-s", "4", learners=2,
                      steps=steps) as server,
        ScriptedLearner(server.port, 0, layout) as good,
        ScriptedLearner(server.port, 1, layout) as stuck,
    ):
        good.send_init([np.zeros(MEBI, np.float32)])
        for step in range(1, steps + 1):
            good.push(good.pull(step), np.zeros(MEBI, np.float32))
            if step == 10:
                before = server.rss_bytes
        good.until(messages.Manifest)
        # The queue of the stuck learner holds one version, however many rounds there were; what
        # may grow is the kernel's and the allocator's, so the bound is a few fragments.
        assert server.rss_bytes < before + 10 * 4 * MEBI
        ended = server.log.wait("connection ended", learner=1)
        assert "no queued byte could be sent for 4 s" in ended["reason"]
        stuck.ended()
        good.acknowledge(steps)


def test_declared_sizes_take_no_memory(tmp_path):
    """A learner opens as many large messages as it may and fills none: only touched pages count."""
    layout = layout_of((16 * MEBI,))
    with (
        ServerProcess(tmp_path, learners=2) as server,
        ScriptedLearner(server.port, 1, layout) as learner,
    ):
        server.log.wait("learner connected", learner=1)
        before = server.rss_bytes
        total = 13 + 48 + 64 * MEBI
        for message in range(31):  # 31 x 64 MiB < 2 GiB
            learner.send(chunk(message, total, 0, b"\xde"))
        learner.send(chunk(31, total, 0, b"\xde"))
        learner.send(chunk(32, total, 0, b"\xde"))
        assert "exceed limit" in learner.error()
        assert server.rss_bytes < before + 64 * MEBI


def test_a_killed_learner_is_replaced(tmp_path):
    """kill -9 in the middle of a push: half of it is dropped, the next generation takes over."""
    script = (
        "import sys, numpy as np\n"
        "from syncer.wire import encode, messages\n"
        "from syncer.protocol import Msg\n"
        "from tests.e2e.scripted import ScriptedLearner, layout_of\n"
        "learner = ScriptedLearner(int(sys.argv[1]), 1, layout_of((4,), (3,)))\n"
        "pull = learner.pull()\n"
        "push = messages.Push(1, 0, pull.step, pull.attempt, 0, 1, 1, 1, b'')\n"
        "body = bytes(16)\n"
        "frame = b''.join(encode.bare_message(Msg.PUSH_FRAGMENT, encode.push_head(push), body))\n"
        "learner.send(frame[:-1])\n"
        "print('sent', flush=True)\n"
        "learner.next()\n"
        "learner.ended()\n"
    )
    with ServerProcess(tmp_path, "--quorum", "2", learners=2, steps=1) as server:
        with ScriptedLearner(server.port, 0, SMALL) as good:
            good.send_init(ZEROS)
            victim = subprocess.Popen([sys.executable, "-c", script, str(server.port)], cwd=ROOT,
                                      stdout=subprocess.PIPE)
            with victim:
                assert victim.stdout.readline() == b"sent\n"
                os.kill(victim.pid, signal.SIGKILL)
            server.log.wait("connection ended", learner=1)
            good.push(good.pull(), np.ones(4))
            with ScriptedLearner(server.port, 1, SMALL) as back:
                back.push(back.pull(), np.ones(4))
                for learner in (good, back):
                    learner.take_cut()
                for learner in (good, back):
                    learner.until(Msg.SHUTDOWN)
        assert server.wait() == 0
        assert server.log.find("rebound outstanding pull", learner=1)


def test_a_fast_talker_does_not_starve_others(tmp_path):
    """One learner floods heartbeats without pause; rounds of the other go on meanwhile."""
    with ServerThread(tmp_path, learners=2, total_steps=50, grace_ms=0) as server:
        with (
            ScriptedLearner(server.port, 0, SMALL) as good,
            ScriptedLearner(server.port, 1, SMALL) as talker,
        ):
            good.send_init(ZEROS)
            flood = encode.encode_heartbeat(messages.Heartbeat(1, 1)) * 20_000
            talker.control.setblocking(False)
            at = 0
            for step in range(1, 51):
                pull = good.pull(step)
                while True:
                    try:
                        at += talker.control.send(memoryview(flood)[at % len(flood):])
                    except BlockingIOError:
                        break
                good.push(pull, ZEROS[pull.fragment])
            good.until(messages.Manifest)
            assert at > len(flood)
        wait_until(lambda: server.log.find("connection ended", learner=1), "the talker is gone")
