"""Where the parameters are, and how bytes come there and back while training goes on.

One class for everything that does its work in order, one for a CPU, and one for CUDA, with a stream
beside that of training and pinned memory. Must not know what is copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from syncer.kernels import axpby_blend, decode_bf16, decode_q4, encode_bf16, encode_q4
from syncer.learner.fragment import Packed
from syncer.learner.holding import Underway
from syncer.protocol import DTYPE_BF16, DTYPE_F32
from syncer.torch import packing

STAGES = 2
"""Buffers between the network's memory and a device: one is filled while the other is read."""


class InOrder:
    """What a device that works in order has done when it returns: an `Underway`."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class Device:
    """A device that does what it is told in the order of the training loop."""

    def __init__(self, device: torch.device):
        self.device = device
        self._stages: list[tuple[torch.Tensor, Underway]] = []

    def host(self, size: int) -> torch.Tensor:
        """Bytes of host memory that the device copies from and to."""
        return torch.empty(size, dtype=torch.uint8)

    def host_floats(self, numel: int) -> torch.Tensor:
        """f32 in such memory."""
        return self.host(4 * numel).view(torch.float32)

    def empty(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Flat, on the device, contents undefined."""
        return torch.empty(numel, dtype=dtype, device=self.device)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is queued inside runs beside training, behind what training has queued so far."""
        with torch.no_grad():
            yield

    def record(self) -> Underway:
        """Inside `beside`: what was queued there so far."""
        return InOrder()

    def join(self, underway: Underway) -> None:
        """What training queues from now on runs behind it; the host does not wait."""

    def fetch(self, values: torch.Tensor) -> torch.Tensor:
        """Values of `host` memory or of the device, on the device; only to be read."""
        return values.to(self.device, non_blocking=True)

    def upload(self, data: memoryview) -> torch.Tensor:
        """Bytes of any memory as a new uint8 tensor on the device; `data` is free on return."""
        size = data.nbytes
        stage = self._stage(size)
        np.copyto(stage[:size].numpy(), np.frombuffer(data, np.uint8))
        there = self.empty(size, torch.uint8).copy_(stage[:size], non_blocking=True)
        self._stages.append((stage, self.record()))
        return there

    def pack(self, values: torch.Tensor, dtype: int, out: Packed,
             tells_lost: bool = False) -> torch.Tensor | None:
        """Flat values in a dtype of the protocol, into memory of `host`; `record` tells when they
        are there. If asked for, what they lose by it, of which `values` may be the memory."""
        packed = packing.pack(values, dtype)
        torch.from_numpy(out).copy_(packed, non_blocking=True)
        return values.sub_(packing.unpack(packed, dtype, values.numel())) if tells_lost else None

    def blend(self, local: torch.Tensor, anchor: torch.Tensor, alpha: float) -> torch.Tensor:
        """`local` moves towards the anchor, as `Fragment.rebase` says."""
        return packing.blend(local, anchor, alpha)

    def _stage(self, size: int) -> torch.Tensor:
        if len(self._stages) < STAGES:
            return self.host(size)
        stage, underway = self._stages.pop(0)
        underway.wait()
        return stage if stage.numel() >= size else self.host(size)


class HostDevice(Device):
    """The CPU: its kernels need less time than operations of torch, for the same bits."""

    def pack(self, values: torch.Tensor, dtype: int, out: Packed,
             tells_lost: bool = False) -> torch.Tensor | None:
        if dtype == DTYPE_F32:
            np.copyto(out.view("<f4"), values.numpy())
            return None
        (encode_bf16 if dtype == DTYPE_BF16 else encode_q4)(values.numpy(), out)
        if not tells_lost:
            return None
        kept = self.empty(values.numel())
        (decode_bf16 if dtype == DTYPE_BF16 else decode_q4)(out, kept.numpy(), False)
        return values.sub_(kept)

    def blend(self, local: torch.Tensor, anchor: torch.Tensor, alpha: float) -> torch.Tensor:
        axpby_blend(local.numpy(), anchor.numpy(), alpha)
        return local


class CudaEvent:
    """What was queued on a stream so far: an `Underway`."""

    def __init__(self, stream: Any):
        self.event = torch.cuda.Event()
        self.event.record(stream)

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


class CudaDevice(Device):
    """A GPU: copies and packing run on a stream of their own, the host waits for none of them."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self._side: Any = torch.cuda.Stream(device)
        self._training: Any = None

    def host(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    @contextmanager
    def beside(self) -> Iterator[None]:
        self._training = torch.cuda.current_stream(self.device)
        self._side.wait_stream(self._training)
        with torch.no_grad(), torch.cuda.stream(self._side):
            yield

    def record(self) -> Underway:
        return CudaEvent(self._side)

    def join(self, underway: Underway) -> None:
        if isinstance(underway, CudaEvent):
            self._training.wait_event(underway.event)


def device_of(device: torch.device) -> Device:
    """The one that a tensor is on."""
    kinds = {"cuda": CudaDevice, "cpu": HostDevice}
    return kinds.get(device.type, Device)(device)
