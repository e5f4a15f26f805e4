"""Fragments of tensors: on the host where NumPy can change them, and on any device.

Same arithmetic and bits as `syncer.learner.fragment`. Must not know rounds, versions or sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from syncer.kernels import decode_bf16
from syncer.learner.fragment import Floats, Fragment, Packed, checked_floats
from syncer.learner.holding import Underway
from syncer.protocol import DTYPE_F32, bulk_dtype
from syncer.torch.device import Device
from syncer.torch.packing import widen
from syncer.torch.tensor_piece import Piece


class HostFragment(Fragment):
    """Contiguous f32 tensors of the host, changed in place without a copy.

    check: raises for a model that is not what it was at the start.

    Large: a `Fragment`, and around each of its changes a look at the tensors and a word to torch.
    """

    def __init__(self, pieces: Sequence[Piece], dtype: int, check: Callable[[], None]):
        super().__init__([piece.tensor.detach().numpy() for piece in pieces], dtype)
        self._pieces, self._check = pieces, check
        self._places = self._places_now()

    def rebase(self, tensor: memoryview, alpha: float) -> None:
        with self._changing():
            super().rebase(tensor, alpha)

    def restore(self) -> None:
        with self._changing():
            super().restore()

    def overwrite(self, tensor: memoryview) -> None:
        with self._changing():
            super().overwrite(tensor)

    def pack_values(self, out: Packed) -> None:
        self._look()
        super().pack_values(out)

    def pack_delta(self, out: Packed) -> None:
        self._look()
        super().pack_delta(out)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """What is changed behind torch's back is told to it: a backward pass that needs the values
        of before then says so, where it would compute with others."""
        self._look()
        yield
        for piece in self._pieces:
            torch.autograd.graph.increment_version(piece.tensor)

    def _look(self) -> None:
        """A tensor may have other memory than before (`p.data = ...`)."""
        self._check()
        if self._places != self._places_now():
            self._locals = [piece.tensor.detach().numpy().reshape(-1) for piece in self._pieces]
            self._places = self._places_now()

    def _places_now(self) -> list[int]:
        return [int(piece.tensor.data_ptr()) for piece in self._pieces]


class DeviceFragment:
    """Any tensors of one device, as a flat f32 copy of them while it is worked on.

    keep_on_device: whether the anchor stays there, or in host memory. check: as in `HostFragment`.

    Tensors in bf16 and f16 are too coarse for what a blend adds. Unless the optimizer has f32
    values of its own for them, a master has what they were when the fragment was last written;
    what training has added since is the difference of the coarse values.

    Large: what a `Fragment` answers, and the step of each that is queued beside training.
    """

    def __init__(self, pieces: Sequence[Piece], dtype: int, device: Device, *,
                 keep_on_device: bool, check: Callable[[], None]):
        self.numel = sum(piece.numel for piece in pieces)
        self._pieces, self._dtype, self._device, self._check = pieces, dtype, device, check
        self._on_device = keep_on_device
        self._anchor: torch.Tensor | None = None
        self._master: torch.Tensor | None = None
        self._error: torch.Tensor | None = None
        """What the last delta has lost, on the device."""
        self._feeds_back = False
        self._using: Underway | None = None
        """Who may still be reading or writing the anchor and the master in host memory."""

    @property
    def anchor(self) -> Floats | None:
        """f32, the exact values of the last broadcast; None before the first."""
        if self._anchor is None:
            return None
        self._settle()
        values: Floats = self._anchor.cpu().numpy()
        return values

    def rebase(self, tensor: memoryview, alpha: float) -> None:
        """Takes a broadcast, as `Fragment.rebase`; training waits for it on its own stream."""
        self._check()
        with self._changing():
            anchor = self._take_anchor(tensor)
            values = anchor if alpha == 0 else self._device.blend(self._local(), anchor, alpha)
            self._write(values, statistics=False)

    def restore(self) -> None:
        """Sets the local values to the anchor; there must be one."""
        self._check()
        with self._changing():
            self._write(self._anchored(), statistics=True)

    def overwrite(self, tensor: memoryview) -> None:
        """Sets the local values to f32 bytes of the final cut: exactly, or rounded as they are."""
        self._check()
        with self._changing():
            self._write(widen(self._device.upload(tensor), DTYPE_F32), statistics=True)

    def pack_values(self, out: Packed) -> None:
        """Writes the local values in the bulk dtype; they are there on return."""
        self._check()
        with self._device.beside():
            self._device.pack(self._local(), bulk_dtype(self._dtype), out)
            packed = self._device.record()
        packed.wait()

    def pack_delta(self, out: Packed) -> Underway:
        """Writes local - anchor in the session dtype. Training waits for the copy of the values
        alone, on its own stream."""
        self._check()
        with self._device.beside():
            local = self._local()
            self._device.join(self._device.record())
            delta = local.sub_(self._anchored())
            if self._error is not None:
                delta.add_(self._error)
            lost = self._device.pack(delta, self._dtype, out, self._feeds_back)
            self._error = lost
            self._using = self._device.record()
        return self._using

    def feed_back(self) -> None:
        """As `Fragment.feed_back`; errors stay on the device."""
        self._feeds_back = True

    def forget_error(self) -> None:
        """As `Fragment.forget_error`."""
        self._error = None

    def kept(self) -> dict[str, Floats]:
        """A copy of the anchor, and of the master and the error if there is one."""
        self._settle()
        found = {"anchor": self._anchor, "master": self._master, "error": self._error}
        return {name: values.detach().cpu().clone().numpy()
                for name, values in found.items() if values is not None}

    def keep(self, values: Mapping[str, Floats]) -> Floats:
        """As `Fragment.keep`."""
        anchor = checked_floats(values["anchor"], self.numel)
        with self._changing():
            for name, floats in values.items():
                there = torch.from_numpy(checked_floats(floats, self.numel))
                if name == "anchor":
                    self._anchor = self._kept(self._anchor, there)
                elif name == "master":
                    self._master = self._kept(self._master, there)
                elif name == "error" and self._feeds_back:
                    self._error = self._device.empty(self.numel).copy_(there)
        return anchor

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """What is queued inside runs beside training, which waits for it on its own stream."""
        with self._device.beside():
            yield
            self._using = self._device.record()
        self._device.join(self._using)

    # --- inside `Device.beside` ------------------------------------------------------------------

    def _local(self) -> torch.Tensor:
        """A copy of the local values."""
        flat = self._device.empty(self.numel)
        for piece, part in self._parts(flat):
            piece.read(part)
        if self._master is not None:
            for piece, part, own in self._parts(flat, self._device.fetch(self._master)):
                if piece.lacks_master:
                    part.add_(own - piece.rounded(own))
        return flat

    def _write(self, values: torch.Tensor, *, statistics: bool) -> None:
        for piece, part in self._parts(values):
            if statistics or not piece.statistic:
                piece.write(part)
        if any(piece.lacks_master for piece in self._pieces):
            self._master = self._kept(self._master, values)

    def _take_anchor(self, tensor: memoryview) -> torch.Tensor:
        """A broadcast becomes the anchor; its values on the device."""
        bulk = bulk_dtype(self._dtype)
        if self._on_device:
            self._anchor = widen(self._device.upload(tensor), bulk)
            return self._anchor
        self._settle()
        if self._anchor is None:
            self._anchor = self._device.host_floats(self.numel)
        values: Floats = self._anchor.numpy()
        if bulk == DTYPE_F32:
            np.copyto(values, np.frombuffer(tensor, "<f4"))
        else:
            decode_bf16(tensor, values, False)
        return self._device.fetch(self._anchor)

    def _anchored(self) -> torch.Tensor:
        if self._anchor is None:
            raise ValueError("no broadcast has come yet: the fragment has no anchor")
        return self._device.fetch(self._anchor)

    def _kept(self, before: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor:
        """A copy of the values where this fragment keeps its own."""
        if before is None:
            before = (self._device.empty(self.numel) if self._on_device
                      else self._device.host_floats(self.numel))
        return before.copy_(values, non_blocking=True)

    def _settle(self) -> None:
        """Before the host itself reads or writes what the device may be using; what the device does
        is in order anyway."""
        if self._using is not None and not self._on_device:
            self._using.wait()
            self._using = None

    def _parts(self, *flats: torch.Tensor) -> Iterator[Any]:
        """(piece, its part of each flat vector), in wire order."""
        start = 0
        for piece in self._pieces:
            yield piece, *(flat[start:start + piece.numel] for flat in flats)
            start += piece.numel
