"""The lab of benchmarks/: that it works in small, says why it cannot, and leaves nothing behind."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lab import __main__ as lab
from benchmarks.lab import network
from benchmarks.lab.scenes import Row

from .scripted import ROOT
from .waiting import until

COMMAND = [sys.executable, "-m", "benchmarks.lab", "--short"]
AT_A_TERMINAL = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell runs beside it ignores it
runpy.run_module("benchmarks.lab", run_name="__main__", alter_sys=True)
"""
TRIED = """
import sys
from benchmarks.lab.network import Host, apart, cable
sys.exit(apart(lambda: cable(1, Host(), Host(), 1e8) and 0))
"""


@pytest.fixture(scope="module")
def takes_namespaces():
    done = subprocess.run([sys.executable, "-c", TRIED], cwd=ROOT, capture_output=True,
                          timeout=60, check=False)
    if done.returncode:
        pytest.skip("no network namespaces here: that takes Linux, iproute2 and permission")


def belonging(mark: str) -> list[int]:
    """Processes that have a mark in their environment, the lab and all that it has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            pass  # it has just ended, or is not ours
    return found


@pytest.mark.usefixtures("takes_namespaces")
@pytest.mark.slow
def test_rows_come_as_a_table_and_as_json(tmp_path):
    done = subprocess.run([*COMMAND, "--only", "straggler", "--json", str(tmp_path / "lab.json")],
                          cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert not done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    [row] = json.loads((tmp_path / "lab.json").read_text())["rows"]["straggler"]
    assert row["what"] in done.stdout
    assert row["seconds"] > 0


@pytest.mark.usefixtures("takes_namespaces")
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_it_nothing_is_left(number):
    mark = f"LAB_TEST={os.getpid()}.{number:d}"
    name, _, value = mark.partition("=")
    running = subprocess.Popen([sys.executable, "-c", AT_A_TERMINAL, "--short", "--only", "delay"],
                               cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               env=os.environ | {name: value})
    try:
        until(lambda: len(belonging(mark)) >= 6, "a server, relays and learners")
        running.send_signal(number)
        running.wait(60)
        until(lambda: not belonging(mark), "all have ended")
    finally:
        running.kill()
        running.wait()


def test_it_says_in_one_sentence_what_it_lacks(monkeypatch, capsys):
    def refuse(flags: int) -> None:
        raise PermissionError(errno.EPERM, "unshare: Operation not permitted")

    monkeypatch.setattr(network, "unshare", refuse)
    assert lab.main([]) == 2
    assert capsys.readouterr().err == (
        "benchmarks.lab: the lab needs network namespaces, which take root or user namespaces on "
        "Linux: [Errno 1] unshare: Operation not permitted\n")


def test_a_row_that_misses_its_bound_is_marked():
    rows = [Row("a", 1.2, 1.0, 0.83, 0.9), Row("b", 1.2, 1.0, 1.2, 1.5, at_most=True)]
    *_, first, second = lab.table("sync", rows)
    assert first.endswith("0.83  >= 0.9 !")
    assert second.endswith("1.20  <= 1.5")
