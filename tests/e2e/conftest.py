"""What several files of this tier start from."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from syncer.learner import client as client_module
from syncer.learner import lines
from tests.e2e.checkpointed import (
    STEPS,
    flags,
    start,
    train,
)
from tests.e2e.clients import Fixture, client_threads
from tests.e2e.scripted import (
    ScriptedLearner,
    ServerProcess,
)
from tests.e2e.scripted_server import ScriptedServer
from tests.e2e.waiting import until


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """The files of a run of one learner that nothing happens to: every step's checkpoint."""
    directory = tmp_path_factory.mktemp("undisturbed")
    path = directory / "c"
    with (
        ServerProcess(directory, *flags(path, 1, "--checkpoint-keep", "99"), steps=STEPS) as server,
        ScriptedLearner(server.port, 0) as learner,
    ):
        train(start(learner), STEPS)
        learner.finish()
        learner.close()
        assert server.wait() == 0
    names = {step: f"c.step-{step}" for step in range(STEPS)} | {STEPS: "c"}
    return {step: (directory / name).read_bytes() for step, name in names.items()}


@pytest.fixture
def stderr(monkeypatch):
    """What the learners of this process have said there so far, as `getvalue()`.

    A thread writes it, so wait for what is to be there. `capfd` would lose what comes between its
    read and its truncation.
    """
    said = io.StringIO()
    monkeypatch.setattr(lines, "sys", SimpleNamespace(stderr=said))
    return said


@pytest.fixture
def place(monkeypatch):
    monkeypatch.setattr(client_module, "DRAIN_S", 0.0)
    with ScriptedServer() as server:
        fixture = Fixture(server)
        yield fixture
        for client in fixture.clients:
            client.close()
    until(lambda: not client_threads(), "all client threads end")
