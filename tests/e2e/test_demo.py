"""`syncer demo` as a user starts it: real processes, real TCP, and nobody left behind."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from .waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 240
QUIET = {name: value for name, value in os.environ.items() if not name.startswith("SYNCER_")}


def start(module: str, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", module, *arguments], cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            env=QUIET | {"SYNCER_CHECK": "1"}, start_new_session=True)


def finished(process: subprocess.Popen) -> tuple[int, str, str]:
    """(exit status, standard output, standard error) once it has ended."""
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=20)
        process.kill()
        raise
    return process.returncode, out, err


def demo(*arguments: str) -> tuple[int, str, str]:
    return finished(start("syncer", "demo", *arguments))


def running(pid: int) -> bool:
    """Whether a process exists and is not just waiting to be reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def children(parent: int) -> list[int]:
    """Process ids of the direct children."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text(encoding="ascii", errors="replace")
                if int(stat.rpartition(")")[2].split()[1]) == parent:
                    found.append(int(entry.name))
    return found


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except FileNotFoundError:
        return ""


def with_training_children(process: subprocess.Popen, learners: int) -> list[int]:
    """The pids of a server and `learners` learners, once every one is what it will be."""
    def found() -> list[int]:
        pids = children(process.pid)
        commands = [command_line(pid) for pid in pids]
        ready = (sum("-m syncer.server" in c for c in commands) == 1
                 and sum("-m syncer.demo.learner" in c for c in commands) == learners)
        return pids if ready else []

    return until(found, "a server and the learners as child processes")


def test_short_run_is_complete(tmp_path):
    """Exit 0; table and JSON hold every figure; the loss falls; all hold the server's bits."""
    status, out, err = demo("--learners", "2", "--steps", "12", "--seed", "3", "--baseline",
                            "--json", str(tmp_path / "run.json"),
                            "--plot", str(tmp_path / "loss.png"))
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    for start_of_row in ("learner 0", "learner 1", "merged model", "one alone"):
        assert any(line.startswith(start_of_row) for line in lines), out
    assert "12 of 12 outer steps" in out
    assert "2 of 2 learners ended with exactly the server's" in out
    assert "Server: CPU time" in out
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")

    result = json.loads((tmp_path / "run.json").read_text())
    assert result["format"] == "syncer-demo-v1"
    assert result["ended"] == "final cut"
    assert abs(result["before"] - 8.0) < 0.3
    assert result["merged"] < 6.0
    assert result["merged_from"] == "final state"
    assert result["outer_steps"] == 12
    assert result["problems"] == []
    for row in result["learners"]:
        assert row["holds_final_cut"]
        assert row["merged"] == pytest.approx(result["merged"], abs=1e-6)
        assert row["own"] < 6.0
        assert row["steps"] > 0
        assert row["tokens"] == row["steps"] * 128
        assert row["bytes_sent"] > 12 // 4 * 100_000
        assert row["peak_rss_bytes"] > 20e6
    server = result["server"]
    assert server["commits"] == 12
    assert server["bytes_received"] >= sum(row["bytes_sent"] for row in result["learners"]) * 0.9
    assert server["cpu_seconds"] > 0
    assert server["peak_rss_bytes"] > 20e6
    assert result["baseline"]["steps"] == max(row["steps"] for row in result["learners"])
    assert result["baseline"]["held_out"] < 6.0
    assert [merge["step"] for merge in result["merges"]] == list(range(1, 13))
    assert {point["learner"] for point in result["curve"]} == {0, 1}
    assert [h["what"] for h in result["happenings"]].count("join") == 2


