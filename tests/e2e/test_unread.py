"""A log, tape or stderr that nobody reads holds up neither the rounds nor the end."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys

import numpy as np

from tests.e2e.scripted import PATIENCE_S, ROOT, ScriptedLearner, layout_of
from tests.e2e.scripted_server import ScriptedServer

SMALL = layout_of((4,))
ZEROS = np.zeros(4, np.float32)
STEPS = 100


class Unread:
    """A server whose standard error is the smallest pipe; only its first lines are read."""

    def __init__(self, *flags: str):
        self.reader, writer = os.pipe()
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SYNCER_", "YETO_"))}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "syncer.server", "--learners", "1", "--total-steps", str(STEPS),
             "--port", "0", "--log-format", "json", "--log-level", "debug",
             "--sync-interval-steps", "0", *flags],
            cwd=ROOT, stdout=subprocess.DEVNULL, stderr=writer, env=clean)
        os.close(writer)
        self.text = b""

    def port(self) -> int:
        while b"syncer listening" not in self.text or not self.text.endswith(b"\n"):
            self.text += (more := os.read(self.reader, 4096))
            assert more, self.text
        return next(line["port"] for line in map(json.loads, self.text.splitlines())
                    if line["message"] == "syncer listening")

    def read_on(self) -> list[dict]:
        """Everything up to the end."""
        while more := os.read(self.reader, 4096):
            self.text += more
        return [json.loads(line) for line in self.text.splitlines()]

    def __enter__(self) -> Unread:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        os.close(self.reader)


def train(learner: ScriptedLearner, steps: int) -> None:
    learner.send_init([ZEROS])
    for step in range(1, steps + 1):
        learner.push(learner.pull(step), ZEROS)


def test_a_run_goes_on_while_nobody_reads_its_log_and_then_all_of_it_is_there():
    """Its lines are four times what the pipe holds."""
    with Unread() as server, ScriptedLearner(server.port(), 0, SMALL) as learner:
        train(learner, STEPS)
        learner.finish()
        lines = server.read_on()
        assert server.process.wait(PATIENCE_S) == 0
    steps = [line["step"] for line in lines if line["message"] == "outer step"]
    assert steps == list(range(1, STEPS + 1))
    assert lines[-1]["message"] == "server totals"
    assert len(server.text) > 4 * 4096


def test_a_signal_ends_a_server_whose_log_nobody_reads():
    with Unread() as server, ScriptedLearner(server.port(), 0, SMALL) as learner:
        train(learner, STEPS - 1)
        learner.pull(STEPS)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 128 + signal.SIGTERM


LEARNER = """
import sys
import numpy as np
from syncer.learner import Learner, lines

learner = Learner({"w": np.zeros(4, np.float32)}, sys.argv[1], learner_id=1, fragments=1)
for number in range(5000):  # more than the pipe and the backlog hold
    lines.say(f"line {number}")
learner.step(1)
learner.close()
print("closed", flush=True)
"""


def unread_learner(address: str) -> tuple[subprocess.Popen, int]:
    """A learner that says a lot, and the end of its standard error to read it from."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    process = subprocess.Popen([sys.executable, "-c", LEARNER, address], cwd=ROOT, stderr=writer,
                               stdout=subprocess.PIPE, text=True)
    os.close(writer)
    return process, reader


def test_a_learner_whose_stderr_nobody_reads_trains_closes_and_ends():
    with ScriptedServer() as server:
        process, reader = unread_learner(server.address)
        assert process.communicate(timeout=PATIENCE_S)[0] == "closed\n"
        assert process.returncode == 0
        os.close(reader)


def test_lines_of_a_learner_that_were_lost_are_counted():
    """Read from the moment on at which it has closed, they are its first and its last ones, and the
    number of those between them."""
    with ScriptedServer() as server:
        process, reader = unread_learner(server.address)
        assert process.stdout.readline() == "closed\n"
        with open(reader, encoding="utf-8") as stderr:
            said = stderr.read().splitlines()
        assert process.wait(PATIENCE_S) == 0
        process.stdout.close()
    lost = [int(line.split()[1]) for line in said if "lines lost: nobody read them" in line]
    numbers = [int(line.split()[-1]) for line in said if " line " in line]
    assert numbers == sorted(set(numbers))
    assert len(numbers) + sum(lost) >= 5000
    assert sum(lost) > 1000


def test_a_pipe_as_tape_that_nobody_reads_holds_nothing_up(tmp_path):
    tape = tmp_path / "tape"
    os.mkfifo(tape)
    end = os.open(tape, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, 4096)
    with (
        Unread("--event-tape", str(tape)) as server,
        ScriptedLearner(server.port(), 0, SMALL) as learner,
    ):
        train(learner, STEPS - 1)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 128 + signal.SIGTERM
    os.close(end)
