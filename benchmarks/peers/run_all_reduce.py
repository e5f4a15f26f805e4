"""A participant of a plain all-reduce of torch.distributed over gloo, which cannot recover."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from benchmarks.peers.part import given, synced

FORMS = {"f32": torch.float32, "bf16": torch.bfloat16}


def main() -> None:
    part = given()
    os.environ["GLOO_SOCKET_IFNAME"] = part.interface
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{part.first}:29600", rank=part.rank,
                            world_size=part.world, timeout=timedelta(seconds=60))
    values = torch.zeros(part.numel, dtype=FORMS[part.form])
    for _ in part.counted:
        dist.all_reduce(values)
        synced(part.world)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
