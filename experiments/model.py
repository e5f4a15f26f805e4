"""What is trained: a byte language model of two sizes on text that is on every machine.

The network is that of the demo with one layer more and in any size: the next byte from the last
`CONTEXT` ones. Arrays in, arrays out. Must not know learners, servers or time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import NamedTuple

import numpy as np

from syncer.demo.model import corpus
from syncer.demo.model.adamw import AdamW
from syncer.demo.model.byte_model import softmax_and_loss, sum_rows_by_byte
from syncer.learner.partition import NamedLayout, build_layout

VOCABULARY = 128
"""Source text is ASCII; what is not counts as 127."""
CONTEXT = 8
BATCH = 32
"""Bytes that one own step predicts."""
HELD_OUT = 4096
"""Bytes that every figure of a loss is measured on, the same ones always."""
FRAGMENTS = 4
BITS_PER_NAT = float(1.0 / np.log(2.0))

EMBED, HEAD, HEAD_BIAS = "embed_tokens.weight", "lm_head.weight", "lm_head.bias"


class Size(NamedTuple):
    """Of a model."""

    embed: int
    hidden: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every layer is about a fragment: embedding and head are one, each dense layer another."""
        width = self.hidden
        layers = {f"layers.{i}": (CONTEXT * self.embed if i == 0 else width) for i in range(3)}
        return {EMBED: (VOCABULARY, self.embed), HEAD: (width, VOCABULARY),
                HEAD_BIAS: (VOCABULARY,)} | {
            f"{name}.weight": (inputs, width) for name, inputs in layers.items()} | {
            f"{name}.bias": (width,) for name in layers}

    @property
    def numel(self) -> int:
        return sum(int(np.prod(shape)) for shape in self.shapes.values())

    @property
    def layout(self) -> NamedLayout:
        return build_layout(self.shapes, FRAGMENTS)


SIZES = {"small": Size(embed=8, hidden=32), "large": Size(embed=24, hidden=112)}


class Model:
    """Parameters and gradient as one flat f32 array each, and named views of them."""

    def __init__(self, size: Size, seed: int):
        self.size = size
        self.flat = np.zeros(size.numel, np.float32)
        self.gradient = np.zeros(size.numel, np.float32)
        self.parameters = self._views(self.flat)
        self._gradients = self._views(self.gradient)
        rng = np.random.default_rng(seed)
        for name, view in self.parameters.items():
            if view.ndim == 2:
                scale = {EMBED: 1.0, HEAD: 0.02}.get(name, np.sqrt(2.0 / view.shape[0]))
                view[...] = scale * rng.standard_normal(view.shape)

    def _views(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        views, start = {}, 0
        for name, shape in self.size.shapes.items():
            numel = int(np.prod(shape))
            views[name] = flat[start:start + numel].reshape(shape)
            start += numel
        return views

    def loss_and_gradient(self, windows: np.ndarray) -> float:
        """Bits per byte of a batch, uint8 (batch, CONTEXT + 1); `gradient` is that of the nats."""
        p, g = self.parameters, self._gradients
        batch, targets = len(windows), windows[:, -1]
        inputs, outputs, h = self._forward(windows)
        logits, nats = softmax_and_loss(h @ p[HEAD] + p[HEAD_BIAS], targets)
        logits[np.arange(batch), targets] -= 1
        logits /= batch
        np.matmul(h.T, logits, out=g[HEAD])
        np.sum(logits, axis=0, out=g[HEAD_BIAS])
        d_h = logits @ p[HEAD].T
        for layer in (2, 1, 0):
            weight = f"layers.{layer}.weight"
            d_out = d_h * (outputs[layer] > 0)
            np.matmul(inputs[layer].T, d_out, out=g[weight])
            np.sum(d_out, axis=0, out=g[f"layers.{layer}.bias"])
            d_in = d_out @ p[weight].T
            d_h = d_h + d_in if layer else d_in
        sum_rows_by_byte(windows[:, :CONTEXT].reshape(-1), d_h.reshape(-1, self.size.embed),
                         out=g[EMBED])
        return float(nats.mean() * BITS_PER_NAT)

    def bits_per_byte(self) -> float:
        """On the held-out bytes."""
        p, windows = self.parameters, text().held_out
        h = self._forward(windows)[-1]
        nats = softmax_and_loss(h @ p[HEAD] + p[HEAD_BIAS], windows[:, -1])[1]
        return float(nats.mean(dtype=np.float64) * BITS_PER_NAT)

    def _forward(self, windows: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray],
                                                     np.ndarray]:
        """What goes into and comes out of each dense layer, and what the head sees."""
        p = self.parameters
        h = p[EMBED][windows[:, :CONTEXT]].reshape(len(windows), -1)
        inputs, outputs = [], []
        for layer in range(3):
            inputs.append(h)
            out = h @ p[f"layers.{layer}.weight"]
            out += p[f"layers.{layer}.bias"]
            np.maximum(out, 0, out=out)
            outputs.append(out)
            h = h + out if layer else out         # the first one is none of a residual
        return inputs, outputs, h


class Text(NamedTuple):
    training: np.ndarray
    held_out: np.ndarray
    """Windows."""


@cache
def text() -> Text:
    """The standard library of this Python, files that nobody trains on apart."""
    found = corpus.load(0, 1)
    training, held_out = (np.minimum(part, VOCABULARY - 1) for part in (
        found.shard, found.held_out))
    places = len(held_out) - CONTEXT
    starts = np.arange(HELD_OUT) * places // HELD_OUT
    return Text(training, _windows(held_out, starts))


def _windows(data: np.ndarray, starts: np.ndarray) -> np.ndarray:
    return data[starts[:, None] + np.arange(CONTEXT + 1)]


class Batches:
    """What one learner reads: windows anywhere in the text. Two that have the same numbers read
    the same."""

    def __init__(self, *numbers: int):
        self.rng = np.random.default_rng(numbers)

    def next(self) -> np.ndarray:
        data = text().training
        return _windows(data, self.rng.integers(0, len(data) - CONTEXT, BATCH))


WARM_UP = 40
"""Own steps in which the learning rate rises to what it stays at."""


class Trainer:
    """One learner's model, AdamW and batches. process: reads other batches than those before."""

    def __init__(self, size: Size, seed: int, learner: int, rate: float, process: int = 1):
        self.model = Model(size, seed)
        self.optimizer = AdamW(size.numel)
        self.batches = Batches(seed, learner, process)
        self.rate, self.steps = rate, 0

    def step(self) -> float:
        """Bits per byte of its batch before it."""
        bits = self.model.loss_and_gradient(self.batches.next())
        self.apply()
        return bits

    def apply(self) -> None:
        """The optimizer step along the gradient that is there."""
        self.steps += 1
        rate = self.rate * min(1.0, self.steps / WARM_UP)
        self.optimizer.step(self.model.flat, self.model.gradient, rate)


def data_parallel(size: Size, seed: int, learners: int, rate: float) -> Iterator[Model]:
    """The bound: the mean gradient of all learners' batches at every step. The model after each.

    The batches are those that the learners of a run with this seed read.
    """
    trainer = Trainer(size, seed, 0, rate)
    batches = [Batches(seed, learner, 1) for learner in range(learners)]
    while True:
        trainer.model.loss_and_gradient(np.concatenate([each.next() for each in batches]))
        trainer.apply()
        yield trainer.model


def synchronous(size: Size, seed: int, learners: int, rate: float, steps: int) -> float:
    """Bits per held-out byte after so many of those steps."""
    models = data_parallel(size, seed, learners, rate)
    return next(islice(models, steps - 1, None)).bits_per_byte()
