"""What the demo trains, as all else of it sees that: a model and its optimizer.

Must not know text, the server or the clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from syncer.demo import settings
from syncer.demo.model.adamw import AdamW
from syncer.demo.model.byte_model import CONTEXT, NUMEL, ByteArray, ByteModel, FloatArray
from syncer.learner.holding import Holding


class Student(Protocol):
    """Guesses bytes. A window is `context` + 1 bytes, of which it guesses the last `guesses`."""

    context: int
    guesses: int
    batch: int
    """Windows of one own step."""
    learning_rate: float
    """The highest."""
    flat: FloatArray
    """All parameters, f32."""
    parameters: dict[str, FloatArray]
    """Views of `flat`."""

    @property
    def held(self) -> Mapping[str, FloatArray] | Holding:
        """The same as a learner takes it."""

    def train(self, windows: ByteArray, rate: float) -> float:
        """One own step; the bits per byte of these windows before it."""

    def bits_per_byte(self, windows: ByteArray) -> float:
        """The mean over windows."""


class NumpyStudent:
    """The model in plain NumPy."""

    context, guesses = CONTEXT, 1
    batch = settings.BATCH
    learning_rate = settings.LEARNING_RATE

    def __init__(self, seed: int):
        self._model, self._optimizer = ByteModel(seed), AdamW(NUMEL)
        self.flat = self._model.flat
        self.parameters = self.held = self._model.parameters

    def train(self, windows: ByteArray, rate: float) -> float:
        bits = self._model.loss_and_gradient(windows)
        self._optimizer.step(self.flat, self._model.gradient, rate)
        return bits

    def bits_per_byte(self, windows: ByteArray) -> float:
        return self._model.bits_per_byte(windows)


def new_student(seed: int, torch: bool) -> Student:
    """A fresh one: the same for the same seed."""
    if not torch:
        return NumpyStudent(seed)
    from syncer.demo.model.byte_gpt import TorchStudent  # noqa: PLC0415  needs PyTorch

    return TorchStudent(seed)
