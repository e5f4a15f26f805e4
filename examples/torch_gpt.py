"""A byte-level GPT in PyTorch as an island of a run: the source files of Python are its text.

    python examples/torch_gpt.py LEARNER_ID HOST:PORT [SECONDS_AT_MOST]
"""

import math
import sys
import time

import torch

from syncer.demo.model.byte_gpt import ByteGPT
from syncer.demo.model.corpus import load
from syncer.torch import Diloco

BATCH = 16


def loss_of(model: ByteGPT, text: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """Of a batch of random places."""
    places = torch.randint(len(text) - model.context, (BATCH, 1), generator=random)
    return model.loss(text[places + torch.arange(model.context + 1)])


def held_out(model: ByteGPT, text: torch.Tensor) -> float:
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
    corpus = load(0, 1)
    text, rest = (torch.from_numpy(each.copy()) for each in (corpus.shard, corpus.held_out))
    model = ByteGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    random = torch.Generator().manual_seed(1000 + learner_id)  # every island has its own data
    print(f"{held_out(model, rest):.3f} bits per byte at first", flush=True)
    with Diloco(model, optimizer, address, learner_id=learner_id, run="bytes", fragments=4,
                tokens_per_step=BATCH * model.context) as island:
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
