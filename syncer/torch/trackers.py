"""What there is to see of an island's merges, into W&B, TensorBoard, trackio or anything else.

    island.on_merge(wandb_log(island))

Must not import one of these libraries before its logger is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from syncer.learner import Status
from syncer.torch.island import Diloco

PREFIX = "island/"
OWN_STEP = PREFIX + "step"
MergeLog = Callable[[Status], None]
"""What `Diloco.on_merge` takes."""


class MergeFigures:
    """The figures of each boundary that has blended something, by name.

    | name | what it is |
    |---|---|
    | `island/step` | optimizer steps of this island |
    | `island/version` | outer step of the newest fragment here |
    | `island/versions_behind` | outer steps by which the oldest fragment here is older |
    | `island/steps_since_merge` | own steps since the fragments blended now were blended before |
    | `island/merges` | fragments blended so far |
    | `island/bytes_sent`, `island/bytes_received` | on the network so far |
    | `island/connected` | 1, or 0 in an outage |
    | `island/loss`, `island/lr`, ... | the newest that were given to `island.report` |
    """

    def __init__(self, island: Diloco):
        self._island = island
        self._merges = 0
        self._blended: dict[int, int] = {}
        """Own step of the last blend of each fragment."""

    def __call__(self, status: Status) -> dict[str, float]:
        fragments = {fragment for fragment, _ in status.applied}
        ages = [status.step - self._blended.get(fragment, 0) for fragment in fragments]
        self._blended |= dict.fromkeys(fragments, status.step)
        self._merges += len(status.applied)
        found = {
            "step": status.step, "version": max(status.versions),
            "versions_behind": max(status.versions) - min(status.versions),
            "steps_since_merge": sum(ages) / len(ages), "merges": self._merges,
            "bytes_sent": self._island.bytes_sent, "bytes_received": self._island.bytes_received,
            "connected": float(status.connected),
        } | {name: value for name, value in self._island.reported.items() if value is not None}
        return {PREFIX + name: value for name, value in found.items()}


def wandb_log(island: Diloco, run: Any = None) -> MergeLog:
    """Into a run of W&B; None: the current one. `island/step` is the axis of these figures."""
    into = _library("wandb") if run is None else run
    into.define_metric(PREFIX + "*", step_metric=OWN_STEP)
    return _each(island, into.log)


def trackio_log(island: Diloco, run: Any = None) -> MergeLog:
    """Into a run of trackio; None: the current one."""
    into = _library("trackio") if run is None else run
    return _each(island, into.log)


def tensorboard_log(island: Diloco, writer: Any = None) -> MergeLog:
    """Into a `SummaryWriter`; None: one with torch's own choice of a folder, ./runs/..."""
    if writer is None:
        _library("tensorboard")
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter()

    def log(figures: dict[str, float]) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, int(figures[OWN_STEP]))

    return _each(island, log)


def _each(island: Diloco, log: Callable[[dict[str, float]], object]) -> MergeLog:
    figures = MergeFigures(island)

    def merged(status: Status) -> None:
        log(figures(status))

    return merged


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ModuleNotFoundError(
            f"this log needs {name}; install it with: pip install {name}", name=name) from None
