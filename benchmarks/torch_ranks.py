"""What a step boundary costs an island of several processes: without work, and with a pull.

    python -m benchmarks.torch_ranks [RANKS [WIDTH]]

All ranks on this machine, on CPUs. Needs torch.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from syncer.torch import Diloco
from tests.e2e.scripted_server import ScriptedServer
from tests.e2e.waiting import until
from tests.torch import ranks

IDLE, PULLS = 2000, 5


def model_of(width: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(width, 2 * width, bias=False)
                                 for _ in range(4)))


def program(rank: int, address: str, kind: str, width: int, idle: Path,
            ) -> tuple[float, list[float]]:
    """Microseconds without work, and then milliseconds of boundaries that answer."""
    model = model_of(width)
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415
        fully_shard(model)
    island = Diloco(model, None, address, learner_id=1, dtype="bf16", fragments=2, num_streams=1)
    try:
        with island:
            times, parts = [], []
            for _ in range(10):
                start = time.perf_counter()
                for _ in range(IDLE // 10):
                    island.step(1)
                parts.append((time.perf_counter() - start) / (IDLE // 10) * 1e6)
            if rank == 0:
                idle.touch()
            while len(times) < PULLS:
                start = time.perf_counter()
                island.step(1)
                if island.status.answered:
                    times.append((time.perf_counter() - start) * 1e3)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        return statistics.median(parts), times


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    width = int(sys.argv[2]) if len(sys.argv) > 2 else 1024
    for kind in ("ddp", "fsdp"):
        with ScriptedServer() as server, tempfile.TemporaryDirectory() as folder:
            measured = Path(folder, "idle")
            started = ranks.start(Path(folder), program, count, server.address, kind, width,
                                  measured)
            peer = server.accept()
            for fragment, part in enumerate(peer.hello.layout.fragments):
                peer.bcast(fragment, 0, np.zeros(part.numel, "<u2"))
            until(measured.exists, "the boundaries without work")
            for number in range(PULLS):
                peer.pull(0, 1, 1 + number)
                peer.receive_push()
            idle, times = ranks.outcomes(started)[0].value
            numel = peer.hello.layout.fragments[0].numel
            print(f"{kind}, {count} ranks: nothing to do {idle:.0f} us; a pull of "
                  f"{numel / 1e6:.1f} M parameters {statistics.median(times):.1f} ms", flush=True)


if __name__ == "__main__":
    main()
