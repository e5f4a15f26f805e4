"""LoRA: a small GPT learns a second language by adapters, which alone are in the run.

    python examples/torch_lora.py LEARNER_ID HOST:PORT

Every island makes the same base model on the spot, by some steps on the source of Python; the run
then teaches it the same text with upper and lower case swapped. `pip install peft`.
"""

import math
import sys

import peft
import torch

from syncer.demo.model.byte_gpt import ByteGPT
from syncer.demo.model.corpus import load
from syncer.torch import Diloco

BATCH, BASE_STEPS = 16, 150


def rows(text: torch.Tensor, count: int, random: torch.Generator, context: int) -> torch.Tensor:
    """From random places."""
    places = torch.randint(len(text) - context, (count, 1), generator=random)
    return text[places + torch.arange(context + 1)]


def swapped(text: torch.Tensor) -> torch.Tensor:
    """The other language."""
    return torch.frombuffer(bytearray(bytes(text.tolist()).swapcase()), dtype=torch.uint8)


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    learner_id, address = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)  # a machine of its own may use all
    torch.manual_seed(0)
    text = torch.from_numpy(load(0, 1).held_out.copy())
    gpt = ByteGPT(width=64, layers=2)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=3e-3)
    random = torch.Generator().manual_seed(0)  # the same base in every island
    for _ in range(BASE_STEPS):
        gpt.loss(rows(text, BATCH, random, gpt.context)).backward()
        optimizer.step()
        optimizer.zero_grad()

    other, measured = swapped(text[:-20_000]), swapped(text[-20_000:])
    test = rows(measured, 128, random, gpt.context)
    model = peft.get_peft_model(gpt, peft.LoraConfig(
        r=8, target_modules=["qkv", "out", "wide", "narrow"]))
    optimizer = torch.optim.AdamW(
        [each for each in model.parameters() if each.requires_grad], lr=3e-3)
    random.manual_seed(1000 + learner_id)  # every island has its own data

    def bits() -> float:
        with torch.no_grad():
            return float(gpt.loss(test)) / math.log(2)

    before = bits()
    with Diloco(model, optimizer, address, learner_id=learner_id, run="lora", fragments=2,
                tokens_per_step=BATCH * gpt.context) as island:
        while not island.finished:
            loss = gpt.loss(rows(other, BATCH, random, gpt.context))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            island.report(loss=loss)
    trained, every = model.get_nb_trainable_parameters()
    print(f"{trained:,} of {every:,} parameters in the run; {before:.3f} bits per byte before, "
          f"{bits():.6f} merged", flush=True)


if __name__ == "__main__":
    main()
