"""Simulated readers: the real session on a wire, fast, slow, gone without a word, back again.

Every cut that one gets is compared with what the run had at that step. They are drawn with dice of
their own, so that a fleet without readers is what it was.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from syncer.errors import RemoteProtocolError
from syncer.kernels import encode_bf16
from syncer.protocol import DTYPE_BF16, DTYPE_F32
from syncer.reader.cut_session import NOBODY, ReaderSession, ReceivedCut, Refused, ServerEnd
from syncer.wire.encode import encode_heartbeat
from syncer.wire.messages import Heartbeat
from tests.sim.clock import MS, SECOND
from tests.sim.network import Wire

SHARE = 0.3
"""Of all fleets, those that somebody reads."""


class SimReader:
    """One process that reads until it has what it came for, and dials again when it must."""

    def __init__(self, fleet: Any, dice: random.Random):
        self.fleet, self.dice = fleet, dice
        self.follows = dice.random() < 0.7
        self.dtype = dice.choice([DTYPE_F32, DTYPE_BF16])
        self.slow = dice.random() < 0.5
        self.wire: Wire | None = None
        self.session: ReaderSession | None = None
        self.steps: list[int] = []
        """Of the cuts on this connection."""
        self.done = False
        fleet.world.after(dice.uniform(1, 20_000) * MS, self.dial)

    def dial(self) -> None:
        if self.done or self.wire is not None:
            return
        fleet = self.fleet
        self.session, self.steps = ReaderSession(self.dtype, follows=self.follows), []
        self.wire = wire = Wire(fleet.network, fleet.network.delay_ns(),
                                lambda data: self.received(wire, data), lambda: self.lost(wire))
        wire.write(self.session.hello(self.dice.getrandbits(64) | 1, fleet.key))
        self.disturb(wire)

    def disturb(self, wire: Wire) -> None:
        """It stops reading for a while, now and then, or vanishes, until it leaves."""
        if wire is not self.wire:
            return
        wire.write(encode_heartbeat(Heartbeat(NOBODY, len(self.steps))))
        if self.slow and self.dice.random() < 0.5:
            wire.pause()
            self.fleet.world.after(self.dice.uniform(1, 5000) * MS, wire.resume)
        elif self.dice.random() < 0.1:
            self.wire = None
            wire.vanish()
            self.again()
            return
        self.fleet.world.after(self.dice.uniform(10, 10_000) * MS, self.disturb, wire)

    def again(self) -> None:
        self.fleet.world.after(self.dice.uniform(0.1, 20) * SECOND, self.dial)

    def lost(self, wire: Wire) -> None:
        if wire is self.wire:
            self.wire = None
            self.again()

    def received(self, wire: Wire, data: bytes) -> None:
        if wire is not self.wire:
            return
        try:
            for found in self.taken(data):
                self.take(wire, found)
        except RemoteProtocolError as error:
            raise AssertionError(f"a reader got what no server sends: {error}") from None

    def taken(self, data: bytes) -> list[Any]:
        found = []
        while data:
            window = self.session.buffer()
            count = min(len(window), len(data))
            window[:count] = data[:count]
            data = data[count:]
            found += self.session.received(count)
        return found

    def take(self, wire: Wire, found: Any) -> None:
        marks = self.fleet.marks
        if isinstance(found, Refused):
            assert "try again later" in found.text or "no readers" in found.text, found.text
            marks.add("a reader was refused")
        elif isinstance(found, ServerEnd):
            marks.add("a reader was shut down")
            self.done = True
        elif isinstance(found, ReceivedCut):
            self.judge(wire, found)
            marks.add("a reader has the final cut" if found.is_final else "a reader has a cut")
            if not self.follows:
                self.done = True
        if self.done and self.wire is not None:
            self.wire = None
            wire.close()

    def judge(self, wire: Wire, cut: ReceivedCut) -> None:
        """It is the run's cut of that step, to the bit, and a newer one than the one before."""
        fleet = self.fleet
        assert self.steps[-1:] < [cut.step] or cut.is_final, (self.steps, cut.step)
        fragments = len(cut.tensors)
        assert not self.steps or cut.is_final or cut.step % fragments == 0
        self.steps.append(cut.step)
        if wire.listener is not fleet.server.system.listener:
            return                                # of a process that is no more
        assert cut.step in fleet.history.cuts, f"a reader got step {cut.step}, which never was"
        for tensor, (_, params, _) in zip(cut.tensors, fleet.history.cuts[cut.step], strict=True):
            assert bytes(tensor) == as_wire(params, cut.dtype), f"no cut: step {cut.step}"


def as_wire(params: bytes, dtype: int) -> bytes:
    """f32 parameters as a tensor of this dtype."""
    if dtype == DTYPE_F32:
        return params
    values = np.frombuffer(params, np.float32)
    out = bytearray(2 * len(values))
    encode_bf16(values, out)
    return bytes(out)


def draw(fleet: Any) -> list[SimReader]:
    """The readers of a fleet."""
    dice = random.Random(f"readers of {fleet.seed}")
    if dice.random() >= SHARE or fleet.large:
        return []
    return [SimReader(fleet, dice) for _ in range(dice.choice([1, 2, 10]))]
