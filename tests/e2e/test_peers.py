"""The side-by-side of benchmarks/peers: that ours runs in it, and what becomes of its figures."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.limits.figure import NotHere
from benchmarks.peers import __main__ as peers
from benchmarks.peers import against

from .scripted import ROOT
from .test_lab import takes_namespaces  # noqa: F401, a fixture

CELL = {"load": 0.1, "peer": "syncer", "form": "f32", "place": "loopback", "participants": 2}
FOUND = {
    "when": "2026-12-01T00:00:00+00:00", "mib": 128, "machine": "2 cores",
    "versions": {"torch": "2"}, "losses": [], "syncs": [
        CELL | {"seconds": 0.5, "least": 0.4, "most": 0.6, "syncs": 3},
        CELL | {"peer": "Flower", "failed": "no module named flwr"}]}


@pytest.mark.usefixtures("takes_namespaces")
@pytest.mark.slow
def test_ours_syncs_and_goes_on_without_one_that_is_killed(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.peers", "--short", "--only", "syncer", "--place",
         "1 Gb/s", "--participants", "2", "--json", str(tmp_path / "peers.json")],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines()[2:])) <= 80
    found = json.loads((tmp_path / "peers.json").read_text())
    assert {"f32", "bf16", "q4"} <= {cell["form"] for cell in found["syncs"]}
    assert all(0 < cell["least"] <= cell["seconds"] <= cell["most"] for cell in found["syncs"])
    [loss] = found["losses"]
    assert loss["others_s"] > 0
    assert loss["failed"] == 0


def test_a_peer_that_did_not_run_says_why_in_one_line():
    line = peers.sync_line(FOUND["syncs"][1])
    assert "no module named flwr" in line
    assert len(line) <= 80


def test_what_was_found_can_be_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "peers.json").write_text(json.dumps(FOUND))
    assert peers.main(["--draw", str(tmp_path / "peers.json"), "--png",
                       str(tmp_path / "peers.png")]) == 0
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")


def test_without_torchft_its_rows_are_not_here(monkeypatch):
    monkeypatch.setenv("PEERS_PYTHON", "false")
    with pytest.raises(NotHere, match="no torchft"):
        against.against_torchft(None, True)
