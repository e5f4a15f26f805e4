"""Tensors that are hashed, decoded and checked while they arrive, as far as they are there.

It must not know what a message is for, nor when it counts: one that never ends has no effect.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from syncer import kernels
from syncer.core import events
from syncer.protocol import DTYPE_BF16, DTYPE_F32, DTYPE_Q4, Q4_BLOCK, Q4_BLOCK_BYTES
from syncer.server.decoded import DECODERS, Decoded
from syncer.server.group import Group
from syncer.server.workers import Job, Workers

UNITS = {DTYPE_F32: (64, 16), DTYPE_BF16: (64, 32), DTYPE_Q4: (Q4_BLOCK_BYTES, Q4_BLOCK)}
"""Bytes and elements of what is worked on as a whole: a block of q4, or"""
HASH_UNIT_BYTES = 64
"""of SHA-256, whose streams are interleaved while they are at multiples of it."""
STEP_ELEMENTS = 2 << 20
"""What is decoded at a time: 8 MiB of f32, which kernels write past the cache where it is not their
own place. It takes a third of a millisecond."""
HASH_STEP_BYTES = 1 << 20
HASH_ONE_BYTES, HASH_TWO_BYTES = 4 << 20, 16 << 20
"""What one job hashes at most of each message: a lone one soon looks for another to be paired with,
as two interleaved streams cost little more than one."""
WARM_BYTES = 256 << 10
"""Hashed and then decoded: it is in the cache of the core the second time."""


class Arrival:
    """The tensor of one message of `group`; `event` makes its event of the whole values.

    Every step leaves it whole, so that work that finds no memory can be done again.

    Large: half of its attributes say what the message is, the others how far it is.
    """

    __slots__ = ("bad", "decode", "decoded", "done", "event", "group", "hashed", "name", "negate",
                 "over", "sha", "size", "tensor", "there", "units", "working")

    def __init__(self, group: Group, name: str, tensor: memoryview, dtype: int, *,
                 decoded: Decoded, event: Callable[[Decoded], events.Event], initial: bool = False):
        self.group, self.name, self.decoded, self.event = group, name, decoded, event
        self.decode, self.units = DECODERS[dtype], UNITS[dtype]
        self.tensor: memoryview | None = tensor
        """The wire bytes, until all are decoded."""
        self.size = len(tensor)
        self.negate = not initial
        self.sha = kernels.Sha256() if initial else None
        self.there = self.hashed = self.done = 0
        """Bytes that have come without a gap, that were hashed, and that were decoded."""
        self.bad = -1
        """First element that is not finite."""
        self.working = self.over = False

    @property
    def finished(self) -> bool:
        """Everything is decoded, and no worker has it."""
        return self.done == self.size and not self.working

    def ready(self, most: int) -> int:
        """Up to where it can be worked on now, `most` bytes at a time."""
        end = min(self.there, self.done + most)
        return end if end == self.size else end - end % self.units[0]

    def work(self, end: int) -> None:
        """All up to `end`, which `ready` gave."""
        if self.sha is None:
            self.decode_to(end)
            return
        self.decode_to(self.hashed)
        while self.hashed < end:
            upto = min(self.hashed + WARM_BYTES, end)
            self.sha.update(self.bytes(self.hashed, upto))
            self.hashed = upto
            self.decode_to(upto)
        if self.done == self.size:
            self.decoded.digest = self.sha.digest()

    def bytes(self, start: int, end: int) -> memoryview:
        assert self.tensor is not None  # not all is decoded
        return self.tensor[start:end]

    def decode_to(self, end: int) -> None:
        if end == self.done:
            return
        unit, elements = self.units
        first, last = self.done // unit * elements, -(-end // unit) * elements
        bad = self.decode(self.bytes(self.done, end), self.decoded.buffer[first:last], self.negate,
                          1)
        if bad >= 0 and self.bad < 0:
            self.bad = first + bad
        self.done = end
        if end == self.size:
            self.tensor = None


def hash_two(first: Arrival, first_end: int, second: Arrival, second_end: int) -> None:
    """As much of both as there is of each, in two interleaved streams."""
    assert first.sha is not None  # both are initial values
    assert second.sha is not None
    first.decode_to(first.hashed)
    second.decode_to(second.hashed)
    while True:
        size = min(WARM_BYTES, first_end - first.hashed, second_end - second.hashed)
        size -= size % HASH_UNIT_BYTES
        if not size:
            break
        ends = first.hashed + size, second.hashed + size
        kernels.sha256_update_pair(first.sha, first.bytes(first.hashed, ends[0]),
                                   second.sha, second.bytes(second.hashed, ends[1]))
        first.hashed, second.hashed = ends
        first.decode_to(ends[0])
        second.decode_to(ends[1])
    for arrival, end in (first, first_end), (second, second_end):
        if end - arrival.hashed < WARM_BYTES:  # no more: what is left may find another partner
            arrival.work(end)


class Arrivals:
    """Has arrivals worked on: on the spot, or by workers; `finished` hears of groups for which
    workers have finished one.
    """

    def __init__(self, helpers: Workers, finished: Callable[[Group], None]):
        self.workers, self.finished = helpers, finished
        self.hashing_max = max(1, helpers.count // 2)
        self.aside = helpers.count > 2
        """There are cores for values that are written elsewhere. With two, that which has received
        the bytes has them in its cache. Values that stay where they are never leave it."""
        self.initial: list[Arrival] = []
        """Those to be hashed, the oldest first."""
        self.hashing = 0

    def go_on(self, arrival: Arrival) -> None:
        """More of it has come."""
        if arrival.sha is not None:
            if arrival not in self.initial:
                self.initial.append(arrival)
            self._hash()
        elif not arrival.working:
            self._decode(arrival)

    def _decode(self, arrival: Arrival) -> None:
        step = STEP_ELEMENTS // arrival.units[1] * arrival.units[0]
        whole, aside = arrival.there == arrival.size, self.aside and not arrival.decoded.in_place
        end = arrival.ready(step)
        if not aside and (whole or end - arrival.done == step or arrival.decoded.in_place):
            with suppress(MemoryError):  # the end is a worker's then, where memory is waited for
                arrival.work(end)
        end = arrival.ready(arrival.size)
        if end > arrival.done and (whole or (aside and end - arrival.done >= step)):
            self._submit([arrival], partial(arrival.work, end))

    def _hash(self) -> None:
        """As many jobs as may be, of two arrivals where there are two."""
        while self.hashing < self.hashing_max:
            able = [arrival for arrival in self.initial if not arrival.working
                    and self._worthwhile(arrival)][:2]
            if not able:
                return
            self.hashing += 1
            if len(able) == 2:
                first, second = able
                run = partial(hash_two, first, first.ready(HASH_TWO_BYTES),
                              second, second.ready(HASH_TWO_BYTES))
            else:
                run = partial(able[0].work, able[0].ready(HASH_ONE_BYTES))
            self._submit(able, run)

    @staticmethod
    def _worthwhile(arrival: Arrival) -> bool:
        return arrival.done < arrival.size and (
            arrival.there == arrival.size or arrival.there - arrival.done >= HASH_STEP_BYTES)

    def _submit(self, given: list[Arrival], run: Callable[[], None]) -> None:
        for arrival in given:
            arrival.working = True
        self.workers.submit(Job(run, lambda _, error: self._worked(given, error)))

    def _worked(self, given: list[Arrival], error: BaseException | None) -> None:
        if error is not None:
            raise error  # no peer can cause it
        for arrival in given:
            arrival.working = False
            if arrival.sha is not None and (arrival.over or arrival.finished):
                self.initial.remove(arrival)
        if given[0].sha is not None:
            self.hashing -= 1
            self._hash()
        for arrival in given:
            if arrival.sha is None and not (arrival.finished or arrival.over):
                self._decode(arrival)
            if arrival.finished:
                self.finished(arrival.group)

    def drop(self, arrival: Arrival) -> None:
        """Its end will not come."""
        arrival.over = True
        if arrival in self.initial and not arrival.working:
            self.initial.remove(arrival)
