"""AdamW over one flat parameter array; must not know the learner around it.

Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv 1711.05101), algorithm 2:

    m = β1·m + (1 − β1)·g            v = β2·v + (1 − β2)·g²
    p = p − lr·( m̂ / (√v̂ + ε) + λ·p )      with m̂ = m/(1 − β1^t), v̂ = v/(1 − β2^t)
"""

from __future__ import annotations

import numpy as np

from syncer.demo.model.byte_model import FloatArray


class AdamW:
    """State for `numel` parameters: two f32 moments, and two work arrays so that a step allocates
    nothing."""

    def __init__(self, numel: int, *, beta1: float = 0.9, beta2: float = 0.99,
                 epsilon: float = 1e-8, weight_decay: float = 0.01):  # fmt: skip
        self.beta1, self.beta2 = beta1, beta2
        self.epsilon, self.weight_decay = epsilon, weight_decay
        self.steps = 0
        self._m = np.zeros(numel, np.float32)
        self._v = np.zeros(numel, np.float32)
        self._work = np.empty(numel, np.float32)
        self._update = np.empty(numel, np.float32)

    def step(self, parameters: FloatArray, gradient: FloatArray, lr: float) -> None:
        """Moves `parameters` (f32, flat) one step along `gradient` (same shape, kept as it is)."""
        self.steps += 1
        m, v, work, update = self._m, self._v, self._work, self._update
        m *= self.beta1
        np.multiply(gradient, 1 - self.beta1, out=work)
        m += work
        v *= self.beta2
        np.multiply(gradient, gradient, out=work)
        work *= 1 - self.beta2
        v += work
        np.multiply(v, 1 / (1 - self.beta2**self.steps), out=work)
        np.sqrt(work, out=work)
        work += self.epsilon
        np.divide(m, work, out=update)
        update *= lr / (1 - self.beta1**self.steps)
        parameters *= 1 - lr * self.weight_decay
        parameters -= update
