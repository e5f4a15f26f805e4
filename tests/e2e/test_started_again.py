"""One command line at the first start and after every crash; what is never replaced by accident."""

from __future__ import annotations

import errno
import os
import signal

import pytest

from syncer.checkpoint.files import Files
from syncer.config import Config
from syncer.errors import CheckpointError
from syncer.protocol import Msg
from syncer.server.log import Log
from syncer.server.persistence import Persistence
from tests.checkpoint.cuts import names_in
from tests.e2e.checkpointed import STEPS, answer, cut_in, facts_of, flags, start, train
from tests.e2e.scripted import ScriptedLearner, ServerProcess
from tests.e2e.test_resume import refused

AUTO = ("--resume", "auto")
EARLIER_S = 3 * 3600 + 60


def write(path, blob: bytes):
    """A file that was written a while ago."""
    path.write_bytes(blob)
    written = path.stat().st_mtime - EARLIER_S
    os.utime(path, (written, written))
    return path


def test_the_same_command_line_begins_and_goes_on(tmp_path, undisturbed):
    """Killed between two steps and started again, until it ends; then the bits of a calm run."""
    path = tmp_path / "c"
    line = flags(path, 1, *AUTO)
    with ServerProcess(tmp_path, *line, steps=STEPS) as server:
        server.log.wait("there is no checkpoint yet: the run begins")
        with ScriptedLearner(server.port, 0) as learner:
            train(start(learner), 3)
            learner.pull(4)
            server.signal(signal.SIGKILL)
            server.wait()
    with ServerProcess(tmp_path, *line, steps=STEPS) as server:
        server.log.wait("resumed from checkpoint", step=3)
        with ScriptedLearner(server.port, 0) as learner:
            train(start(learner), STEPS - 3)
            learner.finish()
            learner.close()
        assert server.wait() == 0
    assert cut_in(path.read_bytes()) == cut_in(undisturbed[STEPS])


# ------------------------------------------------------------------------------------ refusals
def test_steps_on_disk_are_not_replaced_without_a_word(tmp_path, undisturbed):
    path = write(tmp_path / "c", undisturbed[4])
    status, text = refused(tmp_path, *flags(path, 8))
    assert status == 4
    assert (f"{path} is the checkpoint of step 4 of a run, written 3 hours ago, and is not "
            "replaced: --resume auto goes on from it, --overwrite begins anew in its place") in text
    assert path.read_bytes() == undisturbed[4]
    assert {"c.lock", "c.tmp"}.isdisjoint(names_in(tmp_path))


def test_overwrite_begins_anew_in_an_old_run_s_place(tmp_path, undisturbed):
    path = write(tmp_path / "c", undisturbed[4])
    with (
        ServerProcess(tmp_path, *flags(path, 1, "--overwrite"), steps=2) as server,
        ScriptedLearner(server.port, 0) as learner,
    ):
        assert server.log.wait("the checkpoint that is there will be replaced")
        train(start(learner), 2)
        learner.finish()
        learner.close()
        assert server.wait() == 0
    assert facts_of(path).step == 2


@pytest.mark.parametrize("blob", [b"a data set, or a damaged checkpoint", b"\xff" * 100])
@pytest.mark.parametrize("more", [(), AUTO])
def test_what_cannot_be_read_is_not_replaced(tmp_path, blob, more):
    """It may be somebody's only copy of something, also of this run."""
    path = write(tmp_path / "c", blob)
    status, text = refused(tmp_path, *flags(path, 8, *more))
    assert status == 4
    assert str(path) in text
    if not more:
        assert "cannot be read as a checkpoint" in text
        assert "written 3 hours ago" in text
        assert "--overwrite" in text
    assert path.read_bytes() == blob


@pytest.mark.parametrize("blob", [b"", 0])
def test_what_holds_no_step_is_replaced(tmp_path, undisturbed, blob):
    """An empty file, as mktemp makes it, and version 0 of a run that came no further."""
    path = write(tmp_path / "c", undisturbed[0] if blob == 0 else blob)
    with (
        ServerProcess(tmp_path, *flags(path, 1), steps=2) as server,
        ScriptedLearner(server.port, 0) as learner,
    ):
        answer(learner, start(learner).pull(1))
        learner.pull(2)
    assert facts_of(path).step == 1


def test_a_budget_of_a_run_that_is_there_is_refused_like_any_other(tmp_path, undisturbed):
    path = write(tmp_path / "c", undisturbed[4])
    status, text = refused(tmp_path, *flags(path, 8, "--learner-budget-steps", "9"))
    assert (status, "--overwrite begins anew" in text) == (4, True)


