"""A byte-level language model in plain NumPy, with its backward pass written out by hand.

Predicts the next byte from the last `CONTEXT` bytes: byte embedding, two dense layers (the second
one residual), a linear head. Must not know about shards, optimizers or the server.

    e = embed[x]                                    (batch, CONTEXT, EMBED)
    a = relu(e_far W_far + e_near W_near + b0)      (batch, HIDDEN)
    h = a + relu(a W1 + b1)                         (batch, HIDDEN)
    logits = h W_head + b_head                      (batch, 256)

The matrix of the first layer is kept as two tensors, one for the older half of the context and one
for the newer half: with it the fragments that `build_layout` makes are of similar size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.floating[Any]]
ByteArray = npt.NDArray[np.uint8]

VOCABULARY = 256
CONTEXT = 16
EMBED = 24
HIDDEN = 320
NEAR = CONTEXT // 2

EMBED_NAME = "model.embed_tokens.weight"
FAR_NAME = "model.layers.0.far.weight"
NEAR_NAME = "model.layers.0.near.weight"
BIAS_0_NAME = "model.layers.0.bias"
DENSE_NAME = "model.layers.1.weight"
BIAS_1_NAME = "model.layers.1.bias"
HEAD_NAME = "lm_head.weight"
HEAD_BIAS_NAME = "lm_head.bias"

SHAPES = {
    EMBED_NAME: (VOCABULARY, EMBED),
    FAR_NAME: ((CONTEXT - NEAR) * EMBED, HIDDEN),
    NEAR_NAME: (NEAR * EMBED, HIDDEN),
    BIAS_0_NAME: (HIDDEN,),
    DENSE_NAME: (HIDDEN, HIDDEN),
    BIAS_1_NAME: (HIDDEN,),
    HEAD_NAME: (HIDDEN, VOCABULARY),
    HEAD_BIAS_NAME: (VOCABULARY,),
}
NUMEL = sum(int(np.prod(shape)) for shape in SHAPES.values())
BITS_PER_NAT = float(1.0 / np.log(2.0))
HEAD_SCALE = 0.005
"""Spread of the first head weights: small, so that a fresh model guesses uniformly (8 bits)."""


class ByteModel:
    """Parameters, gradients and the two passes.

    `flat` and `gradient` are one-dimensional f32 arrays of all parameters; `parameters` maps a name
    to its view of `flat`, so that an element-wise optimizer runs over one array and a learner sees
    named tensors. Everything is computed in the dtype of `flat` (f64 only to check gradients).
    """

    def __init__(self, seed: int, dtype: type[np.floating[Any]] = np.float32):
        self.flat = np.zeros(NUMEL, dtype)
        self.gradient = np.zeros(NUMEL, dtype)
        self.parameters = named_views(self.flat)
        self._gradients = named_views(self.gradient)
        rng = np.random.default_rng(seed)
        for name, shape in SHAPES.items():
            if len(shape) == 2:
                scale = {EMBED_NAME: 1.0, HEAD_NAME: HEAD_SCALE}.get(name)
                if scale is None:
                    inputs = CONTEXT * EMBED if name in (FAR_NAME, NEAR_NAME) else shape[0]
                    scale = np.sqrt(2.0 / inputs)
                self.parameters[name][...] = scale * rng.standard_normal(shape)

    def loss_and_gradient(self, windows: ByteArray) -> float:
        """Mean bits per byte of a batch; `gradient` becomes that of the mean *nats* per byte.

        windows: uint8 (batch, CONTEXT + 1), the last column is the byte to predict.
        """
        p, g = self.parameters, self._gradients
        batch = len(windows)
        contexts = windows[:, :CONTEXT]
        far, near, a, r, h = self._hidden(contexts)
        probability, nats = softmax_and_loss(h @ p[HEAD_NAME] + p[HEAD_BIAS_NAME], windows[:, -1])

        d_logits = probability
        d_logits[np.arange(batch), windows[:, -1]] -= 1
        d_logits /= batch
        np.matmul(h.T, d_logits, out=g[HEAD_NAME])
        np.sum(d_logits, axis=0, out=g[HEAD_BIAS_NAME])
        d_h = d_logits @ p[HEAD_NAME].T
        d_r = d_h * (r > 0)
        np.matmul(a.T, d_r, out=g[DENSE_NAME])
        np.sum(d_r, axis=0, out=g[BIAS_1_NAME])
        d_h += d_r @ p[DENSE_NAME].T
        d_h *= a > 0
        np.matmul(far.T, d_h, out=g[FAR_NAME])
        np.matmul(near.T, d_h, out=g[NEAR_NAME])
        np.sum(d_h, axis=0, out=g[BIAS_0_NAME])
        d_far, d_near = d_h @ p[FAR_NAME].T, d_h @ p[NEAR_NAME].T
        d_embedded = np.concatenate((d_far, d_near), axis=1).reshape(-1, EMBED)
        sum_rows_by_byte(contexts.reshape(-1), d_embedded, out=g[EMBED_NAME])
        return float(nats.mean() * BITS_PER_NAT)

    def bits_per_byte(self, windows: ByteArray, batch: int = 1024) -> float:
        """Mean bits per byte over uint8 (n, CONTEXT + 1) windows, batched to bound the memory."""
        p = self.parameters
        total = 0.0
        for start in range(0, len(windows), batch):
            part = windows[start : start + batch]
            h = self._hidden(part[:, :CONTEXT])[-1]
            logits = h @ p[HEAD_NAME] + p[HEAD_BIAS_NAME]
            total += float(softmax_and_loss(logits, part[:, -1])[1].sum(dtype=np.float64))
        return total / len(windows) * BITS_PER_NAT

    def _hidden(self, contexts: ByteArray) -> tuple[FloatArray, ...]:
        p = self.parameters
        embedded = p[EMBED_NAME][contexts].reshape(len(contexts), CONTEXT * EMBED)
        far, near = np.split(embedded, [(CONTEXT - NEAR) * EMBED], axis=1)
        a = far @ p[FAR_NAME]
        a += near @ p[NEAR_NAME]
        a += p[BIAS_0_NAME]
        np.maximum(a, 0, out=a)
        r = a @ p[DENSE_NAME]
        r += p[BIAS_1_NAME]
        np.maximum(r, 0, out=r)
        return far, near, a, r, a + r


def named_views(flat: FloatArray) -> dict[str, FloatArray]:
    """The tensors of `SHAPES` as views of one flat array, in the order of `SHAPES`."""
    views, start = {}, 0
    for name, shape in SHAPES.items():
        numel = int(np.prod(shape))
        views[name] = flat[start : start + numel].reshape(shape)
        start += numel
    return views


def softmax_and_loss(logits: FloatArray, targets: ByteArray) -> tuple[FloatArray, FloatArray]:
    """Softmax (written over `logits`) and nats per row of the target bytes."""
    logits -= logits.max(axis=1, keepdims=True)
    at_target = logits[np.arange(len(logits)), targets]
    np.exp(logits, out=logits)
    total = logits.sum(axis=1)
    logits /= total[:, None]
    return logits, np.log(total) - at_target


def sum_rows_by_byte(values: ByteArray, rows: FloatArray, out: FloatArray) -> None:
    """out[b] = sum of the rows whose value is the byte b.

    Sorting and one reduction: ten times as fast as `np.add.at` for a batch of windows.
    """
    order = np.argsort(values, kind="stable")
    present, starts = np.unique(values[order], return_index=True)
    out[...] = 0
    out[present] = np.add.reduceat(rows[order], starts, axis=0)


def sample_windows(text: ByteArray, count: int, rng: np.random.Generator,
                   context: int = CONTEXT) -> ByteArray:
    """`count` windows at random places of `text`: uint8 (count, context + 1)."""
    return windows_at(text, rng.integers(0, len(text) - context, size=count), context)


def even_windows(text: ByteArray, count: int, context: int = CONTEXT) -> ByteArray:
    """At most `count` windows at evenly spaced places of `text`: the same ones every time."""
    places = len(text) - context
    return windows_at(text, np.arange(min(count, places)) * places // min(count, places), context)


def windows_at(text: ByteArray, starts: npt.NDArray[np.int64], context: int) -> ByteArray:
    windows: ByteArray = text[starts[:, None] + np.arange(context + 1)]
    return windows
