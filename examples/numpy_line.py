"""A complete learner: fits y = x1 - 2 x2 + 3 x3 + 0.5 to noisy points of its own.

    python examples/numpy_line.py LEARNER_ID HOST:PORT
"""

import sys

import numpy as np

from syncer.learner import Learner

if len(sys.argv) != 3:
    sys.exit("usage: python examples/numpy_line.py LEARNER_ID HOST:PORT")
learner_id, address = int(sys.argv[1]), sys.argv[2]
rng = np.random.default_rng(learner_id)  # every island has its own data
parameters = {  # float32, changed in place
    "layer.weight": np.zeros(3, np.float32),
    "layer.bias": np.zeros(1, np.float32),
}


def train_step() -> int:
    """One step of gradient descent; the number of samples (tokens) it used."""
    inputs = rng.standard_normal((64, 3)).astype(np.float32)
    targets = inputs @ [1.0, -2.0, 3.0] + 0.5 + 0.1 * rng.standard_normal(64)
    error = (inputs @ parameters["layer.weight"] + parameters["layer.bias"] - targets) / 64
    parameters["layer.weight"] -= (0.1 * error @ inputs).astype(np.float32)
    parameters["layer.bias"] -= np.float32(0.1 * error.sum())
    return len(inputs)


with Learner(parameters, address, learner_id=learner_id, run="line", dtype="f32",
             fragments=2) as learner:
    while not learner.step(tokens=train_step()).finished:
        pass
    learner.finish()  # the merged model, to the bit

print(parameters["layer.weight"].tolist(), parameters["layer.bias"].tolist())
