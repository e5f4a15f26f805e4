"""An island of several processes: a GPT sharded with FSDP2, and a checkpoint of the island's own.

    torchrun --nproc-per-node 2 examples/torch_fsdp2.py LEARNER_ID HOST:PORT [FOLDER [STEPS]]

With a FOLDER it goes on from the checkpoint there, if there is one; after STEPS of its own it
leaves one there, and the run.
"""

import io
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch_gpt import BATCH, held_out, loss_of

from syncer.demo.model.byte_gpt import ByteGPT
from syncer.demo.model.corpus import load
from syncer.torch import Diloco


class Checkpoint:
    """Model and optimizer, however many ranks there are; and of each rank what its island keeps."""

    def __init__(self, model, optimizer, island):
        self.model, self.optimizer, self.island = model, optimizer, island
        self.name = f"island-{dist.get_rank()}"

    def load(self, folder: str) -> int:
        """Before the `with` statement; how many steps the data are ahead."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer, self.name: b""}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"],
                       optim_state_dict=state["optimizer"])
        return self.island.load_state_dict(torch.load(io.BytesIO(state[self.name])))

    def save(self, folder: str, steps: int) -> None:
        """Between two steps."""
        own = io.BytesIO()
        torch.save(self.island.state_dict(data=steps), own)
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer, self.name: own.getvalue()},
                 checkpoint_id=folder)


def main() -> None:
    if len(sys.argv) not in (3, 4, 5):
        sys.exit(__doc__)
    learner_id, address = int(sys.argv[1]), sys.argv[2]
    folder = sys.argv[3] if len(sys.argv) > 3 else None
    most = int(sys.argv[4]) if len(sys.argv) > 4 else math.inf
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    if on_gpu:
        torch.cuda.set_device(dist.get_node_local_rank())
    torch.set_num_threads(1)
    torch.manual_seed(0)
    corpus = load(0, 1)
    text, rest = (torch.from_numpy(each.copy()) for each in (corpus.shard, corpus.held_out))
    model = ByteGPT().to("cuda" if on_gpu else "cpu")
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    island = Diloco(model, optimizer, address, learner_id=learner_id, run="bytes", fragments=4,
                    tokens_per_step=BATCH * model.context)
    checkpoint, steps = Checkpoint(model, optimizer, island), 0
    if folder and Path(folder, ".metadata").exists():
        steps = checkpoint.load(folder)
    random = torch.Generator().manual_seed(1000 + 100 * learner_id + 10 * steps + dist.get_rank())
    say(f"{held_out(model, rest):.3f} bits per byte at first, behind {steps} steps")
    try:
        with island:
            while not island.finished:
                if folder and steps >= most:
                    checkpoint.save(folder, steps)
                    raise KeyboardInterrupt
                loss = loss_of(model, text, random)
                loss.backward()
                optimizer.step()  # and the step boundary
                optimizer.zero_grad()
                island.report(loss=loss)
                steps += 1
    except KeyboardInterrupt:
        say(f"saved after {steps} steps")
    else:
        say(f"{held_out(model, rest):.6f} merged, after {steps} steps")
    dist.destroy_process_group()


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
