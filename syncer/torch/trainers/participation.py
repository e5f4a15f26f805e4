"""The island that a trainer's callback holds: joined when training begins, left however it ends.

Must not know a library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from syncer.learner import Status
from syncer.torch.island import Diloco

Tracker = Callable[[Diloco], Callable[[Status], object]]
"""Given the island that has joined, what shall hear of its merges."""


class Participation:
    """At most one island at a time.

    trackers: as `syncer.torch.trackers` has them, for the first process of an island. options: what
    `Diloco` takes after the optimizer.
    """

    def __init__(self, address: str, trackers: Sequence[Tracker], options: Mapping[str, Any]):
        self._address, self._trackers, self._options = address, tuple(trackers), dict(options)
        self._inside = False
        self.island: Diloco | None = None
        """The last one, also after its end."""

    @property
    def inside(self) -> Diloco | None:
        """The island while it is in the run."""
        return self.island if self._inside else None

    @property
    def counts_tokens(self) -> bool:
        """Whether each step's tokens are still to be said."""
        return self._options.get("tokens_per_step") is None

    def join(self, model: torch.nn.Module, optimizer: Any,
             state: Mapping[str, Any] | None) -> Diloco:
        """Connects; state: of an island that is gone on from, beside this model and optimizer."""
        self.leave()
        island = self.island = Diloco(model, optimizer, self._address, **self._options)
        if state is not None:
            island.load_state_dict(state)
        if _is_first_process():
            for tracker in self._trackers:
                island.on_merge(tracker(island))
        island.__enter__()
        self._inside = True
        return island

    def finish(self) -> None:
        """Waits for the end of the run; the final model is in the parameters."""
        if (island := self.inside) is not None:
            self._inside = False
            island.__exit__(None, None, None)

    def leave(self) -> None:
        """At once, with the parameters as they are."""
        if (island := self.inside) is not None:
            self._inside = False
            island.__exit__(Left, Left("the trainer has stopped"), None)


class Left(Exception):
    """Why an island is left before the end: its trainer has stopped in the middle."""


def _is_first_process() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or (
        distributed.get_rank() == 0)
