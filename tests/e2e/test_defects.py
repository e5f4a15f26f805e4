"""Defects of the program itself: one sentence, and no committed step is lost."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from syncer.checkpoint import saver
from syncer.checkpoint.reader import Checkpoint
from syncer.merge import FragmentStore
from syncer.server import run_session
from syncer.server.merging import Merging
from tests.e2e.scripted import ServerThread, layout_of

SMALL = layout_of((4,))
ZEROS = np.zeros(4, np.float32)


def no_memory(*given, **named):
    raise MemoryError("no memory for that")


def broken(*given, **named):
    raise RuntimeError("a defect")


def train(server: ServerThread, steps: int):
    """A learner that has trained so far, and has been asked for the next step."""
    learner = server.learner(0, SMALL)
    learner.send_init([ZEROS])
    for step in range(1, steps + 1):
        learner.push(learner.pull(step), ZEROS + step)
    return learner, learner.pull(steps + 1)


@pytest.mark.parametrize("background", [False, True])
def test_a_defect_in_a_merge_saves_what_is_committed(tmp_path, monkeypatch, background):
    path = tmp_path / "c"
    with ServerThread(tmp_path, total_steps=9, checkpoint_path=str(path), checkpoint_every=8,
                      background_checkpoint=background) as server:
        learner, pull = train(server, 3)
        monkeypatch.setattr(FragmentStore, "prepare", broken)
        learner.push(pull, ZEROS)
        learner.ended()
        assert server.wait() == 1
        server.log.wait("internal error: RuntimeError: a defect", level="error", status=1)
        assert server.log.find("checkpoint written", kind="failure", step=3)
    with Checkpoint(path) as checkpoint:
        assert checkpoint.facts.step == 3


def test_a_defect_before_a_step_is_published_loses_nothing(tmp_path, monkeypatch):
    """The payload of a merged push cannot be given back: its step is committed, and is saved."""
    path = tmp_path / "c"
    with ServerThread(tmp_path, total_steps=9, checkpoint_path=str(path),
                      checkpoint_every=8) as server:
        learner, pull = train(server, 3)
        monkeypatch.setattr(run_session, "Decoded", SimpleNamespace(release=no_memory))
        learner.push(pull, ZEROS)
        learner.ended()
        assert server.wait() == 1
        assert server.log.find("checkpoint written", kind="failure", step=4)
    with Checkpoint(path) as checkpoint:
        assert checkpoint.facts.step == 4


def test_a_step_that_cannot_be_published_is_saved(tmp_path, monkeypatch):
    """It is committed: nobody has seen it, but its values are whole."""
    path = tmp_path / "c"
    with ServerThread(tmp_path, total_steps=9, checkpoint_path=str(path),
                      checkpoint_every=8) as server:
        learner, pull = train(server, 3)
        monkeypatch.setattr(FragmentStore, "publish", broken)
        learner.push(pull, ZEROS + 4)
        learner.ended()
        assert server.wait() == 1
        assert server.log.find("checkpoint written", kind="failure", step=4)
    with Checkpoint(path) as checkpoint:
        (found,) = checkpoint.load()
    monkeypatch.undo()
    calm = tmp_path / "calm"
    with ServerThread(tmp_path, total_steps=9, checkpoint_path=str(calm),
                      checkpoint_every=4) as server:
        train(server, 4)
        server.server.stop()
        assert server.wait() == 143
    with Checkpoint(calm) as checkpoint:
        (expected,) = checkpoint.load()
    assert found.version == expected.version == 4
    assert found.params.tobytes() == expected.params.tobytes()


def test_a_defect_between_a_step_and_its_fragments_saves_nothing(tmp_path, monkeypatch):
    """What is in memory is no cut then: the file of before stays."""
    path = tmp_path / "c"
    with ServerThread(tmp_path, total_steps=9, checkpoint_path=str(path),
                      checkpoint_every=2) as server:
        learner, pull = train(server, 3)
        monkeypatch.setattr(Merging, "publish", broken)
        learner.push(pull, ZEROS)
        learner.ended()
        assert server.wait() == 1
        assert not server.log.find("checkpoint written", kind="failure")
    with Checkpoint(path) as checkpoint:
        assert checkpoint.facts.step == 2


@pytest.mark.parametrize("background", [False, True])
def test_a_defect_in_a_save_is_an_answer(tmp_path, monkeypatch, background):
    """As a save that fails: nobody waits for it without end."""
    path = tmp_path / "c"
    with ServerThread(tmp_path, total_steps=9, checkpoint_path=str(path), checkpoint_every=2,
                      background_checkpoint=background, on_checkpoint_error="stop") as server:
        learner = server.learner(0, SMALL)
        learner.send_init([ZEROS])
        for step in range(1, 5 if background else 3):
            pull = learner.pull(step)
            monkeypatch.setattr(saver, "write_checkpoint", no_memory)
            learner.push(pull, ZEROS)
        learner.ended()
        assert server.wait() == 5
        server.log.wait("checkpoint not written",
                        error="internal error: MemoryError: no memory for that")
