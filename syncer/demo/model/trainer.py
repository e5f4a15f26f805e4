"""One learner's own training: its student and its text, one step at a time.

Must not know the server, the clock or who asks for the next step.
"""

from __future__ import annotations

import hashlib

import numpy as np

from syncer.demo import settings
from syncer.demo.model import corpus
from syncer.demo.model.byte_model import ByteArray, FloatArray, even_windows, sample_windows
from syncer.demo.model.student import Student, new_student


class Trainer:
    """Student and text of one learner.

    Every learner of a run starts from the same parameters (`seed`) and draws its own batches. It
    reads shard `learner` mod `shards`. `first_step` is the number of own steps that a lost
    predecessor had taken: the learning-rate schedule goes on from there.
    """

    def __init__(self, *, learner: int, shards: int, seed: int, first_step: int,
                 torch: bool = False):
        self.shard = learner % shards
        self.text = corpus.load(self.shard, shards)
        self.student = new_student(seed, torch)
        self.tokens_per_step = self.student.batch * self.student.guesses
        self.step = first_step
        self.tokens = 0
        self._rng = np.random.default_rng([seed, learner, first_step])
        self._held_out = held_out_windows(
            self.student, self.text.held_out, settings.EVALUATION_BYTES)
        self._glance = held_out_windows(self.student, self.text.held_out, settings.GLANCE_BYTES)

    def train(self) -> float:
        """One own step; returns the bits per byte of its batch before it."""
        self.step += 1
        self.tokens += self.tokens_per_step
        student = self.student
        windows = sample_windows(self.text.shard, student.batch, self._rng, student.context)
        return student.train(windows, settings.learning_rate(self.step, student.learning_rate))

    def evaluate(self) -> float:
        """Bits per held-out byte, over the same windows in every learner and every run."""
        return self.student.bits_per_byte(self._held_out)

    def glance(self) -> float:
        """The same over fewer windows, for a point of the curve."""
        return self.student.bits_per_byte(self._glance)


def held_out_windows(student: Student, text: ByteArray, guesses: int) -> ByteArray:
    """Those that it makes so many guesses in, at the same places every time."""
    return even_windows(text, guesses // student.guesses, student.context)


def digest(flat: FloatArray) -> str:
    """SHA-256 of all parameters as little-endian f32, in the order of the student's."""
    return hashlib.sha256(flat.astype("<f4", copy=False).tobytes()).hexdigest()
