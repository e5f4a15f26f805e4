"""Islands of several processes: each rank is a process with a program of its own, and a bound."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.torch.island import torch  # isort: split

import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.device_mesh import init_device_mesh

WAIT_S = 240.0


class Outcome(NamedTuple):
    """What the program of a rank has returned, or how it has ended."""

    returned: Any
    raised: BaseException | None
    text: str

    @property
    def value(self) -> Any:
        assert self.raised is None, self.text
        return self.returned

    @property
    def error(self) -> BaseException:
        assert self.raised is not None, f"it has returned {self.returned}"
        return self.raised


class Process:
    """One that runs a program after the other: importing torch takes longer than most of them."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def begin(self, *job: Any) -> None:
        self._pipe.send(job)

    def outcome(self) -> Outcome:
        """Of what was begun last."""
        if not self._pipe.poll(WAIT_S):
            self.kill()
            raise AssertionError("a rank hangs")
        return Outcome(*self._pipe.recv())

    def kill(self) -> None:
        """At once, as a machine that is gone."""
        self._process.kill()
        self._process.join()


_processes: list[Process] = []


def start(directory: Path, program: Callable[..., Any], count: int, *arguments: Any,
          ) -> list[Process]:
    """Runs `program(rank, *arguments)` in so many processes that are one gloo world."""
    _processes[:] = [process for process in _processes if process.is_alive]
    while len(_processes) < count:
        _processes.append(Process())
    rendezvous = f"file://{directory}/{os.urandom(4).hex()}"
    started = _processes[:count]
    for rank, process in enumerate(started):
        process.begin(rendezvous, program, rank, count, arguments)
    return started


def run(directory: Path, program: Callable[..., Any], count: int, *arguments: Any) -> list[Outcome]:
    """`start`, and their ends."""
    return outcomes(start(directory, program, count, *arguments))


def outcomes(started: Sequence[Process]) -> list[Outcome]:
    try:
        return [process.outcome() for process in started]
    except BaseException:
        for process in started:
            process.kill()
        raise


def _serve(pipe: Any) -> None:
    torch.set_num_threads(1)
    for name in [name for name in os.environ if name.startswith(("SYNCER_", "YETO_"))]:
        del os.environ[name]
    while True:
        try:
            rendezvous, program, rank, count, arguments = pipe.recv()
        except EOFError:
            return
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=count)
        dist.barrier()
        try:
            found = program(rank, *arguments), None, ""
        except BaseException as raised:
            found = None, raised, traceback.format_exc()
        pipe.send(found)
        dist.destroy_process_group()


def model_of(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Shapes that two ranks share unevenly, and a last layer of which the second one has nothing.
    """
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(),
                               torch.nn.Linear(3, 1)).to(dtype)


def spread(kind: str, model: torch.nn.Module) -> torch.nn.Module:
    """The model as the ranks of an island of this kind have it."""
    if kind == "plain":
        return model
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    shape, ignored = (dist.get_world_size(),), set()
    if kind == "hybrid":
        shape = (2, dist.get_world_size() // 2)
    if kind == "ignoring":
        ignored = {model[2].bias}
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape):])
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=ignored)
    return model


def values_of(model: torch.nn.Module) -> list[float]:
    """Of the whole model, in f32."""
    found = []
    for parameter in model.parameters():
        whole = parameter.detach()
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        found += whole.float().reshape(-1).tolist()
    return found


def here(model: torch.nn.Module) -> list[torch.Tensor]:
    """The memory of this process."""
    with torch.no_grad():
        return [p.to_local() if hasattr(p, "to_local") else p.detach() for p in model.parameters()]
