"""Small parts of the server: loop, workers, log, tape, final state."""

from __future__ import annotations

import json
import os
import pty
import socket
import struct
import subprocess
import sys
import threading

import numpy as np
import pytest

from syncer import kernels
from syncer.checkpoint.atomic import WriteError
from syncer.checkpoint.final_state import write_final_state
from syncer.cli import answered
from syncer.config import Config
from syncer.errors import ConfigError
from syncer.merge.buffers import BufferPool
from syncer.server.decoded import Decoded
from syncer.server.log import Log
from syncer.server.loop import POSTED_PER_TURN, READ, Handler
from syncer.server.selector import SelectorLoop
from syncer.server.service import serve
from syncer.server.system import AppendFile, ThreadWorkers, check_threads, lines_to
from syncer.server.tape import Tape, TapeError, record_line
from syncer.server.workers import Job
from tests.descriptors import open_descriptors


@pytest.fixture
def loop():
    made = SelectorLoop()
    yield made
    made.close()                                # harmless when repeated


def poll_until(loop, reached):
    """Turn the loop until something is there; only a defect makes this take long."""
    deadline_ns = loop.now_ns() + 60 * 10**9
    while not reached():
        assert loop.now_ns() < deadline_ns
        loop.poll(deadline_ns)


# ----------------------------------------------------------------------------------------- loop
def test_timers_fire_in_order_and_not_when_cancelled(loop):
    fired = []
    now_ns = loop.now_ns()
    loop.call_at(now_ns + 2000, lambda: fired.append("second"))
    loop.call_at(now_ns + 1000, lambda: fired.append("first"))
    loop.call_at(now_ns + 1500, lambda: fired.append("never")).cancel()
    loop.call_at(now_ns + 2000, lambda: fired.append("third"))
    poll_until(loop, lambda: len(fired) == 3)
    assert fired == ["first", "second", "third"]


def test_a_deadline_ends_the_wait_and_a_timer_is_not_early(loop):
    begun_ns = loop.now_ns()
    fired = []
    loop.call_at(begun_ns + 30_000_000, lambda: fired.append(loop.now_ns()))
    loop.poll(begun_ns + 1_000_000)
    poll_until(loop, lambda: fired)
    assert fired[0] >= begun_ns + 30_000_000


def test_a_wait_of_years_is_one_that_can_be_woken(loop):
    fired = []
    loop.call_at(loop.now_ns() + 10**18, lambda: fired.append("never"))
    loop.wake()
    loop.poll()
    loop.wake()
    loop.poll(loop.now_ns() + 10**18)
    assert not fired


def test_posts_of_other_threads_come_in_order_and_in_this_thread(loop):
    seen = []
    count = 3 * POSTED_PER_TURN

    def post():
        for i in range(count):
            loop.post(lambda i=i: seen.append((i, threading.get_ident())))

    thread = threading.Thread(target=post)
    thread.start()
    poll_until(loop, lambda: len(seen) == count)
    thread.join()
    assert seen == [(i, threading.get_ident()) for i in range(count)]


def test_a_handler_that_left_in_the_same_turn_is_harmless(loop):
    """Two sockets are ready; the first one's handler unregisters the second."""
    pairs = [socket.socketpair() for _ in range(2)]
    ready = []

    class Reader(Handler):
        def ready(self, events):
            ready.append(self)
            for one, _ in pairs:
                loop.unregister(one)
            pairs.clear()

    closing = [end for pair in pairs for end in pair]
    for one, other in pairs:
        other.send(b"x")
        loop.register(one, READ, Reader())
    poll_until(loop, lambda: ready)
    for end in closing:
        end.close()
    assert 1 <= len(ready) <= 2


@pytest.fixture
def only_five_threads(monkeypatch):
    """What the system says when a process may have no more."""
    begun, left = threading.Thread.start, [5]

    def start(self):
        if left[0] == 0:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        begun(self)

    monkeypatch.setattr(threading.Thread, "start", start)


def test_threads_that_cannot_be_made_are_a_sentence(only_five_threads):
    with pytest.raises(ConfigError, match="only 5 of 6 threads can be made for merges: raise"):
        check_threads(6)
    assert not [t for t in threading.enumerate() if t.name == "syncer-probe"]


