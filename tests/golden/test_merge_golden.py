"""The merge against the golden values, bit by bit; must not compute expectations by itself."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from syncer.core.layout import AVG, RDA, FragmentLayout, Layout
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


def merged(mode, grads, weights, *, numels=NUMELS, threads=1, momentum=None, **options):
    """(merged gradient, gnorm): recovered from sgd with lr 1 on parameters of 0, negated."""
    store = FragmentStore(Layout((FragmentLayout(mode, numels),)), lr=1.0, momentum=0.0,
                          threads=threads, outer_optimizer="sgd", **options)
    store.adopt(0, np.zeros(sum(numels), np.float32))
    prepared = store.prepare(0, 1, [(i, 1, w, g) for i, (w, g) in
                                    enumerate(zip(weights, grads, strict=True))])
    store.publish(prepared)
    return 0.0 - store.current(0).params, prepared.gnorm


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
    result, _ = merged(mode, grads, weights, numels=numels, threads=threads)
    assert sha(result) == large["avg" if mode == AVG else "rda"]
