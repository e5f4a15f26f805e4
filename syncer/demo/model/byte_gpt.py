"""A byte-level GPT in PyTorch, and the student of the demo that has it. Imported only with --torch.

Must not know about shards or the server.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from syncer.demo import settings
from syncer.demo.model.byte_model import BITS_PER_NAT, VOCABULARY, ByteArray, FloatArray
from syncer.torch.weights import Weights


class GptBlock(nn.Module):  # type: ignore[misc]  # of a library without types here
    """Attention and a feed-forward part, each behind a norm."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0)
        q, k, v = heads.transpose(-3, -2)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(-3, -2).flatten(-2))
        return x + self.narrow(gelu(self.wide(self.norms[1](x))))


class ByteGPT(nn.Module):  # type: ignore[misc]  # as above
    """Guesses every next byte of (batch, context) bytes; embedding and head are one parameter."""

    def __init__(self, context: int = 64, width: int = 96, heads: int = 4, layers: int = 3):
        super().__init__()
        self.context = context
        self.embed = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.layers = nn.ModuleList([GptBlock(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self.lm_head.weight = self.embed.weight
        for each in (self.embed, self.positions):
            nn.init.normal_(each.weight, std=0.02)

    def forward(self, text: Any) -> Any:
        x = self.embed(text) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))

    def loss(self, rows: Any) -> Any:
        """Mean nats per byte of (batch, context + 1) bytes."""
        rows = rows.long()
        return cross_entropy(self(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


class TorchStudent:
    """A `Student`; `flat` is the memory of the module's parameters."""

    batch = settings.TORCH_BATCH
    learning_rate = settings.TORCH_LEARNING_RATE

    def __init__(self, seed: int):
        torch.manual_seed(seed)
        self.module = ByteGPT()
        self.context = self.guesses = self.module.context
        named = dict(self.module.named_parameters())
        self.flat: FloatArray = np.concatenate(
            [each.detach().numpy().reshape(-1) for each in named.values()])
        self.parameters: dict[str, FloatArray] = {}
        start = 0
        for name, parameter in named.items():
            view = self.flat[start : start + parameter.numel()].reshape(parameter.shape)
            self.parameters[name] = view
            parameter.data = torch.from_numpy(view)
            start += parameter.numel()
        self._optimizer = torch.optim.AdamW(
            self.module.parameters(), betas=(0.9, 0.99), weight_decay=0.01)
        self.held = Weights(self.module, (self._optimizer,))

    def train(self, windows: ByteArray, rate: float) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        loss = self.module.loss(torch.from_numpy(windows))
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return float(loss.detach()) * BITS_PER_NAT

    def bits_per_byte(self, windows: ByteArray) -> float:
        with torch.no_grad():
            losses = [self.module.loss(part) * len(part)
                      for part in torch.from_numpy(windows).split(32)]
        return float(torch.stack(losses).sum()) / len(windows) * BITS_PER_NAT
