"""Servers under something that starts them again: kill -9 in a loop, and what systemd is told."""

from __future__ import annotations

import configparser
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from syncer import flags as command_line
from syncer.checkpoint.reader import Checkpoint
from syncer.exits import Exit
from syncer.protocol import Msg
from syncer.wire.messages import Manifest, Pull
from tests.e2e.checkpointed import INIT, answer, start, train
from tests.e2e.scripted import ROOT, EndOfStream, ScriptedLearner, ServerProcess, wait_until

EXAMPLES = ROOT / "docs" / "examples"
KILLS, STEPS = 20, 70
STRICT = ("--max-base-lag", "0", "--quorum", "2", "--grace-ms", "0", "--learner-weight", "equal",
          "--pipeline", "1", "--checkpoint-every", "1", "--sync-interval-steps", "0")


class Staying(threading.Thread):
    """A learner that lives as long as the run: it dials whoever serves it, and gives initial values
    only until it has trained. `killing(answers)`: told of each answer, it may end the server."""

    def __init__(self, port: int, learner: int, killing):
        super().__init__(daemon=True)
        self.port, self.learner, self.killing = port, learner, killing
        self.is_done = False
        self.failed: BaseException | None = None
        self.answers = 0

    def run(self) -> None:
        try:
            while not self.is_done:
                with suppress(EndOfStream, OSError), ScriptedLearner(
                        self.port, self.learner) as link:
                    self.follow(link)
        except BaseException as error:
            self.failed = error

    def follow(self, link: ScriptedLearner) -> None:
        if self.learner == 0 and not self.answers:
            link.send_init(INIT)
        while True:
            pull = link.until(lambda m: isinstance(m, Pull | Manifest))
            if isinstance(pull, Manifest):
                link.acknowledge(pull.step)
                link.until(Msg.SHUTDOWN)
                self.is_done = True
                return
            answer(link, pull)
            self.answers += 1
            self.killing(self.answers)


