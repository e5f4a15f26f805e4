"""Whole runs over real sockets: broadcasts, final cut and files have the bits of the oracle."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest

from syncer.kernels import decode_q4
from syncer.protocol import DTYPE_BF16, DTYPE_F32, DTYPE_Q4, Msg, bulk_dtype
from syncer.wire import messages
from tests.e2e.scripted import (
    MIXED,
    ScriptedLearner,
    ServerProcess,
    ServerThread,
    from_wire,
    layout_of,
    to_wire,
)
from tests.e2e.tape import records as tape_records
from tests.golden import merge_reference as oracle

LR, MOMENTUM = 0.7, 0.9


class Replay:
    """What the run must do, computed by the oracle from the bytes that were sent."""

    def __init__(self, layout, dtype, init):
        self.layout, self.dtype = layout, dtype
        self.params = [self.bulk(value) for value in init]
        self.momentum = [np.zeros_like(value) for value in self.params]
        self.versions = {(p, 0): value for p, value in enumerate(self.params)}

    def bulk(self, values):
        return from_wire(to_wire(values, bulk_dtype(self.dtype)), bulk_dtype(self.dtype))

    def gradient(self, delta):
        """The outer gradient of a delta that went over the wire."""
        if self.dtype == DTYPE_Q4:
            out = np.empty(delta.size, np.float32)
            assert decode_q4(to_wire(delta, DTYPE_Q4), out, True) == -1
            return out
        return -from_wire(to_wire(delta, self.dtype), self.dtype)

    def step(self, step, pushes):
        """pushes: (delta, c_steps, c_tokens) in learner order."""
        p = (step - 1) % len(self.layout.fragments)
        fragment = self.layout.fragments[p]
        grads = [self.gradient(delta) for delta, _, _ in pushes]
        weights = [oracle.learner_weight(tokens, steps) for _, steps, tokens in pushes]
        merged = oracle.merge_fragment(grads, weights, fragment.numels, fragment.merge_mode,
                                       self.momentum[p], oracle.Heloco())
        self.params[p], self.momentum[p] = oracle.nesterov(
            self.params[p], self.momentum[p], merged, LR, MOMENTUM)
        self.versions[p, step] = self.params[p]


def deltas(layout, seed):
    """A repeatable delta of every fragment for (learner, step)."""
    def delta(learner, step, fragment):
        rng = np.random.default_rng([seed, learner, step])
        return rng.standard_normal(layout.fragments[fragment].numel).astype(np.float32) * 0.1
    return delta


def check_broadcasts(learner, replay):
    """Every BCAST that the learner saw has the oracle's bits; returns the (fragment, version)s."""
    found = []
    for message in learner.seen:
        if isinstance(message, messages.Bcast):
            expected = replay.versions[message.fragment, message.version]
            assert bytes(message.tensor) == to_wire(expected, bulk_dtype(replay.dtype))
            found.append((message.fragment, message.version))
    return found


def run_lockstep(learners, replay, steps, delta):
    """Everybody answers every pull; steps are asked for in order."""
    for step in range(1, steps + 1):
        pushes = []
        for learner in learners:
            pull = learner.pull(step)
            assert pull.attempt == 1
            values = delta(learner.learner, step, pull.fragment)
            c_steps, c_tokens = 1 + learner.learner, 100 + 37 * step
            learner.push(pull, values, local_step=step, c_steps=c_steps, c_tokens=c_tokens,
                         chunked=bool(step % 2) or bool(learner.data))
            pushes.append((values, c_steps, c_tokens))
        replay.step(step, pushes)


