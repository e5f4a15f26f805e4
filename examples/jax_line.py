"""A complete learner in JAX: fits y = x1 - 2 x2 + 3 x3 + 0.5 to noisy points of its own.

    python examples/jax_line.py LEARNER_ID HOST:PORT

Any pytree of float32 arrays does as well. `pip install jax`.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from syncer.learner import Learner

if len(sys.argv) != 3:
    sys.exit("usage: python examples/jax_line.py LEARNER_ID HOST:PORT")
learner_id, address = int(sys.argv[1]), sys.argv[2]


@jax.jit
def train_step(parameters: Any, key: Any) -> Any:
    """One step of gradient descent on 64 points."""
    def loss(parameters: Any) -> Any:
        found = inputs @ parameters["layer"]["weight"] + parameters["layer"]["bias"]
        return 0.5 * jnp.mean((found - targets) ** 2)

    of_inputs, of_noise = jax.random.split(key)
    inputs = jax.random.normal(of_inputs, (64, 3))
    noise = 0.1 * jax.random.normal(of_noise, (64,))
    targets = inputs @ jnp.array([1.0, -2.0, 3.0]) + 0.5 + noise
    slopes = jax.grad(loss)(parameters)
    return jax.tree.map(lambda own, slope: own - 0.1 * slope, parameters, slopes)


class Mirror:
    """A pytree as arrays that a learner changes in place, by the paths of its leaves."""

    def __init__(self, tree: Any):
        leaves, self.form = jax.tree_util.tree_flatten_with_path(tree)
        self.arrays = {jax.tree_util.keystr(path, simple=True, separator="."): np.array(leaf)
                       for path, leaf in leaves}

    def take(self, tree: Any) -> None:
        for array, leaf in zip(self.arrays.values(), jax.tree.leaves(tree), strict=True):
            np.copyto(array, leaf)

    def tree(self) -> Any:
        """Copies: the arrays will be changed again."""
        return jax.tree.unflatten(self.form, [jnp.array(each) for each in self.arrays.values()])


parameters = {"layer": {"weight": jnp.zeros(3), "bias": jnp.zeros(1)}}
mirror = Mirror(parameters)
key = jax.random.key(learner_id)  # every island has its own data
with Learner(mirror.arrays, address, learner_id=learner_id, run="line", dtype="f32",
             fragments=2) as learner:
    finished = False
    while not finished:
        key, now = jax.random.split(key)
        parameters = train_step(parameters, now)
        mirror.take(parameters)
        status = learner.step(tokens=64)
        if status.applied:
            parameters = mirror.tree()
        finished = status.finished
    learner.finish()  # the merged model, to the bit
    parameters = mirror.tree()

print(parameters["layer"]["weight"].tolist(), parameters["layer"]["bias"].tolist())