def served_by(path: Path) -> int:
    """The process that has the checkpoint; 0 if none has."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"{path}.lock").read_text().splitlines()[0])
    return 0


def free_port() -> int:
    """One that the kernel gives to nobody who dials: a learner that dials while no server is there
    could get it for its own end, and would be connected to itself."""
    while True:
        with suppress(OSError), socket.create_server(
                ("127.0.0.1", random.SystemRandom().randrange(20_000, 32_000))) as sock:
            return sock.getsockname()[1]


def run_to_its_end(directory: Path, kills: int) -> tuple[bytes, ...]:
    """Final parameters of a supervised run whose server dies so often, at moments by chance."""
    path, port, chance = directory / "c", free_port(), random.Random(7)
    left, due, lock = [kills], [1], threading.Lock()
    killed: set[int] = set()

    def killing(answers: int) -> None:
        with lock:
            if not left[0] or answers < due[0]:
                return
            pid = served_by(path)
            if pid and pid not in killed:
                killed.add(pid)
                left[0] -= 1
                due[0] = answers + chance.randrange(3)
                os.kill(pid, signal.SIGKILL)

    line = [sys.executable, "-m", "syncer.server", "--learners", "2", "--total-steps", str(STEPS),
            "--port", str(port), "--checkpoint-path", str(path), "--resume", "auto", *STRICT]
    with open(directory / "log", "wb") as log:
        supervisor = subprocess.Popen(
            [EXAMPLES / "supervise.sh", *line], cwd=ROOT, stdout=log, stderr=log,
            env=os.environ | {"SUPERVISE_PAUSE": "0", "SYNCER_CHECK": "1"})
    learners = [Staying(port, learner, killing) for learner in range(2)]
    try:
        for learner in learners:
            learner.start()
        assert supervisor.wait(220) == 0, (directory / "log").read_text()[-2000:]
    finally:
        supervisor.kill()
        for learner in learners:
            learner.is_done = True
    for learner in learners:
        learner.join(60)
        assert learner.failed is None, learner.failed
    assert len(killed) == kills
    with Checkpoint(path) as checkpoint:
        assert checkpoint.facts.step == STEPS
        return tuple(np.asarray(f.params).tobytes() for f in checkpoint.load())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_twenty_kills_change_no_bit(tmp_path):
    """Learners stay, the same command line is started again, and every step is on disk first."""
    calm, wild = tmp_path / "calm", tmp_path / "wild"
    calm.mkdir()
    wild.mkdir()
    assert run_to_its_end(wild, KILLS) == run_to_its_end(calm, 0)


@pytest.mark.parametrize("status", [0, 2, 4, 126, 127, 130, 143])
def test_the_script_stops_where_another_start_cannot_help(tmp_path, status):
    said = tmp_path / "starts"
    done = subprocess.run([EXAMPLES / "supervise.sh", "sh", "-c", f"echo >> {said}; exit {status}"],
                          timeout=60, check=False, capture_output=True)
    assert done.returncode == status
    assert said.read_text() == "\n"


def test_the_script_starts_again_what_has_failed(tmp_path):
    said = tmp_path / "starts"
    command = f"echo >> {said}; test $(wc -l < {said}) = 3 || exit 5"
    done = subprocess.run([EXAMPLES / "supervise.sh", "sh", "-c", command], timeout=60, check=False,
                          capture_output=True, env=os.environ | {"SUPERVISE_PAUSE": "0"})
    assert done.returncode == 0
    assert done.stderr.count(b"ended with status 5") == 2


# ------------------------------------------------------------------------------------- systemd
def unit() -> configparser.ConfigParser:
    found = configparser.ConfigParser(interpolation=None, comment_prefixes="#")
    found.optionxform = str
    found.read(EXAMPLES / "syncer.service")
    return found


def test_the_unit_has_a_command_line_that_can_be_run(tmp_path):
    words = shlex.split(unit()["Service"]["ExecStart"])
    assert words[:2] == ["/opt/syncer/bin/syncer", "serve"]
    here = [word.replace("/var/lib/syncer", str(tmp_path)) for word in words[2:]]
    config = command_line.read_config(here, {"SYNCER_HMAC_KEY": "k"})
    assert config.resume == "auto"
    assert config.without_effect == ()


def test_the_unit_is_started_again_only_where_that_can_help():
    service = unit()["Service"]
    assert (service["Type"], service["Restart"]) == ("notify", "on-failure")
    assert set(map(int, service["RestartPreventExitStatus"].split())) == {
        Exit.UNUSABLE, Exit.NOT_RESUMABLE}
    assert set(map(int, service["SuccessExitStatus"].split())) == {
        Exit.HUNG_UP, Exit.INTERRUPTED, Exit.TERMINATED}


@pytest.mark.parametrize("abstract", [False, True])
def test_the_service_manager_hears_how_the_server_stands(tmp_path, abstract):
    """A real datagram socket: ready when learners can connect, where the run stands, its end."""
    name = f"syncer-{os.urandom(8).hex()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(60)
        manager.bind(f"\0{name}" if abstract else str(tmp_path / name))
        shown = f"@{name}" if abstract else str(tmp_path / name)
        with ServerProcess(tmp_path, "--pipeline", "1", steps=3, wait=False,
                           environment={"NOTIFY_SOCKET": shown}) as server:
            first = manager.recv(4096).decode().split("\n")
            assert first[0] == "READY=1"
            (line,) = wait_until(lambda: server.log.find("syncer listening"), "listening")
            server.port = line["port"]
            assert first[1].startswith("STATUS=waiting")
            with ScriptedLearner(server.port, 0) as learner:
                train(start(learner), 3)
                learner.finish()
                learner.close()
            assert server.wait() == 0
            said = []
            while not said or "STOPPING=1" not in said[-1]:
                said.append(manager.recv(4096).decode())
        assert said[-1] == "STOPPING=1\nSTATUS=training complete after 3 outer steps"


def test_a_manager_that_hears_nothing_ends_no_run(tmp_path):
    with ServerProcess(tmp_path, steps=1,
                       environment={"NOTIFY_SOCKET": str(tmp_path / "nobody")}) as server:
        server.signal(signal.SIGTERM)
        assert server.wait() == 143