def test_terminal_gets_a_table_that_goes_away():
    """On a terminal of 80 columns: redrawn in place, taken away at the end, cursor given back."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "syncer", "demo", "--learners", "2", "--steps", "8"], cwd=ROOT,
        stdout=theirs, stderr=theirs, stdin=subprocess.DEVNULL, start_new_session=True,
        env=QUIET | {"TERM": "xterm-256color"})
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the terminal has no writer any more
        while data := os.read(ours, 65536):
            shown += data
    os.close(ours)
    assert process.wait(TIMEOUT_S) == 0
    text = shown.decode()
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
    assert "outer step 8/8 [##############################]" in text
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", part) for part in re.split(r"[\r\n]+", text)]
    assert max(map(len, lines)) <= 80
    last_table = text.rindex("training loss")
    assert "merged model" in text[last_table:]
    assert "\x1b[2K" in text[last_table : text.rindex("merged model")]


def test_killed_learner_returns_and_the_run_finishes(tmp_path):
    """Own steps set the pace, so the second half is long enough for a return on any machine."""
    status, out, err = demo("--learners", "2", "--steps", "40", "--kill-one", "--json",
                            str(tmp_path / "run.json"))
    assert (status, err) == (0, "")
    assert "learner 1 killed (SIGKILL) after outer step" in out
    assert "learner 1 started again after outer step" in out
    assert "Learner 1 was killed at" in out
    assert "2 of 2 learners ended with exactly the server's" in out
    result = json.loads((tmp_path / "run.json").read_text())
    loss = result["loss"]
    assert loss["learner"] == 1
    assert 20 <= loss["step"] < loss["return_step"] < loss["took_part_again_in"] <= 40
    assert loss["merges_without_it"] >= 1
    assert result["learners"][1]["starts"] == 2
    assert result["merged"] < result["before"] - 3
    assert [h["what"] for h in result["happenings"]].count("join") == 3


@pytest.mark.parametrize("dtype", ["f32", "q4"])
def test_other_number_formats(dtype):
    status, out, err = demo("--learners", "1", "--steps", "6", "--dtype", dtype)
    assert (status, err) == (0, "")
    assert "6 of 6 outer steps" in out
    assert "1 of 1 learners ended with exactly the server's" in out


def test_time_budget_ends_a_run_that_has_more_to_merge():
    status, out, err = demo("--learners", "2", "--steps", "1000000", "--seconds", "1.5")
    assert (status, err) == (0, "")
    assert "Stopped (time budget) after" in out
    assert "of 1000000 outer steps" in out
    assert any(line.startswith("merged model") for line in out.splitlines())


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_ends_every_child(number, expected):
    process = start("syncer", "demo", "--learners", "2", "--seconds", "600")
    pids = with_training_children(process, 2)
    process.send_signal(number)
    status, out, err = finished(process)
    assert (status, err) == (expected, "")
    assert "Stopped (interrupted)" in out
    assert not [pid for pid in pids if running(pid)]


def test_kill_of_the_parent_ends_every_child():
    process = start("syncer", "demo", "--learners", "2", "--seconds", "600")
    pids = with_training_children(process, 2)
    process.kill()
    until(lambda: not any(running(pid) for pid in pids), "the end of all children")
    process.communicate()


def test_server_that_dies_is_one_sentence():
    process = start("syncer", "demo", "--learners", "1", "--seconds", "600")
    pids = with_training_children(process, 1)
    server = next(pid for pid in pids if "-m syncer.server" in command_line(pid))
    os.kill(server, signal.SIGKILL)
    status, _, err = finished(process)
    assert status == 1
    assert err.startswith("syncer: the server ended with status -9")
    assert err.count("\n") == 1
    assert not [pid for pid in pids if running(pid)]


@pytest.mark.parametrize("arguments", [
    ["--learners", "0"], ["--seconds", "nan"], ["--dtype", "f16"], ["--kill"],
    ["--steps", "3", "--kill-one"], ["--json", "/nowhere/at/all.json"], ["--plot", "loss.txt"],
])  # fmt: skip
def test_wrong_flags_of_the_demo(arguments):
    status, out, err = demo(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("syncer: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("arguments", [
    [], ["--server", "127.0.0.1"], ["--alone", "5", "--server", "127.0.0.1:1"], ["--id", "x"],
    ["--alone", "0"], ["--srever", "127.0.0.1:1"],
])  # fmt: skip
def test_wrong_flags_of_a_learner(arguments):
    status, out, err = finished(start("syncer.demo.learner", *arguments))
    assert status == 2
    assert err.startswith("syncer: ")
    assert err.count("\n") == 1
    assert "step" not in out


def test_learner_without_a_server_says_so():
    status, _, err = finished(start("syncer.demo.learner", "--server", "127.0.0.1:1",
                                    "--connect-timeout-s", "0.1"))
    assert status == 1
    assert any(line.startswith("syncer: syncer at 127.0.0.1:1 was not reachable")
               for line in err.splitlines())
    assert "Traceback" not in err


def test_learner_alone_stops_at_a_signal():
    process = start("syncer.demo.learner", "--alone", "1000000", "--report", "json")
    assert json.loads(process.stdout.readline())["event"] == "start"
    assert json.loads(process.stdout.readline())["event"] == "progress"
    process.send_signal(signal.SIGINT)
    status, out, err = finished(process)
    assert (status, err) == (130, "")
    end = json.loads(out.splitlines()[-1])
    assert (end["event"], end["how"]) == ("end", "stopped")
    assert 0 < end["own"] < 8
