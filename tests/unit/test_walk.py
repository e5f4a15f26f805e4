"""The walk of a push in docs/architecture.md is the way it really goes."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from docs.walk import WALK, files
from tests.e2e.scripted import ServerThread, layout_of

ROOT = Path(__file__).resolve().parents[2]
STOPS = [stop for _, stops in WALK for stop in stops]


@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: stop.path)
def test_a_stop_names_what_is_there(stop):
    assert stop.name in (ROOT / stop.path).read_text(encoding="utf-8")


def test_no_python_file_of_the_server_or_merge_is_left_out(tmp_path, monkeypatch):
    """Of a push to its broadcast, every .py file that runs in server, merge and wire is a stop.

    Compiled files do not tell; setting up, logging, reports for people, readers that look on and
    ending are not on the way of a push.
    """
    seen: set[str] = set()

    def profile(frame, event, _):
        if event == "call":
            seen.add(frame.f_code.co_filename)

    with ServerThread(tmp_path, total_steps=3) as server:
        learner = server.learner(0, layout_of((200_000,)))
        learner.send_init([np.zeros(200_000, np.float32)])
        learner.push(learner.pull(1), np.ones(200_000, np.float32))
        pull = learner.pull(2)  # everything that is made once has been made
        server.server.loop.post(sys.setprofile, profile)
        learner.push(pull, np.ones(200_000, np.float32))
        learner.pull(3)
        server.server.loop.post(sys.setprofile, None)
        server.server.stop()
        server.wait()
    rooms = ("syncer/server/", "syncer/merge/", "syncer/wire/")
    found = {str(Path(name).relative_to(ROOT)) for name in seen if name.startswith(f"{ROOT}/")}
    found = {name for name in found if name.startswith(rooms)}
    beside = {"syncer/server/log.py", "syncer/server/tape.py", "syncer/server/shortened.py",
              "syncer/server/reporting.py", "syncer/server/readers.py", "syncer/server/system.py",
              "syncer/server/service.py", "syncer/server/run_session.py",
              "syncer/server/onlookers.py"}
    assert found - beside <= set(files())
    assert "syncer/server/outgoing.py" in found