@pytest.mark.parametrize("lacking", [{}, {"checkpoint_path": "c"}])
def test_a_server_without_its_threads_does_not_start(only_five_threads, tmp_path, lacking, capfd):
    settings = {name: str(tmp_path / value) for name, value in lacking.items()}
    config = Config(learners=1, total_steps=1, port=0, merge_threads=4, **settings)
    before = open_descriptors()
    assert answered(lambda: serve(config)) == 2
    assert "--merge-threads" in capfd.readouterr().err
    assert open_descriptors() <= before


TEAMS = """
import os, threading, time
from syncer.server.selector import SelectorLoop
from syncer.server.system import ThreadWorkers
from syncer.server.workers import Job

loop = SelectorLoop()
before = len(os.listdir("/proc/self/task"))
workers, both, done = ThreadWorkers(loop, 2, merge_threads=3), threading.Barrier(2), []
for _ in range(2):
    workers.submit(Job(both.wait, lambda result, error: done.append(error)))
while len(done) < 2:
    loop.poll()
assert done == [None, None], done
until = time.monotonic() + 30
while (made := len(os.listdir("/proc/self/task")) - before) > 6 and time.monotonic() < until:
    time.sleep(0.001)  # a probe that Python has joined may not have left the kernel yet
print(made)
workers.close()
"""


@pytest.mark.skipif(not kernels.describe()["openmp"], reason="built without OpenMP")
def test_every_worker_has_its_team_from_the_start():
    """In a process of its own: threads of other tests come and go."""
    done = subprocess.run([sys.executable, "-c", TEAMS], capture_output=True, text=True,
                          check=True, timeout=60)
    assert int(done.stdout) == 2 * 3


# -------------------------------------------------------------------------------------- workers
def test_results_and_errors_come_back_through_the_loop(loop):
    workers = ThreadWorkers(loop, 2)
    answers = []
    workers.submit(Job(lambda: 7, lambda *answer: answers.append(answer)))
    workers.submit(Job(lambda: 1 // 0, lambda *answer: answers.append(answer)))
    poll_until(loop, lambda: len(answers) == 2)
    workers.close()
    values = sorted(answers, key=lambda answer: answer[0] is None)
    assert values[0] == (7, None)
    assert isinstance(values[1][1], ZeroDivisionError)


def test_closing_drops_what_has_not_begun_and_waits_for_nobody_who_computes(loop):
    workers = ThreadWorkers(loop, 2)
    gate, begun = threading.Event(), threading.Semaphore(0)
    ran = []

    def first():
        begun.release()
        gate.wait()
        ran.append(1)

    for _ in range(2):
        workers.submit(Job(first, lambda *answer: None))
    workers.submit(Job(lambda: ran.append(2), lambda *answer: None))
    for _ in range(2):
        begun.acquire()
    workers.close()
    assert not workers.queue.jobs
    assert ran == []
    loop.close()
    gate.set()
    for thread in workers.threads:
        thread.join()
    assert ran == [1, 1]


def test_closing_ends_the_idle_ones(loop):
    workers = ThreadWorkers(loop, 2)
    workers.close()
    assert not any(thread.is_alive() for thread in workers.threads)


# ------------------------------------------------------------------------------------------ log
def written(form, level="info", *, write):
    read_end, write_end = os.pipe()
    log = Log(level, form, lines_to(write_end))
    write(log)
    log.close()
    os.close(write_end)
    with open(read_end, encoding="utf-8") as file:
        return file.read()


def test_a_text_line_is_one_line_whatever_a_peer_says():
    reason = "a\nb \x1b[31m \u202e兼容组"
    text = written("text", write=lambda log: log.warning(
        "refused", peer="1.2.3.4:5", reason=reason, n=3, x=0.1234567, empty=""))
    assert text.count("\n") == 1
    assert text.endswith(
        'WARN  refused peer=1.2.3.4:5 reason="a\\nb \\u001b[31m \\u202e兼容组" n=3 x=0.123457 '
        'empty=""\n')


def test_json_lines_carry_their_fields_and_fixed_keys_win():
    def write(log):
        log.error("what\nhappened", time="never", step=3, path=None)

    record = json.loads(written("json", write=write))
    assert list(record) == ["time", "level", "message", "step", "path"]
    assert record["message"] == "what\nhappened"
    assert record["level"] == "error"
    assert record["time"] != "never"


@pytest.mark.parametrize(("level", "lines"), [("debug", 4), ("info", 3), ("warning", 2),
                                              ("error", 1)])
def test_levels(level, lines):
    def write(log):
        for name in ("debug", "info", "warning", "error"):
            getattr(log, name)("x")

    assert written("text", level, write=write).count("\n") == lines


def test_colour_only_on_a_terminal():
    ours, theirs = pty.openpty()
    try:
        for form, coloured in ("text", True), ("json", False):
            log = Log("info", form, lines_to(theirs))
            log.info("hello")
            log.close()
            assert (b"\x1b[32mINFO " in os.read(ours, 4096)) == coloured
    finally:
        os.close(ours)
        os.close(theirs)
    assert "\x1b" not in written("text", write=lambda log: log.info("hello"))


# --------------------------------------------------------------------------- tape, final state
def test_the_tape_appends_whole_records(tmp_path):
    path = tmp_path / "tape"
    for step in (1, 2):
        tape = Tape(path, AppendFile(path))
        tape.append(record_line({"step": step, "组": "é"}))
        tape.close()
    assert path.read_text("utf-8") == '{"step": 1, "组": "é"}\n{"step": 2, "组": "é"}\n'


def test_a_record_that_does_not_fit_leaves_the_tape_whole(tmp_path, monkeypatch):
    tape = Tape(tmp_path / "tape", AppendFile(tmp_path / "tape"))
    tape.append(record_line({"step": 1}))
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:5]))
    with pytest.raises(TapeError, match="only 5 of 12 bytes"):
        tape.append(record_line({"step": 2}))
    monkeypatch.undo()
    tape.append(record_line({"step": 3}))
    tape.close()
    assert (tmp_path / "tape").read_text() == '{"step": 1}\n{"step": 3}\n'


