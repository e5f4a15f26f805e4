"""`Learner` against a scripted server: the step boundary, deltas, the H gate, the final cut."""

import numpy as np
import pytest

from syncer.kernels import decode_bf16, decode_q4, encode_bf16
from syncer.learner import Learner

from .scripted_server import DEADLINE_S, ScriptedServer
from .waiting import step_until


def model(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in
            {"embed": (5, 7), "a": (300, 41), "b": (129,), "scalar": ()}.items()}


def flat(learner: Learner, parameters: dict, fragment: int) -> np.ndarray:
    return np.concatenate(
        [parameters[t.name].reshape(-1) for t in learner.layout.fragments[fragment].tensors])


def bf16(values: np.ndarray) -> np.ndarray:
    out = np.empty(2 * values.size, np.uint8)
    encode_bf16(values, out)
    return out


def widened(raw) -> np.ndarray:
    out = np.empty(len(raw) // 2, np.float32)
    assert decode_bf16(raw, out, False) == -1
    return out


def decoded(dtype: str, raw, numel: int) -> np.ndarray:
    out = np.empty(numel, np.float32)
    if dtype == "q4":
        assert decode_q4(raw, out, False) == -1
        return out
    return widened(raw) if dtype == "bf16" else np.frombuffer(raw, "<f4")


@pytest.fixture
def server():
    with ScriptedServer() as each:
        yield each


@pytest.mark.parametrize("dtype", ["f32", "bf16", "q4"])
@pytest.mark.parametrize("num_streams", [0, 3])
def test_a_whole_run(server, dtype, num_streams):
    """INIT, a broadcast blended by halves, a delta on the exact anchor, and the cut, to the bit."""
    parameters = model()
    before = {name: values.copy() for name, values in parameters.items()}
    with Learner(parameters, server.address, learner_id=0, dtype=dtype, fragments=3, alpha=0.25,
                 num_streams=num_streams) as learner:
        peer = server.accept()
        inits = peer.receive_inits()
        count = len(learner.layout.fragments)
        for f in range(count):
            values = flat(learner, before, f)
            expected = values if dtype == "f32" else bf16(values)
            assert inits[f] == expected.tobytes()

        base = model(1)
        anchors = []
        for f in range(count):
            values = flat(learner, base, f)
            raw = values if dtype == "f32" else bf16(values)
            anchors.append(values if dtype == "f32" else widened(raw))
            peer.bcast(f, 7 + f, raw)
        applied = []
        while len(applied) < count:
            applied += step_until(learner, lambda s: s.applied, tokens=3).applied
        assert sorted(applied) == [(f, 7 + f) for f in range(count)]
        for f in range(count):
            blended = (np.float32(0.25) * flat(learner, before, f)
                       + np.float32(0.75) * anchors[f])
            np.testing.assert_array_equal(flat(learner, parameters, f), blended)

        for values in parameters.values():
            np.add(values, np.float32(0.125), out=values)
        peer.pull(1, 9, attempt=2)
        status = step_until(learner, lambda s: s.answered, tokens=3)
        assert status.answered == ((1, 9),)
        push = peer.receive_push()
        assert push[:6] == (0, 1, 9, 2, 8, status.step)
        assert 1 <= push.c_steps <= status.step
        assert push.c_tokens == 3 * push.c_steps
        delta = flat(learner, parameters, 1) - anchors[1]
        found = decoded(dtype, push.delta, delta.size)
        if dtype == "f32":
            np.testing.assert_array_equal(found, delta)
        elif dtype == "bf16":
            np.testing.assert_array_equal(found, widened(bf16(delta)))
        else:
            assert np.abs(found - delta).max() <= np.abs(delta).max() / 2

        cut = model(2)
        for f in range(count):
            peer.final(f, 9 + f, flat(learner, cut, f))
        peer.manifest(11, [9 + f for f in range(count)])
        assert step_until(learner, lambda s: s.finished).finished
        assert learner.finish(DEADLINE_S).finished
        for name, values in parameters.items():
            np.testing.assert_array_equal(values, cut[name])
        assert peer.receive_ack().step == 11
        assert learner.finish(DEADLINE_S).finished
        assert learner.bytes_sent > sum(map(len, inits)) + len(push.delta)
        assert learner.bytes_received > 4 * sum(v.size for v in cut.values())
