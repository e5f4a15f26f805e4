"""Resuming: the name that is read from is on disk before anything is served from it."""

import errno
import os

import pytest

from syncer.checkpoint.files import Files
from syncer.checkpoint.writer import write_checkpoint
from syncer.config import Config
from syncer.errors import CheckpointError
from syncer.server.log import Log
from syncer.server.persistence import Persistence
from syncer.server.system import lines_to
from tests.checkpoint.cuts import Faulty, make_cut


def resume(path, files: Files) -> Persistence:
    config = Config(learners=2, total_steps=9, checkpoint_path=str(path), resume=True,
                    outer_lr=0.7, outer_momentum=0.9)
    return Persistence(config, Log("error", "text", lines_to(2)), files)


def test_a_resumed_name_is_made_durable(tmp_path):
    """A server killed between rename and fsync leaves a name that a power failure could undo."""
    path = tmp_path / "run.ckpt"
    write_checkpoint(path, make_cut(7))
    files = Faulty()
    found = resume(path, files)
    try:
        assert found.resumed.step == 7
        assert files.calls == ["close", "sync_directory"], "of what was read, and then"
    finally:
        found.close()


def test_nothing_is_resumed_from_a_name_that_cannot_be_made_durable(tmp_path):
    path = tmp_path / "run.ckpt"
    write_checkpoint(path, make_cut(7))
    with pytest.raises(CheckpointError, match=os.strerror(errno.EIO)):
        resume(path, Faulty(0, only="sync_directory"))
    resume(path, Faulty()).close()   # and the path is free again
