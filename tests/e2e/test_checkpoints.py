"""Checkpoints of whole runs: what is on disk when, and what a failing disk does."""

from __future__ import annotations

import signal
import threading

import pytest

from syncer.checkpoint.atomic import WriteError
from syncer.checkpoint.files import Files
from syncer.checkpoint.reader import Checkpoint
from syncer.core import events
from syncer.protocol import Msg
from syncer.wire import messages
from tests.checkpoint.cuts import Faulty, names_in
from tests.e2e.checkpointed import (
    answer,
    cut_in,
    facts_of,
    flags,
    start,
    train,
)
from tests.e2e.scripted import (
    MIXED,
    PATIENCE_S,
    ScriptedLearner,
    ServerProcess,
    ServerThread,
    wait_until,
)
from tests.e2e.tape import records as tape_records


# ------------------------------------------------------------------------------ what is written
def test_every_step_is_on_disk_before_its_broadcast(tmp_path, undisturbed):
    path, tape = tmp_path / "c", tmp_path / "tape"
    with (
        ServerProcess(tmp_path, *flags(path, 1, "--event-tape", str(tape)), steps=4) as server,
        ScriptedLearner(server.port, 0) as learner,
    ):
        start(learner)
        for step in range(1, 5):
            pull = learner.pull(step)  # behind the broadcast of the step before
            assert facts_of(path).step == step - 1
            assert cut_in(path.read_bytes())[1] == cut_in(undisturbed[step - 1])[1]
            answer(learner, pull)
        learner.take_cut()
        assert facts_of(path).step == 4
        learner.until(Msg.SHUTDOWN)
        learner.close()
        assert server.wait() == 0
        assert len(server.log.find("checkpoint committed")) == 4
        assert server.log.find("checkpoint written", step=4, kind="final")
    records = tape_records(tape)
    assert not [r for r in records if "step" in r and r.get("event") in ("checkpoint", "resume")]
    events = [(r["event"], r.get("step", r.get("at_step")), r.get("kind"))
              for r in records if "event" in r]
    assert events == [("checkpoint", 0, "round"), ("init", 0, None), ("checkpoint", 1, "round"),
                      ("checkpoint", 2, "round"), ("checkpoint", 3, "round"),
                      ("checkpoint", 4, "final")]
    assert names_in(tmp_path) == {"c", "c.epoch", "tape", server.log_path.name}


@pytest.mark.parametrize("background", [False, True])
def test_periodic_and_final_checkpoints(tmp_path, undisturbed, background):
    """Every 3 of 8: version 0, after 3 and 6 and at the end, as a run of every step has them."""
    path = tmp_path / "c"
    more = ("--background-checkpoint",) if background else ()
    with (
        ServerProcess(tmp_path, *flags(path, 3, "--checkpoint-keep", "99", *more),
                      steps=8) as server,
        ScriptedLearner(server.port, 0) as learner,
    ):
        train(start(learner), 8)
        learner.finish()
        learner.close()
        assert server.wait() == 0
    assert names_in(tmp_path) == {"c", "c.epoch", "c.step-0", "c.step-3", "c.step-6",
                                  server.log_path.name}
    for name, step in (("c.step-0", 0), ("c.step-3", 3), ("c.step-6", 6), ("c", 8)):
        assert cut_in((tmp_path / name).read_bytes())[1] == cut_in(undisturbed[step])[1]


def test_yeto_files_of_a_run(tmp_path, undisturbed):
    path = tmp_path / "c"
    with (
        ServerProcess(tmp_path, *flags(path, 1, "--checkpoint-format", "yeto-v3"),
                      steps=4) as server,
        ScriptedLearner(server.port, 0) as learner,
    ):
        train(start(learner), 4)
        learner.finish()
        learner.close()
        assert server.wait() == 0
    other = tmp_path / "other"
    other.write_bytes(undisturbed[4])
    with Checkpoint(path) as yeto, Checkpoint(other) as whole:
        assert yeto.format == "yeto-v3"
        for ours, expected in zip(yeto.load(), whole.load(), strict=True):
            assert ours.params.tobytes() == expected.params.tobytes()
            assert ours.state["momentum"].tobytes() == expected.state["momentum"].tobytes()
        assert yeto.facts.ledger == whole.facts.ledger


class Held(Files):
    """The real file system; creating a file waits for the test."""

    def __init__(self):
        self.reached = threading.Event()
        self.go_on = threading.Event()
        self.failing: OSError | None = None
        self.is_first = True

    def create(self, path, *, direct=False):
        if self.is_first:
            self.is_first = False
            return super().create(path, direct=direct)
        self.reached.set()
        assert self.go_on.wait(PATIENCE_S)
        if self.failing is not None:
            raise self.failing
        return super().create(path, direct=direct)


