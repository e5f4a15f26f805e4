"""Runs from a checkpoint: resumed bits, refusals and exit statuses."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import struct

import numpy as np
import pytest

from syncer.checkpoint.facts import Cut
from syncer.checkpoint.reader import Checkpoint
from syncer.checkpoint.writer import write_checkpoint
from syncer.config import Config
from syncer.errors import ConfigError
from syncer.layout import AVG, FragmentLayout, Layout
from syncer.protocol import DTYPE_BF16, DTYPE_Q4, Msg
from syncer.server.service import Server
from syncer.wire import encode, messages
from tests.checkpoint.cuts import CONTRACT, FINGERPRINT, make_cut, names_in, version_of
from tests.e2e.checkpointed import (
    STEPS,
    answer,
    cut_in,
    flags,
    start,
    train,
)
from tests.e2e.scripted import (
    MIXED,
    ScriptedLearner,
    ServerProcess,
    layout_of,
)
from tests.e2e.tape import records as tape_records


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
        learner.holding({0: 4, 1: 2, 2: 3})
        answer(learner, messages.Pull(1, 5, 1))
        train(learner, STEPS - 5)
        learner.finish()
        learner.close()
        assert server.wait() == 0
    assert cut_in(path.read_bytes()) == cut_in(undisturbed[STEPS])
    for step in range(5, STEPS):
        assert cut_in((tmp_path / f"c.step-{step}").read_bytes()) == cut_in(undisturbed[step])
    assert (tmp_path / "c.step-4").exists(), "what was resumed from is the first of its past"
    first = tape_records(tape)[0]
    assert first == {"event": "resume", "at_step": 4, "fragments": 3, "learners": [0]}


@pytest.mark.parametrize("dtype", [DTYPE_BF16, DTYPE_Q4])
def test_values_that_bf16_cannot_carry_are_resumed_in_f32_only(tmp_path, dtype):
    """They would reach the learners as infinity. Who says so loses its connection, nobody else."""
    path, cut = tmp_path / "c", make_cut(3, layout=MIXED)
    cut.fragments[1].params[2] = -3.4e38
    write_checkpoint(path, cut)
    which = {"fingerprint": FINGERPRINT, "contract": CONTRACT}
    with (
        ServerProcess(tmp_path, *flags(path, 1, "--resume"), steps=4) as server,
        ScriptedLearner(server.port, 0, dtype=dtype, **which) as refused,
    ):
        assert refused.error() == (
            "invalid HELLO: fragment 1 of the checkpoint holds a parameter of -3.4e+38, which bf16 "
            "rounds to infinity: resume it with learners whose dtype is f32")
        with ScriptedLearner(server.port, 0, **which) as learner:
            answer(learner, learner.pull(4))
            learner.holding({0: 1, 1: 2, 2: 3})
            learner.finish()
        assert server.wait() == 0


def test_late_joiners_after_a_resume(tmp_path, undisturbed):
    """Round 5 is launched to learner 0 alone, which stays silent; learner 1 comes, and is asked."""
    path = tmp_path / "c"
    path.write_bytes(undisturbed[4])
    with (
        ServerProcess(tmp_path, *flags(path, 8, "--resume", "--renumber", "0", "--grace-ms", "50"),
                      learners=2, steps=6) as server,
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
            ServerProcess(tmp_path, *flags(path, 1, "--resume", "--mark-final-checkpoint"),
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
    header["__metadata__"]["lineage"] = json.dumps([["1" * 16, step]])
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
    with ServerProcess(tmp_path, *flags(path, 1, "--resume", "--no-verify"), steps=20) as server:
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
    with ServerProcess(tmp_path, *flags(path, 1, "--resume"), steps=5) as server:
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


@pytest.mark.parametrize(("refused", "text"), [
    ({"profile_hash": b"\x99" * 32}, "HELLO syncer semantic profile"),
    ({"learner": 9}, "invalid HELLO: learner_id 9"),
])
def test_what_no_run_would_take_does_not_end_a_strict_one(tmp_path, undisturbed, refused, text):
    """Its contract is another one as well, but that is not why it is refused."""
    path = tmp_path / "c"
    path.write_bytes(undisturbed[4])
    options = {"learner": 0, "contract": b"\x99" * 32} | refused
    with ServerProcess(tmp_path, *flags(path, 1, "--resume", "--max-base-lag", "0"),
                       steps=5) as server:
        with ScriptedLearner(server.port, **options) as other:
            assert other.error().startswith(text)
        with ScriptedLearner(server.port, 0) as learner:
            answer(learner, learner.pull(5))
            learner.finish()
            learner.close()
        assert server.wait() == 0


def test_a_large_layout_is_resumed_by_a_learner_that_does_not_wait(tmp_path):
    """Its HELLO is as long as it takes a worker to make the layout of; a heartbeat is behind it."""
    path, layout = tmp_path / "c", layout_of((1,) * 9000)
    values = np.ones(9000, np.float32)
    with ServerProcess(tmp_path, *flags(path, 1), steps=1) as server:
        with ScriptedLearner(server.port, 0, layout) as learner:
            learner.send_init([values])
            learner.push(learner.pull(), values)
            learner.finish()
            learner.close()
        assert server.wait() == 0
    with ServerProcess(tmp_path, *flags(path, 1, "--resume"), steps=2) as server:
        with ScriptedLearner(server.port, 0, layout, connect=False) as learner:
            learner.control = learner.open_socket()
            learner.send(encode.encode_hello(learner.hello)
                         + encode.encode_heartbeat(messages.Heartbeat(0, 1)) * 3)
            learner.push(learner.pull(2), values)
            learner.finish()
            learner.close()
        assert server.wait() == 0


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
