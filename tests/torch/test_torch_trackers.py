"""What an island tells W&B, TensorBoard and trackio of its merges, read back with their own code.

Each in a process of its own, offline; of W&B the last of each figure.
"""

import pytest

from tests.torch.island import torch  # isort: split

import importlib
import json
import os
import re
import subprocess
import sys

from syncer.torch.trackers import MergeFigures
from tests.e2e.scripted import ROOT, ServerProcess

assert torch
STEPS = 12
ISLAND = """
import json, os, sys, torch
from syncer.torch import Diloco, trackers

def train(tracker):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Diloco(model, optimizer, sys.argv[1], fragments=2, tokens_per_step=8) as island:
        island.on_merge(tracker(island))
        while not island.finished:
            loss = model(torch.ones(2, 4)).square().sum()
            loss.backward()
            island.report(loss=loss, lr=0.1)
            optimizer.step()
            optimizer.zero_grad()

def show(records):
    print("RECORDS " + json.dumps(records))
"""
LIBRARIES = {
    "wandb": """
import wandb
wandb.init(project="syncer", mode="offline", settings=wandb.Settings(silent=True))
train(trackers.wandb_log)
last = {k: v for k, v in dict(wandb.run.summary).items() if k.startswith("island/")}
wandb.finish()
show([last])
""",
    "tensorboard": """
from torch.utils.tensorboard import SummaryWriter
train(lambda island: trackers.tensorboard_log(island, writer := SummaryWriter("logs")))
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator("logs").Reload()
records = {}
for tag in events.Tags()["scalars"]:
    for event in events.Scalars(tag):
        records.setdefault(event.step, {})[tag] = event.value
assert all(record["island/step"] == step for step, record in records.items())
show(list(records.values()))
""",
    "trackio": """
os.environ["TRACKIO_DIR"] = os.getcwd()
import trackio
run = trackio.init("syncer", auto_log_gpu=False, auto_log_cpu=False)
train(trackers.trackio_log)
trackio.finish()
from trackio.sqlite_storage import SQLiteStorage
show([{k: v for k, v in record.items() if k.startswith("island/")}
      for record in SQLiteStorage.get_logs("syncer", run.name)])
""",
}
NAMES = {"island/" + name for name in re.findall(r"`island/(\w+)`", MergeFigures.__doc__ or "")}


@pytest.mark.parametrize("library", LIBRARIES)
def test_merges_are_seen_where_the_user_looks(tmp_path, library):
    pytest.importorskip(library, reason=f"needs {library}; .ci/torch has it")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SYNCER_", "WANDB_"))}
    with ServerProcess(tmp_path, "--sync-interval-steps", "4", steps=STEPS) as server:
        done = subprocess.run(
            [sys.executable, "-c", ISLAND + LIBRARIES[library], f"127.0.0.1:{server.port}"],
            cwd=tmp_path, env=clean | {"PYTHONPATH": str(ROOT), "WANDB_MODE": "offline"},
            check=False, timeout=300, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        assert server.wait() == 0
    records = json.loads(re.search(r"^RECORDS (.*)$", done.stdout, re.MULTILINE)[1])
    assert records
    for record in records:
        assert record.keys() == NAMES
        assert record["island/bytes_sent"] > 0 < record["island/bytes_received"]
        assert 0 <= record["island/versions_behind"] <= record["island/version"] <= STEPS
        assert record["island/lr"] == pytest.approx(0.1)
    for name in ("step", "version", "merges", "bytes_sent", "bytes_received"):
        seen = [record["island/" + name] for record in records]
        assert seen == sorted(seen)
    assert records[-1]["island/merges"] >= len(records)
    assert records[-1]["island/version"] > STEPS / 2


@pytest.mark.parametrize("library", LIBRARIES)
def test_without_the_library_there_is_one_sentence(monkeypatch, library):
    trackers = importlib.import_module("syncer.torch.trackers")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModuleNotFoundError, match=f"pip install {library}"):
        getattr(trackers, f"{library}_log")(None)
