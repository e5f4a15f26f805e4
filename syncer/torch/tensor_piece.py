"""One tensor of a model as the run sees it: f32 values, whatever its own type and place.

Of a tensor that is sharded over processes (a DTensor) it is the part that is in this one.

Must not know fragments, or a device beyond what torch's own copies do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LOW_PRECISION = (torch.bfloat16, torch.float16)
MASTER = "master"
"""In the name under which an optimizer keeps the f32 master of a parameter in its state."""


class Piece:
    """A parameter, or a buffer that is averaged.

    statistic: it is merged and never blended; only `adopt` and the final cut change it. master:
    the f32 values that an optimizer has made `tensor` of, if it keeps some at the moment.
    """

    def __init__(self, name: str, tensor: torch.Tensor, *, statistic: bool,
                 master: Callable[[], torch.Tensor | None]):
        self.name, self._whole, self.statistic = name, tensor, statistic
        self._master = master
        self._is_sharded = is_sharded(tensor)
        self.numel = int(self.tensor.numel())
        self.shape = tuple(self.tensor.shape)
        self.is_low = tensor.dtype in LOW_PRECISION
        self._kind = self._kind_now()

    @property
    def tensor(self) -> torch.Tensor:
        """What is in this process, where it is now."""
        return local(self._whole) if self._is_sharded else self._whole

    @property
    def is_plain(self) -> bool:
        """Whether it is what NumPy can change in place."""
        return (self.tensor.device.type == "cpu" and self.tensor.dtype == torch.float32
                and self.tensor.is_contiguous() and not self.statistic)

    @property
    def lacks_master(self) -> bool:
        """Whether its own values are too coarse for a blend, and the optimizer keeps no others."""
        return self.is_low and not self.statistic and self._master() is None

    def changed(self) -> str | None:
        """What it has become since the start that it must not become, for a sentence."""
        now = self._kind_now()
        return None if now == self._kind else f"{_words(now)}, and was {_words(self._kind)}"

    def read(self, into: torch.Tensor) -> None:
        """The values as they are, flat, widened to f32."""
        master = self._master() if self.is_low else None
        into.view(self.shape).copy_(self.tensor.detach() if master is None else master)

    def write(self, values: torch.Tensor) -> None:
        """Takes flat f32 values, here and in the optimizer's master."""
        shaped = values.view(self.shape)
        for taker in (self._master() if self.is_low else None, self.tensor.detach()):
            if taker is not None:
                taker.copy_(shaped)

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """f32 values as this tensor would hold them, in f32."""
        return values.to(self.tensor.dtype).to(torch.float32)

    def _kind_now(self) -> tuple[Any, ...]:
        tensor = self.tensor
        return tensor.dtype, tensor.device, tuple(tensor.shape), tensor.is_contiguous()


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor, of which a process may have a part."""
    return getattr(tensor, "device_mesh", None) is not None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that is in this process; all of a plain one."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():  # the memory itself, and not a view that a graph knows
        part: torch.Tensor = tensor.to_local()
        return part


def _words(kind: tuple[Any, ...]) -> str:
    dtype, device, shape, contiguous = kind
    return (f"{str(dtype).removeprefix('torch.')} {list(shape)} on {device}"
            + ("" if contiguous else ", not contiguous"))


def master_of(optimizers: tuple[Any, ...], parameter: torch.Tensor) -> torch.Tensor | None:
    """The f32 master of a parameter (its part here) in the state of an optimizer that keeps some.
    """
    for optimizer in optimizers:
        state = optimizer.state
        if parameter not in state:
            continue
        for key, value in state[parameter].items():
            if (MASTER in str(key) and isinstance(value, torch.Tensor)
                    and value.dtype == torch.float32 and value.shape == parameter.shape):
                return local(value)
    return None
