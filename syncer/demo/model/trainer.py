"""One learner's own training: its model, optimizer and text, one step at a time.

Must not know the server, the clock or who asks for the next step.
"""

from __future__ import annotations

import hashlib

import numpy as np

from syncer.demo import settings
from syncer.demo.model import corpus
from syncer.demo.model.adamw import AdamW
from syncer.demo.model.byte_model import NUMEL, ByteModel, FloatArray, even_windows, sample_windows


class Trainer:
    """Model, optimizer and text of one learner.

    Every learner of a run starts from the same parameters (`seed`) and draws its own batches. It
    reads shard `learner` mod `shards`. `first_step` is the number of own steps that a lost
    predecessor had taken: the learning-rate schedule goes on from there.
    """

    def __init__(self, *, learner: int, shards: int, seed: int, first_step: int):
        self.shard = learner % shards
        self.text = corpus.load(self.shard, shards)
        self.model = ByteModel(seed)
        self.optimizer = AdamW(NUMEL)
        self.step = first_step
        self.tokens = 0
        self._rng = np.random.default_rng([seed, learner, first_step])
        self._held_out = even_windows(self.text.held_out, settings.EVALUATION_WINDOWS)
        self._glance = even_windows(self.text.held_out, settings.GLANCE_WINDOWS)

    def train(self) -> float:
        """One own step; returns the bits per byte of its batch before it."""
        self.step += 1
        self.tokens += settings.BATCH
        windows = sample_windows(self.text.shard, settings.BATCH, self._rng)
        bits = self.model.loss_and_gradient(windows)
        rate = settings.learning_rate(self.step)
        self.optimizer.step(self.model.flat, self.model.gradient, rate)
        return bits

    def evaluate(self) -> float:
        """Bits per held-out byte, over the same windows in every learner and every run."""
        return self.model.bits_per_byte(self._held_out)

    def glance(self) -> float:
        """The same over fewer windows, for a point of the curve."""
        return self.model.bits_per_byte(self._glance)


def digest(flat: FloatArray) -> str:
    """SHA-256 of all parameters as little-endian f32, in the order of `model.SHAPES`."""
    return hashlib.sha256(flat.astype("<f4", copy=False).tobytes()).hexdigest()
