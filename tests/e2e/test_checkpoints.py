"""Checkpoints of whole runs: what is on disk when, resumed bits, refusals and exit statuses."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import struct
import threading

import numpy as np
import pytest

from syncer.checkpoint.facts import Cut
from syncer.checkpoint.files import Files
from syncer.checkpoint.reader import Checkpoint
from syncer.checkpoint.writer import write_checkpoint
from syncer.config import Config
from syncer.core import events
from syncer.errors import ConfigError
from syncer.layout import AVG, FragmentLayout, Layout
from syncer.protocol import Msg
from syncer.server.service import Server
from syncer.wire import messages
from tests.checkpoint.cuts import Faulty, names_in, version_of
from tests.e2e.scripted import (
    MIXED,
    PATIENCE_S,
    ScriptedLearner,
    ServerProcess,
    ServerThread,
    wait_until,
)
from tests.e2e.tape import records as tape_records

STEPS = 9
INIT = [np.linspace(-1, 1, f.numel, dtype=np.float32) for f in MIXED.fragments]


def delta(learner: int, step: int) -> np.ndarray:
    """The same delta for the same step, whoever asks and when."""
    numel = MIXED.fragments[(step - 1) % len(MIXED.fragments)].numel
    return np.random.default_rng([learner, step]).standard_normal(numel).astype(np.float32)


def answer(learner: ScriptedLearner, pull: messages.Pull) -> None:
    learner.push(pull, delta(learner.learner, pull.step), local_step=pull.step,
                 c_steps=1 + learner.learner, c_tokens=100 + pull.step)


def train(learner: ScriptedLearner, steps: int) -> None:
    """Answer the pulls of the next steps."""
    for _ in range(steps):
        answer(learner, learner.pull())


def start(learner: ScriptedLearner) -> ScriptedLearner:
    learner.send_init(INIT)
    return learner


def facts_of(path):
    with Checkpoint(path) as checkpoint:
        checkpoint.load()
        return checkpoint.facts


def flags(path, every: int, *more: str) -> tuple[str, ...]:
    return ("--checkpoint-path", str(path), "--checkpoint-every", str(every), "--pipeline", "1",
            *more)


@pytest.fixture(scope="module")
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
    return {step: (directory / f"c.step-{step}").read_bytes() for step in range(STEPS + 1)}


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
            assert path.read_bytes()[4096:] == undisturbed[step - 1][4096:]
            answer(learner, pull)
        learner.take_cut()
        assert facts_of(path).step == 4
        learner.until(Msg.SHUTDOWN)
        learner.close()
        assert server.wait() == 0
        assert len(server.log.find("checkpoint committed")) == 4
        assert server.log.find("checkpoint written", step=4, kind="final")
    records = tape_records(tape)
    events = [(r["event"], r["step"], r.get("kind")) for r in records if "event" in r]
    assert events == [("checkpoint", 0, "round"), ("init", 0, None), ("checkpoint", 1, "round"),
                      ("checkpoint", 2, "round"), ("checkpoint", 3, "round"),
                      ("checkpoint", 4, "final")]
    assert names_in(tmp_path) == {"c", "tape", server.log_path.name}


@pytest.mark.parametrize("background", [False, True])
def test_periodic_and_final_checkpoints(tmp_path, undisturbed, background):
    """Every 3 of 8: after 3 and 6 and at the end, with the bytes that a run of every step has."""
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
    assert names_in(tmp_path) == {"c", "c.step-3", "c.step-6", "c.step-8", server.log_path.name}
    for step in (3, 6, 8):
        assert (tmp_path / f"c.step-{step}").read_bytes()[4096:] == undisturbed[step][4096:]


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
    """The real file system; from the second checkpoint on, creating it waits for the test."""

    def __init__(self):
        self.reached = threading.Event()
        self.go_on = threading.Event()
        self.failing: OSError | None = None

    def create(self, path, *, direct=False):
        self.reached.set()
        assert self.go_on.wait(PATIENCE_S)
        if self.failing is not None:
            raise self.failing
        return super().create(path, direct=direct)


def test_a_slow_background_write_holds_nothing_up_but_the_next_save(tmp_path):
    """Rounds go on; the next save waits; the file is that of its step, bit for bit."""
    path = tmp_path / "c"
    files = Held()
    with (
        ServerThread(tmp_path, total_steps=12, pipeline=1, checkpoint_path=str(path),
                     checkpoint_every=4, checkpoint_keep=9, background_checkpoint=True,
                     files=files) as server,
        ScriptedLearner(server.port, 0) as learner,
    ):
        start(learner)
        train(learner, 4)
        assert files.reached.wait(PATIENCE_S)
        train(learner, 3)  # steps 5 to 7 commit while the cut of 4 is being written
        learner.pull(8)
        assert learner.versions == {0: 7, 1: 5, 2: 6}
        assert not path.exists()
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
        wanted = list(range(4, 13, 4))
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
    for step in (4, 8, 12):
        assert (tmp_path / f"c.step-{step}").read_bytes() == (alone / f"c.step-{step}").read_bytes()


def test_a_failed_background_write_ends_the_run_at_the_next_wait(tmp_path):
    path = tmp_path / "c"
    path.write_bytes(b"the old file")
    files = Held()
    files.go_on.set()
    files.failing = OSError(30, "Read-only file system")
    with (
        ServerThread(tmp_path, total_steps=9, pipeline=1, checkpoint_path=str(path),
                     checkpoint_every=2, background_checkpoint=True, files=files) as server,
        ScriptedLearner(server.port, 0) as learner,
    ):
        start(learner)
        train(learner, 3)
        server.log.wait("background checkpoint failed", step=2)
        answer(learner, learner.pull(4))
        assert server.wait() == 5
        assert server.log.find("periodic checkpoint of step 2 was not written")
    assert path.read_bytes() == b"the old file"
    assert names_in(tmp_path) == {"c", server.log_path.name}


@pytest.mark.parametrize("failing", [0, 2])
def test_a_step_that_cannot_be_written_is_never_seen(tmp_path, failing):
    """Nothing is broadcast, the old file is there, exit 5."""
    path = tmp_path / "c"

    class Failing(Files):
        saves = 0

        def sync(self, descriptor):
            self.saves += 1
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
    assert names_in(tmp_path) - {server.log_path.name} == ({"c"} if failing else set())
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
    assert names_in(tmp_path) == {"c", server.log_path.name}, "not marked as final"
    assert path.read_bytes()[4096:] == undisturbed[5][4096:]
    assert facts_of(path).step == 5


# ------------------------------------------------------------------------------------ resuming
@pytest.mark.parametrize("form", ["safetensors", "yeto-v3"])
def test_a_resumed_run_ends_with_the_bytes_of_an_undisturbed_one(tmp_path, undisturbed, form):
    path = tmp_path / "c"
    path.write_bytes(undisturbed[4])
    if form == "yeto-v3":
        with Checkpoint(path) as checkpoint:
            fragments = [version_of(f.version, f.params, f.state) for f in checkpoint.load()]
            write_checkpoint(path, Cut(checkpoint.facts, fragments), form)
    tape = tmp_path / "tape"
    with (
        ServerProcess(tmp_path, *flags(path, 1, "--resume", "--event-tape", str(tape),
                                       "--checkpoint-keep", "99"), steps=STEPS) as server,
        ScriptedLearner(server.port, 0) as learner,
    ):
        assert server.log.wait("resumed from checkpoint", step=4)
        start(learner)  # a learner always sends what it has: it is too late for that
        learner.pull(5)
        assert learner.versions == {0: 4, 1: 2, 2: 3}
        answer(learner, messages.Pull(1, 5, 1))
        train(learner, STEPS - 5)
        learner.finish()
        learner.close()
        assert server.wait() == 0
    assert path.read_bytes() == undisturbed[STEPS]
    for step in range(5, STEPS):
        assert (tmp_path / f"c.step-{step}").read_bytes() == undisturbed[step]
    assert not (tmp_path / "c.step-4").exists()
    first = tape_records(tape)[0]
    assert first == {"event": "resume", "step": 4, "fragments": 3, "learners": [0]}


def test_late_joiners_after_a_resume(tmp_path, undisturbed):
    """Round 5 is launched to learner 0 alone, which stays silent; learner 1 comes, and is asked."""
    path = tmp_path / "c"
    path.write_bytes(undisturbed[4])
    with (
        ServerProcess(tmp_path, *flags(path, 8, "--resume", "--grace-ms", "50"), learners=2,
                      steps=6) as server,
        ScriptedLearner(server.port, 0) as first,
    ):
        first.pull(5)
        with ScriptedLearner(server.port, 1) as second:
            answer(second, second.pull(5))
            server.log.wait("late joiner pulled into open round", learner=1, step=5)
            assert server.log.wait("outer step", step=5)["responders"] == 1
            for learner in (first, second):
                answer(learner, learner.pull(6))
            for learner in (first, second):
                learner.take_cut()
            for learner in (first, second):
                learner.until(Msg.SHUTDOWN)
                learner.close()
        assert server.wait() == 0


def test_the_marker_of_a_finished_run(tmp_path, undisturbed):
    path, marker = tmp_path / "c", tmp_path / "c.final"
    path.write_bytes(undisturbed[4])
    marker.write_bytes(b"YETO_FINAL_V1\nglobal_step=4\n")
    for total, done in ((6, False), (6, True)):
        with (
            ServerProcess(tmp_path, *flags(path, 8, "--resume", "--mark-final-checkpoint"),
                          steps=total) as server,
            ScriptedLearner(server.port, 0) as learner,
        ):
            assert marker.exists() == done, "a run that does more steps takes the marker away"
            train(learner, 0 if done else 2)
            learner.finish()
            learner.close()
            assert server.wait() == 0
        assert marker.read_bytes() == b"YETO_FINAL_V1\nglobal_step=6\n"


def test_the_final_state_next_to_it(tmp_path):
    with (
        ServerProcess(tmp_path, *flags(tmp_path / "c", 8, "--final-state", str(tmp_path / "s")),
                      steps=2) as server,
        ScriptedLearner(server.port, 0) as learner,
    ):
        train(start(learner), 2)
        learner.finish()
        learner.close()
        assert server.wait() == 0
    with Checkpoint(tmp_path / "c") as checkpoint:
        parts = [struct.pack("<I", len(MIXED.fragments))]
        for fragment in checkpoint.load():
            parts += [struct.pack("<Q", fragment.params.size), fragment.params.tobytes()]
    assert (tmp_path / "s").read_bytes() == b"".join(parts)


# ------------------------------------------------------------------------------------ refusals
def refused(directory, *more: str, steps: int = 20, environment=None) -> tuple[int, str]:
    """Exit status and output of a server that must not start."""
    server = ServerProcess(directory, *more, steps=steps, wait=False, environment=environment)
    with server:
        status = server.wait()
    assert "syncer listening" not in server.log.text()
    return status, server.log.text()


def changed_header(blob: bytes, step: int) -> bytes:
    """A good file that says it is of another step."""
    from tests.checkpoint.test_hostile import packed  # noqa: PLC0415
    length = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + length])
    header["__metadata__"]["global_step"] = str(step)
    return packed(header, blob[8 + length :])


@pytest.mark.parametrize(("case", "more", "words"), [
    ("good", ("--outer-optimizer", "sgd"), ("expected sgd", "found nesterov")),
    ("good", ("--outer-optimizer", "delayed-nesterov"), ("expected delayed-nesterov",)),
    ("good", ("--outer-lr", "0.5"), ("expected lr 0.5, found 0.7", "--outer-lr 0.7")),
    ("good", ("--outer-momentum", "0.5"), ("expected momentum 0.5, found 0.9",)),
    ("good", ("--expected-island-contract", "ab" * 32), ("session contract: expected", "found")),
    ("missing", (), ("cannot be read: no such file",)),
    ("directory", (), ("cannot be read: it is no regular file",)),
    ("no directory", ("--checkpoint-path", "nowhere/c"), ("nowhere/c cannot be read",)),
    ("broken", (), ("header length at offset 0",)),
    ("flipped", (), ("expected SHA-256", "fragments.2.momentum")),
    ("other version", (), ("format_version: expected '1', found '9'",)),
    ("two cuts", (), ("fragment 1 has version 2, expected 5",)),
])
def test_what_cannot_be_resumed_ends_with_status_4(tmp_path, undisturbed, case, more, words):
    path = tmp_path / "c"
    blob = undisturbed[4]
    match case:
        case "directory":
            path.mkdir()
        case "broken":
            path.write_bytes(b"\xff" * 100)
        case "flipped":
            path.write_bytes(blob[:-1] + bytes([blob[-1] ^ 1]))
        case "other version":
            path.write_bytes(blob.replace(b'"format_version":"1"', b'"format_version":"9"'))
        case "two cuts":
            path.write_bytes(changed_header(blob, 5))
        case "good":
            path.write_bytes(blob)
    before = path.read_bytes() if path.is_file() else None
    status, text = refused(tmp_path, *flags(path, 8, "--resume", *more))
    assert status == 4, text
    for word in words:
        assert word in text
    assert (path.read_bytes() if path.is_file() else None) == before
    assert {"c.lock", "c.tmp"}.isdisjoint(names_in(tmp_path))


def test_resume_without_a_path_and_past_the_end(tmp_path, undisturbed):
    status, text = refused(tmp_path, "--resume")
    assert (status, "--checkpoint-path" in text) == (4, True)
    (tmp_path / "c").write_bytes(undisturbed[9])
    status, text = refused(tmp_path, *flags(tmp_path / "c", 8, "--resume"), steps=8)
    assert status == 4
    assert "expected at most --total-steps 8, found 9" in text


def test_no_verify_skips_the_digests(tmp_path, undisturbed):
    path = tmp_path / "c"
    path.write_bytes(undisturbed[4][:-1] + bytes([undisturbed[4][-1] ^ 1]))
    with ServerProcess(tmp_path, *flags(path, 8, "--resume", "--no-verify"), steps=20) as server:
        server.log.wait("resumed from checkpoint", step=4)


def test_two_servers_never_share_a_checkpoint(tmp_path):
    path = tmp_path / "c"
    with ServerProcess(tmp_path, *flags(path, 8)) as first:
        status, text = refused(tmp_path, *flags(path, 8))
        assert status == 2
        assert f"in use by process {first.process.pid}," in text
    with ServerProcess(tmp_path, *flags(path, 8)):
        pass


@pytest.mark.parametrize("change", ["fingerprint", "contract", "sizes", "layout", "count"])
def test_a_learner_of_another_session_is_refused_and_nothing_else(tmp_path, undisturbed, change):
    path = tmp_path / "c"
    path.write_bytes(undisturbed[4])
    layouts = {
        "sizes": Layout((*MIXED.fragments[:2], FragmentLayout(1, (6,)))),
        "layout": Layout((FragmentLayout(AVG, (8,)), *MIXED.fragments[1:])),
        "count": Layout(MIXED.fragments[:2]),
    }
    options = {"fingerprint": dict(fingerprint=b"\x99" * 32, contract=b"\x11" * 32),
               "contract": dict(contract=b"\x99" * 32)}.get(change, {})
    layout = layouts.get(change, MIXED)
    with ServerProcess(tmp_path, *flags(path, 8, "--resume"), steps=5) as server:
        with ScriptedLearner(server.port, 0, layout, **options) as other:
            text = other.until(str)
            assert text.startswith("session mismatch: expected ")
            assert "; got " in text
        with ScriptedLearner(server.port, 0) as learner:
            answer(learner, learner.pull(5))
            learner.finish()
            learner.close()
        assert server.wait() == 0


def test_in_a_strict_run_such_a_learner_ends_it(tmp_path, undisturbed):
    """Before the start only, with a record on the tape and status 4; the file is untouched."""
    path, tape = tmp_path / "c", tmp_path / "tape"
    path.write_bytes(undisturbed[4])
    with ServerProcess(tmp_path, *flags(path, 1, "--resume", "--max-base-lag", "0", "--event-tape",
                                        str(tape)), steps=9) as server:
        with ScriptedLearner(server.port, 0, contract=b"\x99" * 32) as other:
            assert other.until(str).startswith("session mismatch")
        assert server.wait() == 4
    record = tape_records(tape)[-1]
    assert record["event"] == "rl_strict_failure"
    assert record["metric"] == "layout_hash_mismatch"
    assert path.read_bytes() == undisturbed[4]


def test_a_failed_start_gives_the_path_back(tmp_path):
    """Bound by somebody else: no lock is left, in this process either."""
    config = Config(learners=1, total_steps=1, checkpoint_path=str(tmp_path / "c"), port=0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = dataclasses.replace(config, port=taken.getsockname()[1])
        with pytest.raises(Exception, match="in use"):
            Server(busy)
    assert not names_in(tmp_path)
    tape = dataclasses.replace(config, event_tape=str(tmp_path))
    with pytest.raises(ConfigError):
        Server(tape)
    assert not names_in(tmp_path)
    assert not os.path.exists(f"{config.checkpoint_path}.lock")


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
        # from the call of the save of version 0 on that is the first one of step 1
        files.fail_at = files.counted + {"write": 2}.get(call, 1)
        start(learner)
        train(learner, 1)
        learner.ended()
        assert set(learner.versions.values()) == {0}
        assert server.wait() == 5
        (line,) = server.log.find("checkpoint (round) of step 1 could not be written", status=5)
        assert "Input/output error; the file that was there is unchanged" in line["message"]
    assert names_in(tmp_path) == {"c", server.log_path.name}
    assert facts_of(path).step == 0