def persistence(path, files: Files, **more) -> Persistence:
    config = Config(learners=2, total_steps=9, checkpoint_path=str(path), checkpoint_retries=0,
                    **more)
    return Persistence(config, Log("error", "json", lambda line: None), files)


class Unseen(Files):
    """A file system that does not say what is there."""

    def __init__(self, number: int):
        self.number = number

    def status(self, file):
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES, errno.ETIMEDOUT])
@pytest.mark.parametrize("resume", [False, "auto"])
def test_nothing_begins_where_nobody_can_say_what_is_there(tmp_path, undisturbed, number, resume):
    path = write(tmp_path / "c", undisturbed[4])
    with pytest.raises(CheckpointError, match=f"c cannot be read: {os.strerror(number)}"):
        persistence(path, Unseen(number), resume=resume)
    persistence(path, Files(), resume="auto").close()  # and the path is free again
    assert path.read_bytes() == undisturbed[4]


def test_a_second_name_alone_may_be_the_only_copy(tmp_path, undisturbed):
    old = write(tmp_path / "c.old.tmp", undisturbed[4])
    with pytest.raises(CheckpointError, match="may be its only copy: rename it to"):
        persistence(tmp_path / "c", Files(), resume="auto")
    assert names_in(tmp_path) == {"c.old.tmp"}
    old.rename(tmp_path / "c")
    with_it = persistence(tmp_path / "c", Files(), resume="auto")
    assert with_it.resumption.file_step == 4
    with_it.close()


def test_a_directory_that_is_away_at_a_start_is_waited_for_by_another_start(tmp_path, undisturbed):
    """Status 5: whatever starts servers again goes on doing so until it is back."""
    home = tmp_path / "home"
    home.mkdir()
    path = write(home / "c", undisturbed[4])
    home.rename(tmp_path / "away")
    status, text = refused(tmp_path, *flags(path, 8, *AUTO))
    assert status == 5
    assert f"the directory of {path} cannot be read: No such file or directory" in text
    (tmp_path / "away").rename(home)
    with ServerProcess(tmp_path, *flags(path, 8, *AUTO), steps=20) as server:
        server.log.wait("resumed from checkpoint", step=4)


# ------------------------------------------------------------------------------ a finished run
def finished(path, *more: str) -> tuple[str, ...]:
    return flags(path, 1, *AUTO, "--mark-final-checkpoint", "--final-state",
                 str(path.with_name("s")), *more)


def test_a_finished_run_that_is_started_again_ends_well(tmp_path, undisturbed):
    """Nobody comes. Its process may have died before marker and final state were written."""
    path = write(tmp_path / "c", undisturbed[STEPS])
    with ServerProcess(tmp_path, *finished(path, "--linger-s", "0"), learners=2, steps=STEPS,
                       wait=False) as server:
        assert server.wait() == 0, server.log.text()
        assert server.log.find("training was complete after 9 outer steps", status=0)
    assert cut_in(path.read_bytes()) == cut_in(undisturbed[STEPS])
    assert (tmp_path / "c.final").read_text() == f"YETO_FINAL_V1\nglobal_step={STEPS}\n"
    assert (tmp_path / "s").stat().st_size == 4 + sum(8 + 4 * n for n in facts_of(path).numels)


def test_a_finished_run_serves_who_was_cut_off(tmp_path, undisturbed):
    """Each of them as it comes, whatever the roster; then it ends by itself."""
    path = write(tmp_path / "c", undisturbed[STEPS])
    strict = ("--max-base-lag", "0", "--grace-ms", "0", "--quorum", "2")
    with ServerProcess(tmp_path, *finished(path, *strict), learners=2, steps=STEPS) as server:
        server.log.wait("training is complete: whoever asks is given the final parameters")
        assert facts_of(path).ledger.keys() == {0}
        for learner_id in (1, 0):
            with ScriptedLearner(server.port, learner_id) as learner:
                manifest = learner.take_cut()
                assert manifest.step == STEPS
                learner.until(Msg.SHUTDOWN)
                learner.close()
        assert server.wait() == 0
    assert cut_in(path.read_bytes()) == cut_in(undisturbed[STEPS])


def test_more_steps_than_the_marker_says_are_done(tmp_path, undisturbed):
    """`--total-steps` was raised: the run is not over, whatever the marker says."""
    path = write(tmp_path / "c", undisturbed[4])
    (tmp_path / "c.final").write_bytes(b"YETO_FINAL_V1\nglobal_step=4\n")
    with (
        ServerProcess(tmp_path, *finished(path), steps=5) as server,
        ScriptedLearner(server.port, 0) as learner,
    ):
        answer(learner, learner.pull(5))
        learner.finish()
        learner.close()
        assert server.wait() == 0
    assert (tmp_path / "c.final").read_bytes() == b"YETO_FINAL_V1\nglobal_step=5\n"
