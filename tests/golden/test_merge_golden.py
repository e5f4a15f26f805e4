"""The merge against the golden values, bit by bit; must not compute expectations by itself."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from syncer.layout import AVG, ISO, RDA, FragmentLayout, Layout
from syncer.merge import FragmentStore
from tests.golden.merge_reference import noise

GOLDEN = json.loads(Path(__file__).with_name("merge_golden.json").read_text())
INPUTS = GOLDEN["inputs"]
NUMELS = tuple(INPUTS["tensor_numels"])
WEIGHTS = [float.fromhex(w) for w in INPUTS["weights_f64"]]
THREADS = [1, 2, 3, 8]


def floats(bits) -> np.ndarray:
    return np.array([int(b, 16) for b in bits], np.uint32).view(np.float32)


def bits(x: np.ndarray) -> list[str]:
    return [f"{int(v):08x}" for v in x.view(np.uint32)]


def sha(x: np.ndarray) -> str:
    return hashlib.sha256(x.tobytes()).hexdigest()


G0, G1, PARAMS, MOMENTUM = (floats(INPUTS[k]) for k in ("g0", "g1", "params", "momentum"))
LR, MU = (float(floats([INPUTS[k]])[0]) for k in ("lr", "mu"))


def merged(mode, grads, weights, *, numels=NUMELS, threads=1, momentum=None):
    """(merged gradient, gnorm): what nesterov leaves in the momentum when mu is 0."""
    n = sum(numels)
    store = FragmentStore(Layout((FragmentLayout(mode, numels),)), lr=1.0, momentum=0.0,
                          threads=threads,
                          delta_correction="none" if momentum is None else "heloco")
    store.adopt(0, np.zeros(n, np.float32),
                state={"momentum": np.zeros(n, np.float32) if momentum is None else momentum})
    prepared = store.prepare(0, 1, [(i, 1, w, g) for i, (w, g) in
                                    enumerate(zip(weights, grads, strict=True))])
    # mu*b + g adds +-0 to g, which takes the sign of a -0 in the merged gradient; none is golden
    return store.publish(prepared).momentum, prepared.gnorm


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize(("name", "mode", "grads", "weights"), [
    ("avg", AVG, [G0, G1], WEIGHTS),
    ("avg_equal_weights", AVG, [G0, G1], [1.0, 1.0]),
    ("rda", RDA, [G0, G1], WEIGHTS),
    ("rda_one_zero_learner", RDA, [G0, np.zeros(6, np.float32)], WEIGHTS),
    ("rda_cancelling_fallback", RDA, [G0, -G0], [1.0, 1.0]),
    ("zero_weights", RDA, [G0, G1], [0.0, 0.0]),
])
def test_merge_modes(name, mode, grads, weights, threads):
    result, gnorm = merged(mode, grads, weights, threads=threads)
    assert bits(result) == GOLDEN[name]["bits"]
    if "gnorm" in GOLDEN[name]:
        assert gnorm.hex() == GOLDEN[name]["gnorm"]


def test_three_nesterov_commits():
    store = FragmentStore(Layout((FragmentLayout(RDA, NUMELS),)), lr=LR, momentum=MU, threads=2)
    store.adopt(0, PARAMS.copy())
    for t, weights in enumerate((WEIGHTS, [1.0, 1.0], WEIGHTS), start=1):
        grads = [G0 * np.float32(t), G1]
        prepared = store.prepare(0, t, [(i, 1, weights[i], grads[i]) for i in (0, 1)])
        version = store.publish(prepared)
        assert bits(version.params) == GOLDEN[f"nesterov_step{t}_params"]["bits"]
        assert bits(version.momentum) == GOLDEN[f"nesterov_step{t}_momentum"]["bits"]
        assert (version.version, version.commits) == (t, t)


@pytest.mark.parametrize("activation", [0.0, 0.25])
def test_five_delayed_nesterov_commits(activation):
    avg, rda = floats(GOLDEN["avg"]["bits"]), floats(GOLDEN["rda"]["bits"])
    store = FragmentStore(Layout((FragmentLayout(AVG, NUMELS),)), lr=LR, momentum=MU,
                          outer_optimizer="delayed-nesterov", dn_period=2,
                          dn_activation=activation)
    store.adopt(0, PARAMS.copy())
    name = f"delayed_nesterov_c{activation}"
    for t in range(1, 6):
        # one learner with weight 1 is the identity on these gradients
        store.publish(store.prepare(0, t, [(0, 1, 1.0, avg if t % 2 else rda)]))
        assert bits(store.current(0).params) == GOLDEN[f"{name}_step{t}_params"]["bits"]
    assert bits(store.current(0).momentum) == GOLDEN[f"{name}_final_momentum"]["bits"]
    accumulator = store.current(0).state["accumulator"]
    assert bits(accumulator) == GOLDEN[f"{name}_final_accumulator"]["bits"]


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("mode", [AVG, RDA])
def test_large(mode, threads):
    large = GOLDEN["large"]
    numels = tuple(large["tensor_numels"])
    n = sum(numels)
    momentum = noise(9, n)
    half = np.float32(0.5) * momentum
    grads = [noise(1, n) + half, noise(2, n) - half, noise(3, n)]
    weights = [float.fromhex(w) for w in large["weights_f64"]]
    name = "avg" if mode == AVG else "rda"
    result, _ = merged(mode, grads, weights, numels=numels, threads=threads)
    assert sha(result) == large[name]
    result, _ = merged(mode, grads, weights, numels=numels, threads=threads, momentum=momentum)
    assert sha(result) == large[f"heloco_{name}"]
    store = FragmentStore(Layout((FragmentLayout(mode, numels),)), lr=LR, momentum=MU,
                          threads=threads, delta_correction="heloco")
    store.adopt(0, noise(10, n), state={"momentum": momentum})
    version = store.publish(store.prepare(0, 1, [(i, 1, weights[i], grads[i]) for i in range(3)]))
    expected = large[f"nesterov_after_heloco_{name}"]
    assert {"params": sha(version.params), "momentum": sha(version.momentum)} == expected


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("mode", [AVG, RDA])
def test_heloco_before_each_mode(mode, threads):
    result, _ = merged(mode, [G0, G1], WEIGHTS, threads=threads, momentum=MOMENTUM)
    assert bits(result) == GOLDEN["heloco_avg" if mode == AVG else "heloco_rda"]["bits"]


@pytest.mark.parametrize("learner", [0, 1])
@pytest.mark.parametrize("tensor", [0, 1])
def test_heloco_of_one_tensor(learner, tensor):
    golden = GOLDEN[f"heloco_learner{learner}_tensor{tensor}"]
    cut = slice(0, 4) if tensor == 0 else slice(4, 6)
    result, _ = merged(AVG, [(G0, G1)[learner][cut]], [1.0], numels=(NUMELS[tensor],),
                       momentum=MOMENTUM[cut])
    assert bits(result) == golden["bits"]


@pytest.mark.parametrize("branch", ["rotate", "shrink"])
def test_heloco_examples(branch):
    golden = GOLDEN[f"heloco_{branch}_example"]
    result, _ = merged(AVG, [floats(golden["delta"])], [1.0], numels=(2,),
                       momentum=floats(golden["momentum"]))
    assert bits(result) == golden["bits"]


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("shape", [(3, 4), (4, 3)])
def test_iso(shape, threads):
    golden = GOLDEN[f"iso_newton_schulz_{shape[0]}x{shape[1]}"]["values"]
    matrix = np.array([[2.0, -1.0, 0.5, 3.0], [0.25, 4.0, -2.0, 1.0], [-1.5, 0.75, 3.5, -0.5]],
                      np.float32)
    matrix = np.ascontiguousarray(matrix if shape == (3, 4) else matrix.T).ravel()
    layout = Layout((FragmentLayout(ISO, (12, 12), (shape, shape)),))
    store = FragmentStore(layout, lr=1.0, momentum=0.0, threads=threads)
    store.adopt(0, np.zeros(24, np.float32))
    both = np.concatenate([matrix, -matrix])
    result = store.publish(store.prepare(0, 1, [(0, 1, 2.0, both)])).momentum
    assert result == pytest.approx([*golden, *(-x for x in golden)], rel=1e-5)