def test_a_slow_background_write_holds_nothing_up_but_the_next_save(tmp_path):
    """Rounds go on; the next save waits; the file is that of its step, bit for bit."""
    path = tmp_path / "c"
    files = Held()
    files.go_on.set()
    with (
        ServerThread(tmp_path, total_steps=12, pipeline=1, checkpoint_path=str(path),
                     checkpoint_every=4, checkpoint_keep=9, background_checkpoint=True,
                     files=files) as server,
        ScriptedLearner(server.port, 0) as learner,
    ):
        start(learner)
        pull = learner.pull(1)  # version 0 is written
        files.reached.clear()
        files.go_on.clear()
        answer(learner, pull)
        train(learner, 3)
        assert files.reached.wait(PATIENCE_S)
        train(learner, 3)  # steps 5 to 7 commit while the cut of 4 is being written
        learner.pull(8)
        assert learner.versions == {0: 7, 1: 5, 2: 6}
        assert facts_of(path).step == 0
        store = server.server.session.merging.store
        # three commits, each pins at most the pair of one fragment it replaced
        assert store.live_buffers <= 2 * (len(MIXED.fragments) + 3)
        learner.seen.clear()
        answer(learner, messages.Pull(1, 8, 1))
        pull = learner.pull(9)  # step 8 is out; its save waits for the one of step 4
        answer(learner, pull)
        wait_until(lambda: any(isinstance(event, events.MergeDone) and event.step == 9
                               for event in list(server.witness.events)), "the merge of step 9")
        assert server.witness.scheduler.global_step == 8
        files.go_on.set()
        train(learner, 3)
        learner.finish()
        learner.close()
        assert server.wait() == 0
        wanted = list(range(0, 13, 4))
        assert [line["step"] for line in server.log.find("checkpoint written")] == wanted
    alone = tmp_path / "alone"
    alone.mkdir()
    with (
        ServerThread(alone, total_steps=12, pipeline=1, checkpoint_path=str(alone / "c"),
                     checkpoint_every=4, checkpoint_keep=9) as server,
        ScriptedLearner(server.port, 0) as learner,
    ):
        train(start(learner), 12)
        learner.finish()
        learner.close()
        assert server.wait() == 0
    for name in ("c.step-4", "c.step-8", "c"):
        assert cut_in((tmp_path / name).read_bytes()) == cut_in((alone / name).read_bytes())


@pytest.mark.parametrize("call", ["sync", "sync_directory", "write", "close", "free_bytes"])
@pytest.mark.parametrize("background", [False, True])
def test_one_passing_error_ends_no_run(tmp_path, background, call):
    """Of a periodic save, whether rounds wait for it or not."""
    path, files = tmp_path / "c", Faulty(only=call)
    with (
        ServerThread(tmp_path, total_steps=7, pipeline=1, checkpoint_path=str(path),
                     checkpoint_every=3, background_checkpoint=background, files=files) as server,
        ScriptedLearner(server.port, 0) as learner,
    ):
        server.log.wait("learner connected")  # the space has been looked at for the run
        files.fail_at = files.counted
        train(start(learner), 7)
        learner.finish()
        learner.close()
        assert server.wait() == 0
        (line,) = server.log.find("checkpoint write tried again", call=call)
        assert line["level"] == "warning"
    assert facts_of(path).step == 7
    assert names_in(tmp_path) == {"c", "c.epoch", server.log_path.name}


@pytest.mark.parametrize("call", ["sync", "sync_directory", "write", "close", "free_bytes"])
@pytest.mark.parametrize("retries", [0, 1])
def test_the_final_state_is_tried_again(tmp_path, call, retries):
    path, files = tmp_path / "final", Faulty(only=call)
    with (
        ServerThread(tmp_path, total_steps=2, pipeline=1, final_state=str(path),
                     checkpoint_retries=retries, files=files) as server,
        ScriptedLearner(server.port, 0) as learner,
    ):
        server.log.wait("learner connected")
        files.fail_at = files.counted
        train(start(learner), 2)
        learner.finish()
        learner.close()
        assert server.wait() == (0 if retries else 1)
        assert len(server.log.find("final state write tried again", call=call)) == retries
    assert path.exists() == bool(retries)
    assert names_in(tmp_path) == {server.log_path.name} | ({"final"} if retries else set())


class Full(Files):
    """A disk that has room for headers alone."""

    def free_bytes(self, path):
        return 8


