"""What of a module is in a run, by the names that every learner of it agrees on.

Must not know a run: it is the `Holding` of one model.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from syncer.errors import ConfigError
from syncer.learner.fragment import Packed
from syncer.learner.holding import LocalFragment
from syncer.learner.partition import canonical_name
from syncer.torch.device import device_of
from syncer.torch.device_fragment import DeviceFragment, HostFragment
from syncer.torch.shares import Seat, Share, share_of
from syncer.torch.tensor_piece import LOW_PRECISION, Piece, is_sharded, local, master_of

HELD_TYPES = (torch.float32, *LOW_PRECISION)
COMPILED = re.compile(r"(?<![^.])_orig_mod\.")
"""A part of a name that torch.compile adds."""
BUFFERS = ("local", "average")
ANCHORS = ("host", "device")
ALONE = Seat()


class Weights:
    """The parameters of a module that are trained, and with buffers="average" its float buffers.

    A tied parameter is there once, under its first name. seat: of this process in its island, which
    may have parts of the tensors alone. Raises `ConfigError` for a tensor that cannot be in a run,
    with its name.
    """

    def __init__(self, model: torch.nn.Module, optimizers: tuple[Any, ...], *,
                 buffers: str = "local", anchors: str = "host", seat: Seat = ALONE):
        for what, value, values in (("buffers", buffers, BUFFERS), ("anchors", anchors, ANCHORS)):
            if value not in values:
                raise ConfigError(f"{what} must be one of {', '.join(values)}, found {value!r}")
        self._model, self._optimizers = model, optimizers
        self.reshard()
        self._on_device = anchors == "device"
        self.seat = seat
        _refuse_old_fsdp(model, seat)
        self._trained = {name: (parameter, bool(parameter.requires_grad))
                         for name, parameter in _parameters(model)}
        self._pieces: dict[str, Piece] = {}
        self.shares: dict[str, Share] = {}
        """What of each tensor is in this process."""
        self._places: dict[int, torch.Tensor] = {}
        unwrapped = _Unwrapped(model)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self._add(unwrapped(name), parameter)
        self.statistics: tuple[str, ...] = ()
        """Names of the buffers."""
        if buffers == "average":
            self.statistics = tuple(
                unwrapped(name) for name, buffer in _float_buffers(model)
                if self._add(unwrapped(name), buffer, statistic=True))
        if not self._pieces:
            raise ConfigError("the model has no parameter with requires_grad: there is nothing to "
                              "train in a run")
        _refuse_overlaps(list(self._pieces.values()))
        self._device = device_of(self._only_device())
        self._warned = False

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of every tensor in the run, as a whole."""
        return {name: share.shape for name, share in self.shares.items()}

    @property
    def pieces(self) -> Mapping[str, Piece]:
        """What of every tensor is in this process."""
        return self._pieces

    def fragment(self, names: Sequence[str], dtype: int) -> LocalFragment:
        """What is here of some of them; dtype: that of the session."""
        pieces = [self._pieces[name] for name in names]
        if all(piece.is_plain for piece in pieces):
            return HostFragment(pieces, dtype, self.check)
        return DeviceFragment(pieces, dtype, self._device, keep_on_device=self._on_device,
                              check=self.check)

    def buffer(self, size: int) -> Packed:
        """Memory that the device can copy to while training goes on."""
        memory: Packed = self._device.host(size).numpy()
        return memory

    def check(self) -> None:
        """Raises `ConfigError` if the model is not what it was at the start, and names what."""
        for name, parameter in _parameters(self._model):
            known, trained = self._trained.get(name, (None, False))
            if known is not None and is_sharded(known) and not is_sharded(parameter):
                raise ConfigError(f"parameter {name!r} is gathered for a pass at the moment: the "
                                  "step boundary belongs right behind optimizer.step()")
            if known is not parameter:
                raise ConfigError(f"parameter {name!r} has come into the model after the run was "
                                  "joined: build the model first, then join")
            if bool(parameter.requires_grad) != trained:
                was, what = ("trained", "frozen") if trained else ("frozen", "trained")
                raise ConfigError(
                    f"parameter {name!r} was {was} when the run was joined, and is {what} now: the "
                    "parameters of a run are those with requires_grad at its start")
        for piece in self._pieces.values():
            if (change := piece.changed()) is not None:
                raise ConfigError(f"{piece.name!r} is {change} when the run was joined: move and "
                                  "convert the model first, then join")

    def reshard(self) -> None:
        """Between passes: what fully_shard has gathered for one (an evaluation leaves its outermost
        module so) is in parts again."""
        for module in self._model.modules():
            if hasattr(module, "reshard") and hasattr(module, "unshard"):
                module.reshard()

    def warn_of_masters(self) -> None:
        """Once, when the optimizer has made a step and turns out to keep no f32 values."""
        if self._warned:
            return
        self._warned = True
        coarse = [piece for piece in self._pieces.values() if piece.lacks_master]
        if coarse:
            mib = 4 * sum(piece.numel for piece in coarse) / 2**20
            warnings.warn(
                f"{len(coarse)} tensors, for example {coarse[0].name!r}, are "
                f"{str(coarse[0].tensor.dtype).removeprefix('torch.')} and the optimizer keeps no "
                f"f32 master of them; the run keeps one ({mib:.3g} MiB), so that no blend is lost. "
                "Steps of the optimizer are as coarse as before", stacklevel=2)

    def _add(self, name: str, tensor: torch.Tensor, *, statistic: bool = False) -> bool:
        """Whether it is one more, and not tied to one that is there."""
        here = local(tensor)
        _refuse(name, here)
        place = int(here.data_ptr())
        if place in self._places and _is_tied(self._places[place], here):
            return False
        if name in self._pieces:
            raise ConfigError(f"two tensors are called {name!r} without the prefixes of their "
                              "wrappers")

        def master() -> torch.Tensor | None:
            return None if statistic else master_of(self._optimizers, tensor)

        self._places[place] = here
        self.shares[name] = share_of(name, tensor, self.seat)
        self._pieces[name] = Piece(name, tensor, statistic=statistic, master=master)
        return True

    def _only_device(self) -> torch.device:
        first, *others = self._pieces.values()
        for piece in others:
            if piece.tensor.device != first.tensor.device:
                raise ConfigError(
                    f"{first.name!r} is on {first.tensor.device} and {piece.name!r} on "
                    f"{piece.tensor.device}: all tensors of a run must be on one device")
        return torch.device(first.tensor.device)


