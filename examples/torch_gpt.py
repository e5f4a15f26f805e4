"""A byte-level GPT in PyTorch as an island of a run: the source files of Python are its text.

    python examples/torch_gpt.py LEARNER_ID HOST:PORT [SECONDS_AT_MOST]
"""

import math
import sys
import sysconfig
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from syncer.torch import Diloco

CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 64, 96, 4, 3, 16


class Block(nn.Module):
    """Attention and a feed-forward part, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).movedim(-3, 0)
        q, k, v = heads.transpose(-3, -2)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(-3, -2).flatten(-2))
        return x + self.narrow(nn.functional.gelu(self.wide(self.norms[1](x))))


class ByteGPT(nn.Module):
    """Guesses the next byte; embedding and head are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, 256, bias=False)
        self.lm_head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.embed(text) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def corpus() -> tuple[torch.Tensor, torch.Tensor]:
    """Text to train on, and a part of it that is held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)
    return text[len(text) // 10:], text[:len(text) // 10]


def loss_of(model: nn.Module, text: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """Of a batch of random places."""
    places = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=random)
    rows = text[places + torch.arange(CONTEXT + 1)].long()
    return cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def held_out(model: nn.Module, text: torch.Tensor) -> float:
    """Bits per byte, always of the same places."""
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        losses = [loss_of(model, text, random) for _ in range(20)]
    return float(torch.stack(losses).mean()) / math.log(2)


def main() -> None:
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    learner_id, address = int(sys.argv[1]), sys.argv[2]
    until = time.monotonic() + float(sys.argv[3] if len(sys.argv) == 4 else "inf")
    torch.set_num_threads(1)  # a machine of its own may use all
    torch.manual_seed(0)
    text, rest = corpus()
    model = ByteGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    random = torch.Generator().manual_seed(1000 + learner_id)  # every island has its own data
    print(f"{held_out(model, rest):.3f} bits per byte at first", flush=True)
    with Diloco(model, optimizer, address, learner_id=learner_id, run="bytes", fragments=4,
                tokens_per_step=BATCH * CONTEXT) as island:
        while not island.finished and time.monotonic() < until:
            loss = loss_of(model, text, random)
            loss.backward()
            optimizer.step()  # and the step boundary
            optimizer.zero_grad()
            island.report(loss=loss)
        own = held_out(model, rest)
    print(f"{own:.3f} bits per byte by itself, {held_out(model, rest):.6f} merged, "
          f"after {island.status.step} steps", flush=True)


if __name__ == "__main__":
    main()