def test_space_that_is_not_there_is_missed_at_the_start(tmp_path):
    """As soon as the sizes are known: by the first HELLO, or by the file that is resumed from."""
    path = tmp_path / "c"
    settings = dict(total_steps=9, pipeline=1, checkpoint_path=str(path), checkpoint_every=8)
    with (
        ServerThread(tmp_path, files=Full(), **settings) as server,
        ScriptedLearner(server.port, 0),
    ):
        assert server.wait() == 5
        assert f"{path} needs " in server.log.text()
    with (
        ServerThread(tmp_path, **settings) as server,
        ScriptedLearner(server.port, 0) as learner,
    ):
        start(learner)
        train(learner, 8)
        learner.pull(9)
        server.server.stop()
    before = path.read_bytes()
    with pytest.raises(WriteError, match="has 8 bytes free"):
        ServerThread(tmp_path, files=Full(), resume=True, **settings)
    assert path.read_bytes() == before


def test_leftovers_of_a_killed_server_go_at_the_start(tmp_path):
    """Whatever the next save is, and when: their space may be all that is missing."""
    path = tmp_path / "c"
    for name in ("c.tmp", "c.step-4.tmp", "c.step.tmp"):
        (tmp_path / name).write_bytes(b"half")
    with ServerThread(tmp_path, checkpoint_path=str(path), checkpoint_every=8) as server:
        assert names_in(tmp_path) == {"c.lock", server.log_path.name}


def test_a_failed_background_write_ends_the_run_at_the_next_wait(tmp_path):
    path = tmp_path / "c"
    files = Held()
    files.go_on.set()
    with (
        ServerThread(tmp_path, total_steps=9, pipeline=1, checkpoint_path=str(path),
                     checkpoint_every=2, background_checkpoint=True,
                     on_checkpoint_error="stop", files=files) as server,
        ScriptedLearner(server.port, 0) as learner,
    ):
        start(learner)
        pull = learner.pull(1)
        files.failing = OSError(30, "Read-only file system")
        answer(learner, pull)
        train(learner, 2)
        server.log.wait("background checkpoint failed", step=2)
        answer(learner, learner.pull(4))
        assert server.wait() == 5
        assert server.log.find("periodic checkpoint of step 2 was not written")
    assert facts_of(path).step == 0
    assert names_in(tmp_path) == {"c", "c.epoch", server.log_path.name}


@pytest.mark.parametrize("failing", [0, 2])
def test_a_step_that_cannot_be_written_is_never_seen(tmp_path, failing):
    """Nothing is broadcast, the old file is there, exit 5."""
    path = tmp_path / "c"

    class Failing(Files):
        saves = 0

        def create(self, path, *, direct=False):
            self.saves += path.endswith("/c.tmp")
            return super().create(path, direct=direct)

        def sync(self, descriptor):
            if self.saves > failing:
                raise OSError(5, "Input/output error")
            super().sync(descriptor)

    with (
        ServerThread(tmp_path, total_steps=9, pipeline=1, checkpoint_path=str(path),
                     checkpoint_every=1, checkpoint_retries=2, files=Failing()) as server,
        ScriptedLearner(server.port, 0) as learner,
    ):
        start(learner)
        if failing:
            train(learner, failing)
        learner.ended()
        assert server.wait() == 5
        assert max(learner.versions.values(), default=-1) == failing - 1
        assert server.log.find("Input/output error", status=5)
        assert len(server.log.find("checkpoint write tried again")) == 2
    assert names_in(tmp_path) - {server.log_path.name} == (
        {"c", "c.epoch"} if failing else set())
    if failing:
        assert facts_of(path).step == failing - 1


def test_the_last_cut_is_saved_on_a_signal(tmp_path, undisturbed):
    path = tmp_path / "c"
    with (
        ServerProcess(tmp_path, *flags(path, 50, "--mark-final-checkpoint"), steps=99) as server,
        ScriptedLearner(server.port, 0) as learner,
    ):
        train(start(learner), 5)
        learner.pull(6)
        server.signal(signal.SIGTERM)
        assert server.wait() == 128 + signal.SIGTERM
    assert names_in(tmp_path) == {"c", "c.epoch", server.log_path.name}, "not marked as final"
    assert cut_in(path.read_bytes())[1] == cut_in(undisturbed[5])[1]
    assert facts_of(path).step == 5


@pytest.mark.parametrize("call", ["free_bytes", "create", "write", "sync", "close", "link",
                                  "rename", "sync_directory"])
