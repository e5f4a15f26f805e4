"""Resuming: its name is on disk before anything is served from it, and what does not fit."""

import dataclasses
import errno
import math
import os

import pytest

from syncer.checkpoint.files import Files
from syncer.checkpoint.resume import check_resumable
from syncer.checkpoint.writer import write_checkpoint
from syncer.config import Config
from syncer.errors import CheckpointError, CheckpointMismatch
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


# ------------------------------------------------------------------------- what does not fit
MINE = {"name": "nesterov", "lr": 0.7, "momentum": 0.9}


@pytest.mark.parametrize(("constants", "advice"), [
    ({"lr": 0.5}, "expected lr 0.7, found 0.5; resume with --outer-lr 0.5"),
    ({"momentum": 0.25}, "found 0.25; resume with --outer-momentum 0.25"),
    ({"lr": "0.7"}, "expected lr 0.7, found '0.7'; no setting"),
    ({"lr": math.nan}, "found nan; no setting"), ({"lr": -1}, "found -1; no setting"),
    ({"lr": 1e39}, "found 1e+39; no setting"), ({"momentum": 1}, "found 1; no setting"),
    ({"lr": 10**400}, "found a number of 1329 bits; no setting"),
    ({"lr": True}, "found True; no setting"), ({"lr": [7] * 400}, "7,…; no setting"),
    ({"foo": 1}, "expected no foo, found 1; no setting"),
    ({"dn_period": 3}, "expected no dn_period, found 3; no setting"),
    ({"name": "sgd"}, "found sgd (arrays momentum); resume with --outer-optimizer sgd"),
    ({"name": "x" * 500}, "x… (arrays momentum); no setting"),
    ({"name": "a\nb"}, "found 'a\\nb' (arrays momentum); no setting")])
def test_advice_is_only_what_can_be_followed(constants, advice):
    facts = make_cut(7).facts
    facts = dataclasses.replace(facts, optimizer=MINE | constants)
    with pytest.raises(CheckpointMismatch) as caught:
        check_resumable(facts, "c", optimizer=MINE, state=facts.state, total_steps=9)
    assert advice in str(caught.value)
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


def test_arrays_that_do_not_fit_their_optimizer_are_no_other_setting():
    facts = make_cut(7).facts
    with pytest.raises(CheckpointMismatch, match=r"found nesterov \(arrays momentum\); no setting"):
        check_resumable(facts, "c", optimizer=MINE, state=(), total_steps=9)
