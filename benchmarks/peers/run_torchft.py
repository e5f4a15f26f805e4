"""A replica group of torchft's DiLoCo over gloo, and with `hub` its lighthouse.

The inner optimizer has no gradients, so that a step is a sync and nothing else.
"""

from __future__ import annotations

import os
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

from benchmarks.peers.part import given, synced

PORT = 29610
TENSORS = 8
PATIENCE = timedelta(seconds=60)


def hub() -> None:
    lighthouse = LighthouseServer(bind=f"0.0.0.0:{PORT}", min_replicas=1, join_timeout_ms=1000)
    print("listening", flush=True)
    threading.Event().wait()
    lighthouse.shutdown()


def main() -> None:
    part = given()
    os.environ.update(TORCHFT_LIGHTHOUSE=f"http://{part.hub}:{PORT}", RANK="0", WORLD_SIZE="1",
                      REPLICA_GROUP_ID=str(part.rank), GLOO_SOCKET_IFNAME=part.interface)
    torch.set_num_threads(1)
    store_port = PORT + 1 + part.rank
    store = dist.TCPStore(part.own, store_port, is_master=True, wait_for_workers=False)
    model = torch.nn.ParameterList(
        torch.nn.Parameter(torch.zeros(part.numel // TENSORS)) for _ in range(TENSORS))
    manager = Manager(
        pg=ProcessGroupGloo(timeout=PATIENCE), min_replica_size=1, use_async_quorum=False,
        load_state_dict=lambda state: None, state_dict=dict, replica_id=f"replica-{part.rank}",
        store_addr=part.own, store_port=store_port, rank=0, world_size=1, timeout=PATIENCE,
        hostname=part.own, init_sync=False)  # all begin with the same values
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    with DiLoCo(manager, [model], inner, outer, sync_every=1):
        kept = 0
        for _ in part.counted:
            inner.step()
            synced(manager.num_participants() if manager.current_step() > kept else 0)
            kept = manager.current_step()
    manager.shutdown(wait=False)
    del store


if __name__ == "__main__":
    hub() if sys.argv[1] == "hub" else main()