def test_a_fault_at_any_call_of_a_save_ends_the_run_with_status_5(tmp_path, call):
    """Version 0 is written; step 1 fails at one call and is never seen; the file is that of 0."""
    path = tmp_path / "c"
    files = Faulty(only=call, times=99)
    with (
        ServerThread(tmp_path, total_steps=9, pipeline=1, checkpoint_path=str(path),
                     checkpoint_every=1, checkpoint_retries=0, files=files) as server,
        ScriptedLearner(server.port, 0) as learner,
    ):
        server.log.wait("learner connected")  # the space has been looked at for the run
        # behind the calls of the save of version 0, and of the file beside it, is the first one of
        # step 1
        files.fail_at = files.counted + {"write": 3}.get(call, 2)
        start(learner)
        train(learner, 1)
        learner.ended()
        assert set(learner.versions.values()) == {0}
        assert server.wait() == 5
        (line,) = server.log.find("checkpoint (round) of step 1 could not be written", status=5)
        assert "Input/output error; the file that was there is unchanged" in line["message"]
    assert names_in(tmp_path) == {"c", "c.epoch", server.log_path.name}
    assert facts_of(path).step == 0


def test_version_0_is_on_disk_before_the_first_broadcast_of_every_run(tmp_path, undisturbed):
    """A server killed before its first periodic file is resumed, whoever gave the values."""
    path = tmp_path / "c"
    line = flags(path, 50, "--resume", "auto")
    with (
        ServerProcess(tmp_path, *line, steps=9) as server,
        ScriptedLearner(server.port, 0) as learner,
    ):
        start(learner).pull(1)
        assert facts_of(path).step == 0
        assert cut_in(path.read_bytes())[1] == cut_in(undisturbed[0])[1]
        server.signal(signal.SIGKILL)
        server.wait()
    with (
        ServerProcess(tmp_path, *line, steps=9) as server,
        ScriptedLearner(server.port, 0) as again,
    ):
        server.log.wait("resumed from checkpoint")
        train(again, 9)  # which gives no initial values any more
        again.finish()
        again.close()
        assert server.wait() == 0


@pytest.mark.parametrize("background", [False, True])
def test_a_directory_that_is_away_for_a_while_ends_no_run(tmp_path, background):
    """Really moved away, over two checkpoints, and back: the third one is written."""
    home, away = tmp_path / "home", tmp_path / "away"
    home.mkdir()
    path, tape = home / "c", tmp_path / "tape"
    more = ("--background-checkpoint",) if background else ()
    with (
        ServerProcess(tmp_path, *flags(path, 2, "--event-tape", str(tape), "--checkpoint-keep", "9",
                                       *more), steps=11) as server,
        ScriptedLearner(server.port, 0) as learner,
    ):
        train(start(learner), 2)
        server.log.wait("checkpoint written", step=2)
        home.rename(away)
        for step in (4, 6):
            train(learner, 2)
            server.log.wait("checkpoint not written", step=step, level="error")
            server.log.wait("the run goes on without a checkpoint", step=step, on_disk=2)
        train(learner, 1)
        learner.pull(8)
        assert facts_of(away / "c").step == 2
        away.rename(home)
        answer(learner, messages.Pull(1, 8, 1))
        server.log.wait("checkpoint written", step=8)
        train(learner, 3)  # no step behind 10 before the run knows that 8 was written
        learner.finish()
        learner.close()
        assert server.wait() == 0
    assert facts_of(path).step == 11
    assert names_in(home) == {"c", "c.epoch", "c.step-0", "c.step-2", "c.step-8", "c.step-10"}
    counts = {record["step"]: record.get("failed_saves") for record in tape_records(tape)
              if "responders" in record}
    assert (counts[2], counts[5], counts[7], counts[11]) == (None, 1, 2, None)


def test_the_last_checkpoint_must_be_written(tmp_path):
    home, away = tmp_path / "home", tmp_path / "away"
    home.mkdir()
    with (
        ServerProcess(tmp_path, *flags(home / "c", 2), steps=5) as server,
        ScriptedLearner(server.port, 0) as learner,
    ):
        train(start(learner), 2)
        server.log.wait("checkpoint written", step=2)
        home.rename(away)
        train(learner, 3)
        learner.ended()
        assert server.wait() == 5
        assert server.log.find("checkpoint (final) of step 5 could not be written", status=5)
    assert facts_of(away / "c").step == 2


def test_a_run_that_is_told_to_stop_stops_at_the_first_failure(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    with (
        ServerProcess(tmp_path, *flags(home / "c", 2, "--on-checkpoint-error", "stop"),
                      steps=9) as server,
        ScriptedLearner(server.port, 0) as learner,
    ):
        answer(start(learner), learner.pull(1))
        learner.pull(2)
        home.rename(tmp_path / "away")
        answer(learner, messages.Pull(1, 2, 1))
        learner.ended()
        assert server.wait() == 5