def test_a_full_device_is_a_tape_error():
    tape = Tape("/dev/full", AppendFile("/dev/full"))
    with pytest.raises(TapeError, match="No space left"):
        tape.append(record_line({"step": 1}))
    tape.close()


def test_a_tape_may_be_a_pipe_whose_reader_comes_and_goes(tmp_path):
    """No start waits for a reader, and none that goes away costs a record or the process."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    tape = Tape(path, AppendFile(path))
    tape.append(record_line({"step": 1}))
    for step in 2, 3:
        with open(os.open(path, os.O_RDONLY), "rb", buffering=0) as reader:
            assert reader.read(4096) == b'{"step": %d}\n' % (step - 1)
        tape.append(record_line({"step": step}))
    tape.close()


def test_a_tape_may_be_a_device():
    tape = Tape("/dev/null", AppendFile("/dev/null"))
    tape.append(record_line({"step": 1}))
    assert os.get_blocking(tape.file.descriptor)
    tape.close()


def decoded_push(values: np.ndarray) -> Decoded:
    """As ingest hands it on: decoded, with its bytes as received."""
    payload = Decoded(BufferPool(), len(values), memoryview(values.tobytes()), kernels.decode_f32)
    payload.decode(payload.tensor, payload.array, True, 1)
    return payload


def test_a_push_that_is_parked_and_taken_up_again_at_once_keeps_its_values():
    """One step of the scheduler may do both, before anybody asks whether the bytes are needed."""
    values = np.array([1.5, -2.0, 3.25], np.float32)
    payload = decoded_push(values)
    payload.park()
    payload.settle()
    assert payload.values().tobytes() == (-values).tobytes()
    assert payload.tensor is None


def test_a_push_that_was_judged_keeps_no_bytes_unless_it_is_parked():
    values = np.array([1.5, -2.0, 3.25], np.float32)
    merged, parked = decoded_push(values), decoded_push(values)
    merged.settle()
    assert merged.tensor is None
    parked.park()
    parked.settle()
    assert parked.array is None
    assert parked.values().tobytes() == merged.values().tobytes() == (-values).tobytes()


def test_the_final_state_file(tmp_path):
    path = tmp_path / "state"
    path.write_bytes(b"of an earlier run")
    fragments = [np.array([1, -2.5], np.float32), np.array([0.0], np.float32)]
    expected = struct.pack("<IQffQf", 2, 2, 1, -2.5, 1, 0)
    assert write_final_state(path, fragments) == len(expected)
    assert path.read_bytes() == expected
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_a_final_state_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "state"
    path.write_bytes(b"old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WriteError, match="No space"):
        write_final_state(path, [np.zeros(3, np.float32)])
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["state"]
