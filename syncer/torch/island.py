"""`Diloco`: joins a run with a model and its optimizer, and leaves it with the merged model.

Counts optimizer steps by a hook and gives each step boundary to a `Learner`. Must not touch the
state of an optimizer, sockets, or wire bytes.
"""

from __future__ import annotations

import math
import operator
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, SupportsFloat, SupportsIndex

import torch

from syncer.errors import ConfigError, LocalProtocolError
from syncer.learner import Status
from syncer.learner.reports import FIGURES_S
from syncer.torch.members import Joined, join
from syncer.torch.shares import Seat
from syncer.torch.weights import Weights


class Diloco:
    """One island of a Decoupled DiLoCo run, for the model of this process, or of several.

        with Diloco(model, optimizer, "host:29400", learner_id=0) as island:
            for batch in data:
                loss(model, batch).backward(); optimizer.step(); optimizer.zero_grad()
                island.tokens(batch.numel())
                if island.finished:
                    break

    model: its parameters with requires_grad at this moment are in the run, in f32, bf16 or f16, on
    one device. optimizer: one, or several that step in turn; a step boundary is right behind a step
    of the last one. None: the loop calls `step` itself. address, learner_id and everything else
    (run, dtype, fragments, alpha, key, tls, error_feedback, ...): as in `syncer.learner.Learner`.
    tokens_per_step: raw tokens of each optimizer step; None: the loop says them with `tokens`.
    buffers: "local", each island keeps its own; "average": those of the merged model are the
    average of what the islands have. anchors: "host" or "device", where 4 bytes a parameter are.

    Where torch.distributed has several processes, all of them are one island, with DDP or
    fully_shard, and do the same here at the same place of their loops: the constructor, `with`, a
    step, `state_dict`. Rank 0 alone has the connection: the arguments of `Learner` are read there.
    group: of gloo, with the processes of this island; None: made of all. ranks_timeout_s: how long
    one waits for another; then `IslandBroken` names that rank, and the island ends.

    Entering connects. A learner that joins a run that goes on begins with its values, waiting for
    them. Leaving without an exception waits for the end of the run and has the final model, to the
    bit in f32; an exception leaves the run at once. Raises as `Learner` does, and `ConfigError` for
    a model that cannot be in a run, or has become another one since.

    Large: half of it is what a training loop may call.
    """

    def __init__(self, model: torch.nn.Module,
                 optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None,
                 address: str, *, learner_id: int = 0, tokens_per_step: int | None = None,
                 buffers: str = "local", anchors: str = "host", avg_regex: str | None = None,
                 group: Any = None, ranks_timeout_s: float = 600.0, **learner: Any):
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"the model must be a torch.nn.Module, found {type(model).__name__}")
        if tokens_per_step is not None and not (
                isinstance(tokens_per_step, SupportsIndex) and operator.index(tokens_per_step) > 0):
            raise ConfigError("tokens_per_step must be a whole number of at least 1, or None, "
                              f"found {tokens_per_step!r}")
        if not ranks_timeout_s > 0:
            raise ConfigError(f"ranks_timeout_s must be more than 0, found {ranks_timeout_s!r}")
        self._group, self._ranks_timeout_s = group, float(ranks_timeout_s)
        self._optimizers = _optimizers(optimizer)
        self._weights = Weights(model, self._optimizers, buffers=buffers, anchors=anchors,
                                seat=_seat(group))
        self._options = learner | {
            "learner_id": learner_id, "avg_regex": _with_names(avg_regex, self._weights.statistics)}
        self._address = address
        self._per_step = tokens_per_step
        self._reported = 0
        """Tokens since the last boundary."""
        self._owed = False
        """Whether an optimizer step has been made whose tokens are not known yet."""
        self._callbacks: list[Callable[[Status], object]] = []
        self._next_report = -math.inf
        self.reported: dict[str, float | None] = {}
        """The newest figures that `report` has read."""
        self._learner: Joined | None = None
        self._status: Status | None = None
        self._hook: Any = None

    # --- what a training loop calls --------------------------------------------------------------

    def __enter__(self) -> Diloco:
        if self._learner is not None:
            raise LocalProtocolError("this island has joined already; make another one")
        self._weights.reshard()
        learner = self._learner = join(self._weights, self._address, self._options, self._group,
                                       self._ranks_timeout_s)
        self._status = learner.status
        if self._optimizers:
            self._hook = self._optimizers[-1].register_step_post_hook(self._stepped)
        return self

    def __exit__(self, *raised: Any) -> None:
        if self._hook is not None:
            self._hook.remove()
        learner = self._joined()
        if raised[0] is not None:
            learner.__exit__(*raised)
            return
        with learner:
            self._weights.reshard()
            self._status = learner.finish()

    def tokens(self, count: SupportsIndex) -> None:
        """Says how many raw tokens were used; call it after `optimizer.step()`, or for each part of
        a batch whose gradients are accumulated."""
        if self._per_step is not None:
            raise LocalProtocolError(f"tokens_per_step={self._per_step} says it already: leave one "
                                     "of them out")
        self._reported += operator.index(count)
        if self._owed:
            self._owed = False
            self._boundary()

    def step(self, tokens: SupportsIndex) -> Status:
        """The step boundary of a loop that gave no optimizer: after every step, on so many
        tokens."""
        if self._optimizers:
            raise LocalProtocolError("the optimizer's steps are counted already: call tokens(), or "
                                     "give None for the optimizer")
        self._reported += operator.index(tokens)
        self._boundary()
        return self.status

    @property
    def finished(self) -> bool:
        """Training is over: leave the loop."""
        return self.status.finished

    @property
    def status(self) -> Status:
        """What the last step boundary did, and where the learner stands."""
        if self._status is None:
            raise LocalProtocolError("this island has not joined yet: use it in a with statement")
        return self._status

    @property
    def bytes_sent(self) -> int:
        """Bytes handed to the network so far."""
        return self._joined().bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes received so far."""
        return self._joined().bytes_received

    def on_merge(self, callback: Callable[[Status], object]) -> Callable[[Status], object]:
        """Calls `callback(status)` after each boundary that has blended merged fragments in."""
        self._callbacks.append(callback)
        return callback

    def report(self, **figures: SupportsFloat | None) -> None:
        """`Learner.report`: loss, tokens_per_s, lr, goodput. Tensors are read about once a second,
        whatever is said between is dropped."""
        now = time.monotonic()
        if now >= self._next_report:
            self._next_report = now + FIGURES_S
            read = {name: _figure(each) for name, each in figures.items()}
            self._joined().report(**read)
            self.reported = read

    def state_dict(self, data: Any = None) -> dict[str, Any]:
        """What belongs into a checkpoint of the island beside model and optimizer: anchors (4 bytes
        a parameter), versions and counters, as tensors of the host. data: where your data are, for
        `load_state_dict` to return. Between two steps."""
        state = self._joined().state_dict() | {"data": data}
        return _with_kept(state, torch.from_numpy)

    def load_state_dict(self, state: Mapping[str, Any]) -> Any:
        """Goes on from a `state_dict`, with the model and optimizer saved beside it: before the
        `with` statement. Returns the `data` that it was given."""
        if self._learner is not None:
            raise LocalProtocolError("this island has joined already: load its state before the "
                                     "with statement")
        self._options["state"] = _with_kept(state, torch.Tensor.numpy)
        return state.get("data")

    def save_layout(self, path: str) -> None:
        """Writes names, shapes and fragments as JSON, for exports. Raises `ConfigError`."""
        self._joined().save_layout(path)

    # --- the step boundary -----------------------------------------------------------------------

    def _stepped(self, optimizer: Any, *_: object) -> None:
        """After each step of the (last) optimizer."""
        found_inf = getattr(optimizer, "found_inf", None)  # of a GradScaler whose optimizer skips
        if found_inf is not None and bool(found_inf):
            return
        if self._per_step is not None:
            self._reported = operator.index(self._per_step)
        elif self._owed:
            raise LocalProtocolError(
                "a second optimizer step, and nobody has said how many tokens the first one used: "
                "call tokens(n) after each optimizer.step(), or give tokens_per_step")
        elif not self._reported:
            self._owed = True
            return
        self._boundary()

    def _boundary(self) -> None:
        tokens, self._reported = self._reported, 0
        status = self._status = self._joined().step(tokens)
        if status.applied:
            for callback in self._callbacks:
                callback(status)
        if status.answered and not self._weights.seat.rank:
            self._weights.warn_of_masters()

    def _joined(self) -> Joined:
        if self._learner is None:
            raise LocalProtocolError("this island has not joined yet: use it in a with statement")
        return self._learner


def _with_kept(state: Mapping[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    """The state with its arrays as tensors, or the other way round."""
    return dict(state) | {"fragments": [
        record and record | {"kept": {name: convert(each) for name, each in record["kept"].items()}}
        for record in state["fragments"]]}


def _figure(value: Any) -> float | None:
    """A number, also of a tensor that is part of a graph."""
    value = value.detach() if isinstance(value, torch.Tensor) else value
    return None if value is None else float(value)


def _optimizers(given: Any) -> tuple[Any, ...]:
    if given is None:
        return ()
    found = tuple(map(_unwrapped, given if isinstance(given, Iterable) else (given,)))
    for optimizer in found:
        if not hasattr(optimizer, "register_step_post_hook"):
            raise ConfigError("the optimizer must be a torch.optim.Optimizer, several of them, or "
                              f"None, found {type(optimizer).__name__}")
    return found


def _unwrapped(optimizer: Any) -> Any:
    """The one that makes the steps: a wrapper without hooks (Accelerate's) may leave some out."""
    while not hasattr(optimizer, "_optimizer_step_post_hooks") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _with_names(avg_regex: str | None, names: tuple[str, ...]) -> str | None:
    """Matches these names as well."""
    exact = [f"^(?:{'|'.join(map(re.escape, names))})$"] if names else []
    parts = exact if avg_regex is None else [f"(?:{avg_regex})", *exact]
    return "|".join(parts) or None


def _seat(group: Any) -> Seat:
    """Of this process among those of the island."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        if group is not None:
            raise ConfigError("a group was given, and torch.distributed is not initialized")
        return Seat()
    if group is not None and distributed.get_backend(group) != "gloo":
        raise ConfigError("the group of an island must be of gloo, which sends memory of the host; "
                          f"found {distributed.get_backend(group)}")
    return Seat(distributed.get_rank(group), distributed.get_world_size(group))