@pytest.mark.parametrize("streams", [0, 3])
@pytest.mark.parametrize("dtype", [DTYPE_F32, DTYPE_BF16, DTYPE_Q4])
def test_a_run_of_two_learners_has_the_oracles_bits(tmp_path, dtype, streams):
    steps, layout = 7, MIXED
    rng = np.random.default_rng(7)
    init = [rng.standard_normal(f.numel).astype(np.float32) for f in layout.fragments]
    tape, state = tmp_path / "tape.jsonl", tmp_path / "final.bin"
    flags = ("--quorum", "2", "--grace-ms", "0", "--event-tape", str(tape), "--final-state",
             str(state))
    with (
        ServerProcess(tmp_path, *flags, learners=2, steps=steps) as server,
        ScriptedLearner(server.port, 0, layout, dtype=dtype, streams=streams) as first,
        ScriptedLearner(server.port, 1, layout, dtype=dtype, streams=streams) as second,
    ):
        first.send_init(init, chunked=dtype != DTYPE_F32)
        replay = Replay(layout, dtype, init)
        run_lockstep([first, second], replay, steps, deltas(layout, 3))
        for learner in (first, second):
            manifest = learner.take_cut()
            assert manifest.step == steps
            assert manifest.versions == (7, 5, 6)
            found = check_broadcasts(learner, replay)
            assert len(found) == len(set(found)), "a version was sent twice"
            if not streams:  # over several sockets the last broadcasts may be left unread
                assert set(found) == set(replay.versions) - {(0, steps)}
            for p, expected in enumerate(replay.params):
                assert learner.final[p].tobytes() == expected.tobytes()
        for learner in (first, second):
            learner.until(Msg.SHUTDOWN)
            learner.close()
        assert server.wait() == 0
    written = state.read_bytes()
    parts = [struct.pack("<I", len(init))]
    for params in replay.params:
        parts += [struct.pack("<Q", params.size), params.tobytes()]
    assert written == b"".join(parts)
    records = tape_records(tape)
    assert records[0]["event"] == "init"
    assert records[0]["sha256"] == [
        hashlib.sha256(to_wire(value, bulk_dtype(dtype))).hexdigest() for value in init]
    merges = {record["step"]: record for record in records[1:]}
    assert sorted(merges) == list(range(1, steps + 1))
    assert all(merges[t]["responded"] == [0, 1] for t in merges)


def test_several_chunks_per_message_over_several_streams(tmp_path):
    """Fragments of several chunks, striped over four sockets for one learner."""
    layout, steps = layout_of((2_500_000,), (1_100_000, 5)), 4
    init = [np.linspace(-1, 1, f.numel, dtype=np.float32) for f in layout.fragments]
    with (
        ServerProcess(tmp_path, "--quorum", "2", learners=2, steps=steps) as server,
        ScriptedLearner(server.port, 0, layout, streams=4) as first,
        ScriptedLearner(server.port, 1, layout) as second,
    ):
        first.send_init(init)
        replay = Replay(layout, DTYPE_F32, init)
        run_lockstep([first, second], replay, steps, deltas(layout, 5))
        for learner in (first, second):
            learner.take_cut()
            check_broadcasts(learner, replay)
            for p, expected in enumerate(replay.params):
                assert learner.final[p].tobytes() == expected.tobytes()
        for learner in (first, second):
            learner.until(Msg.SHUTDOWN)
            learner.close()
        assert server.wait() == 0


def test_a_server_inside_the_process_ends_with_its_run(tmp_path):
    with (
        ServerThread(tmp_path, total_steps=2) as server,
        ScriptedLearner(server.port, 0, layout_of((4,))) as learner,
    ):
        learner.send_init([np.zeros(4, np.float32)])
        for _ in range(2):
            learner.push(learner.pull(), np.full(4, -1, np.float32))
        learner.finish()
        learner.close()
        assert server.wait() == 0
        totals = server.log.wait("server totals")
        assert totals["commits"] == 2
        assert totals["bytes_received"] > 0
        assert totals["bytes_sent"] > 0
        assert totals["cpu_seconds"] > 0
        assert totals["peak_rss_bytes"] > 2**20


def test_the_first_pull_comes_behind_the_whole_cut_on_one_socket(tmp_path):
    """On one socket a pull is never ahead of the version it asks about."""
    with (
        ServerThread(tmp_path, total_steps=4, pipeline=2) as server,
        ScriptedLearner(server.port, 0, MIXED) as learner,
    ):
        learner.send_init([np.zeros(f.numel, np.float32) for f in MIXED.fragments])
        for step in range(1, 5):
            pull = learner.pull()
            assert learner.versions[pull.fragment] == max(0, step - 3)
            learner.push(pull, np.zeros(MIXED.fragments[pull.fragment].numel, np.float32))
        learner.finish()
        learner.close()
        assert server.wait() == 0