class _Unwrapped:
    """Names without the parts that wrappers add, so that all learners agree on them."""

    def __init__(self, model: torch.nn.Module):
        parallel = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
        self._prefixes = [f"{name}.module." if name else "module."
                          for name, module in model.named_modules() if isinstance(module, parallel)]

    def __call__(self, name: str) -> str:
        for prefix in reversed(self._prefixes):  # the innermost first
            if name.startswith(prefix):
                name = prefix.removesuffix("module.") + name.removeprefix(prefix)
        return canonical_name(COMPILED.sub("", name))


def _parameters(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """All names, also of what is tied."""
    return list(model.named_parameters(remove_duplicate=False))


def _float_buffers(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Those that a checkpoint of the model has, too."""
    found = []
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            own = name.rpartition(".")[2]
            if own not in module._non_persistent_buffers_set and buffer.is_floating_point():
                if not bool(torch.isfinite(buffer).all()):
                    raise ConfigError(f"buffer {name!r} is not finite and cannot be averaged")
                found.append((name, buffer))
    return found


def _refuse(name: str, tensor: torch.Tensor) -> None:
    """Raises for a tensor that no run can hold."""
    if torch.nn.parameter.is_lazy(tensor):
        raise ConfigError(f"{name!r} has no shape yet: run the model once, then join")
    if tensor.device.type == "meta":
        raise ConfigError(f"{name!r} has no values yet (device meta): initialise the model first")
    if tensor.dtype not in HELD_TYPES or tensor.layout != torch.strided:
        raise ConfigError(f"{name!r} is {tensor.dtype} ({tensor.layout}), expected a dense tensor "
                          "of float32, bfloat16 or float16")
    if any(stride == 0 and size > 1
           for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ConfigError(f"{name!r} is expanded: several of its elements are one in memory; make "
                          "it contiguous first")


def _refuse_old_fsdp(model: torch.nn.Module, seat: Seat) -> None:
    if seat.ranks > 1 and any(type(module).__name__ == "FullyShardedDataParallel"
                              for module in model.modules()):
        raise ConfigError("the model is in FullyShardedDataParallel, whose parts have no shape "
                          "that an island could read back: shard it with fully_shard")


def _is_tied(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Of two at the same place: whether they are the same elements in the same order."""
    return one is other or (
        one.numel() > 0 and one.dtype == other.dtype and one.shape == other.shape
        and one.stride() == other.stride() and one.device == other.device)


def _refuse_overlaps(pieces: Sequence[Piece]) -> None:
    places = sorted((piece.tensor.data_ptr(), _span(piece.tensor), piece.name) for piece in pieces
                    if piece.numel)
    for (start, size, name), (behind, _, other) in itertools.pairwise(places):
        if start + size > behind:
            raise ConfigError(f"{name!r} and {other!r} share memory and are not the same tensor: "
                              "one would be merged into the other")


def _span(tensor: torch.Tensor) -> int:
    """Bytes from its first element to behind its last."""
    last = sum(stride * (size - 1)
               for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return int(tensor.element_size() * (last + 1))
