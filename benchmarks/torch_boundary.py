"""What a PyTorch loop pays at a step boundary: without work, and with a pull at 100 M parameters.

    python -m benchmarks.torch_boundary [--small]

Beside each pull stand one copy of that fragment and its packing alone, by the same functions on the
same memory, in turns. Needs torch; on a CPU.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager

import numpy as np
import torch

from syncer.protocol import DTYPES, tensor_bytes
from syncer.torch import Diloco
from tests.e2e.scripted_server import ScriptedServer
from tests.e2e.waiting import until

STEPS, PULLS = 20_000, 7
CODES = {name: code for code, name in DTYPES.items()}


def model_of(width: int, dtype: torch.dtype) -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(width, 2 * width, bias=False, dtype=dtype)
                                 for _ in range(12)))


@contextmanager
def joined(model: torch.nn.Module, dtype: str):
    """(island, the server's end) with an anchor for every fragment."""
    with ScriptedServer() as server:
        island = Diloco(model, None, server.address, learner_id=1, dtype=dtype, fragments=8,
                        num_streams=1, key="")
        try:
            entering = threading.Thread(target=island.__enter__)
            entering.start()
            peer = server.accept()
            for fragment, part in enumerate(peer.hello.layout.fragments):
                size = 4 * part.numel if dtype == "f32" else 2 * part.numel
                peer.bcast(fragment, 0, np.zeros(size, np.uint8))
            entering.join()
            yield island, island._joined(), peer
        finally:
            island.__exit__(AssertionError)


def microseconds(call: Callable[[], object], times: int) -> float:
    """The median of ten parts of so many calls."""
    parts = []
    for _ in range(10):
        start = time.perf_counter_ns()
        for _ in range(times // 10):
            call()
        parts.append((time.perf_counter_ns() - start) / (times // 10) / 1000)
    return statistics.median(parts)


def without_work() -> None:
    """The hook and the boundary behind it, as `optimizer.step()` calls them."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with joined(model_of(8, torch.float32), "bf16") as (island, _, _):
        island._per_step = 10
        once = microseconds(lambda: island._stepped(optimizer, (), {}), STEPS)
        island._per_step = None

        def said() -> None:
            island._stepped(optimizer, (), {})
            island.tokens(10)

        print(f"nothing to do: {once:.1f} us a step, {microseconds(said, STEPS):.1f} us with "
              "tokens()", flush=True)


def pulls(width: int, kind: torch.dtype, dtype: str) -> None:
    model = model_of(width, kind)
    with joined(model, dtype) as (island, learner, peer):
        fragment = learner._fragments[0]
        packed = np.empty(tensor_bytes(fragment.numel, CODES[dtype]), np.uint8)
        flat = torch.empty(fragment.numel, dtype=torch.float32)
        times: dict[str, list[float]] = {"boundary": [], "packing": [], "copy": []}

        def timed(name: str, call: Callable[[], object]) -> None:
            start = time.perf_counter()
            call()
            times[name].append(1000 * (time.perf_counter() - start))

        def copy() -> None:
            flat.copy_(torch.cat([piece.tensor.detach().view(-1) for piece in fragment._pieces]))

        for number in range(PULLS):
            step = 1 + number % 8
            peer.pull(0, step, 1 + number)
            until(lambda: learner._session.due_pulls() or learner._session.pulls, "the pull")
            timed("boundary", lambda: island.step(10))
            if not island.status.answered:
                island.step(10)
            peer.receive_push()
            timed("packing", lambda: fragment.pack_delta(packed))
            timed("copy", copy)
        medians = {name: statistics.median(found[1:]) for name, found in times.items()}
        print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters, "
              f"{str(kind).removeprefix('torch.')} weights, {dtype} deltas, fragment of "
              f"{fragment.numel / 1e6:.1f} M: boundary with a pull {medians['boundary']:.1f} ms, "
              f"its packing {medians['packing']:.1f} ms, one copy {medians['copy']:.1f} ms",
              flush=True)


def main() -> None:
    width = 64 if "--small" in sys.argv else 2048
    without_work()
    for kind, dtype in ((torch.float32, "f32"), (torch.float32, "bf16"), (torch.float32, "q4"),
                        (torch.bfloat16, "bf16"), (torch.bfloat16, "q4")):
        pulls(width, kind, dtype)


if __name__ == "__main__":
    main()
