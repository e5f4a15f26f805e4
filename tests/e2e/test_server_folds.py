"""Folds, carried deltas and merge statistics on the real server, against the NumPy oracle."""

from __future__ import annotations

import numpy as np
import pytest

from syncer.layout import AVG, RDA, FragmentLayout, Layout
from syncer.protocol import DTYPE_BF16, DTYPE_F32, DTYPE_Q4, Msg
from tests.e2e.scripted import ScriptedLearner, ServerProcess, from_wire, to_wire
from tests.e2e.tape import records as tape_records
from tests.golden import merge_reference as oracle

LAYOUT = Layout((FragmentLayout(AVG, (20_000, 3)), FragmentLayout(RDA, (700, 40_000))))
SGD = ("--outer-optimizer", "sgd", "--outer-lr", "1", "--delta-correction", "none",
       "--sync-interval-steps", "0")


def values(seed: int, fragment: int) -> np.ndarray:
    rng = np.random.default_rng([seed, fragment])
    return rng.standard_normal(LAYOUT.fragments[fragment].numel).astype(np.float32)


def merged(fragment: int, deltas, weights) -> np.ndarray:
    layout = LAYOUT.fragments[fragment]
    return oracle.merge_fragment([-d for d in deltas], weights, layout.numels, layout.merge_mode)


def end(server, learners) -> None:
    for learner in learners:
        learner.take_cut()
    for learner in learners:
        learner.until(Msg.SHUTDOWN)
    assert server.wait() == 0


@pytest.mark.parametrize("fold", ["exact", "streaming"])
def test_pushes_that_arrive_out_of_order_are_folded(tmp_path, fold):
    steps, order = 4, (2, 0, 1)
    rule = "equal" if fold == "exact" else "tokens2-over-steps"
    flags = (*SGD, "--fold", fold, "--learner-weight", rule, "--quorum", "3")
    init = [values(0, p) for p in range(2)]
    with (
        ServerProcess(tmp_path, *flags, learners=3, steps=steps) as server,
        ScriptedLearner(server.port, 0, LAYOUT) as a, ScriptedLearner(server.port, 1, LAYOUT) as b,
        ScriptedLearner(server.port, 2, LAYOUT) as c,
    ):
        learners = [a, b, c]
        a.send_init(init)
        params = list(init)
        for step in range(1, steps + 1):
            pulls = [learner.pull(step) for learner in learners]
            p = pulls[0].fragment
            deltas = [values(10 * step + i, p) for i in range(3)]
            for i in order:
                learners[i].push(pulls[i], deltas[i], local_step=step, c_steps=2, c_tokens=10 + i)
            raw = [1.0] * 3 if fold == "exact" else [
                oracle.learner_weight(10 + i, 2) for i in range(3)]
            params[p] = params[p] - merged(p, deltas, raw)
        end(server, learners)
        for p, expected in enumerate(params):
            if fold == "exact":
                assert a.final[p].tobytes() == expected.tobytes()
            else:  # sums in order of arrival: other roundings
                np.testing.assert_allclose(a.final[p], expected, rtol=0, atol=2e-5)
                assert np.abs(a.final[p] - init[p]).max() > 0.1


@pytest.mark.parametrize("dtype", [DTYPE_F32, DTYPE_BF16, DTYPE_Q4])
@pytest.mark.parametrize("waits", [True, False])
def test_a_late_push_joins_the_next_round_at_a_discount(tmp_path, dtype, waits):
    """Its bytes wait as received (`waits`), or it enters the round that gathers already."""
    layout = Layout((LAYOUT.fragments[1],))
    pace = ("--min-round-interval-ms", "3000") if waits else ()
    flags = (*SGD, "--late-carry", "--carry-gamma", "0.25", "--grace-ms", "0", *pace)
    init = values(0, 1)
    with (
        ServerProcess(tmp_path, *flags, learners=2, steps=2) as server,
        ScriptedLearner(server.port, 0, layout, dtype=dtype) as fast,
        ScriptedLearner(server.port, 1, layout, dtype=dtype) as slow,
    ):
        fast.send_init([init])
        first, late, second = values(1, 1), values(2, 1), values(3, 1)
        missed = slow.pull(1)
        fast.push(fast.pull(1), first, c_tokens=10)
        server.log.wait("outer step", step=1)
        slow.push(missed, late, base=0, c_tokens=10)
        server.log.wait("late push carried into round", learner=1, into=2)
        assert bool(server.log.find("late push waits for the next round")) == waits
        fast.push(fast.pull(2), second, c_tokens=10)
        end(server, [fast, slow])
        params = decoded_init(init, dtype)
        params = params - oracle.merge_fragment(
            [gradient(first, dtype)], [100.0], layout.fragments[0].numels, RDA)
        params = params - oracle.merge_fragment(
            [gradient(second, dtype), gradient(late, dtype)], [100.0, 25.0],
            layout.fragments[0].numels, RDA)
        assert fast.final[0].tobytes() == params.tobytes()


def decoded_init(init: np.ndarray, dtype: int) -> np.ndarray:
    bulk = DTYPE_F32 if dtype == DTYPE_F32 else DTYPE_BF16
    return from_wire(to_wire(init, bulk), bulk)


def gradient(delta: np.ndarray, dtype: int) -> np.ndarray:
    if dtype != DTYPE_Q4:
        return -from_wire(to_wire(delta, dtype), dtype)
    wire = np.frombuffer(to_wire(delta, dtype), np.uint8).reshape(-1, 132)
    scale = wire[:, :4].copy().view("<f4")
    nibbles = np.stack([wire[:, 4:] & 15, wire[:, 4:] >> 4], axis=-1).reshape(len(wire), 256)
    levels = np.array([0, *(2.0 ** (k - 7) for k in range(1, 8))], np.float32)
    signed = np.where(nibbles >= 8, -levels[nibbles & 7], levels[nibbles & 7])
    return -(signed * scale).astype(np.float32).ravel()[:delta.size]


def test_statistics_explain_each_merge_on_the_tape(tmp_path):
    tape = tmp_path / "tape.jsonl"
    flags = (*SGD, "--merge-stats", "--event-tape", str(tape), "--quorum", "2")
    with (
        ServerProcess(tmp_path, *flags, learners=2, steps=2) as server,
        ScriptedLearner(server.port, 0, LAYOUT) as a, ScriptedLearner(server.port, 1, LAYOUT) as b,
    ):
        a.send_init([values(0, p) for p in range(2)])
        for step in (1, 2):
            for learner in (a, b):
                pull = learner.pull(step)
                learner.push(pull, values(5, pull.fragment), c_tokens=10)
        end(server, [a, b])
    merges = [record for record in tape_records(tape) if "fragment" in record]
    assert [record["step"] for record in merges] == [1, 2]
    for record in merges:
        stats = record["stats"]
        norm = float(oracle.norm(values(5, record["fragment"])))
        assert [learner["norm"] for learner in stats["learners"]] == pytest.approx([norm, norm])
        assert stats["merged_ratio"] == pytest.approx(1.0)
        assert stats["step_norm"] == pytest.approx(record["gnorm"])
