"""Who works on tensors that arrive, and when: on the spot, or workers that hash and decode.

It must not know what a message is for, nor when it counts: one that never ends has no effect.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from syncer import kernels
from syncer.server.arrival import Arrival
from syncer.server.group import Group
from syncer.server.workers import Job, Workers
from syncer.wire.frames import SINK_LEAD
from syncer.wire.payload import Payload, space

ROOM_BYTES = 512 << 10
"""What is received at once of a push, to be decoded at once. A larger room does not stay in the
cache of a core, beside what the kernel copies from; a smaller one takes more calls."""
STEP_ELEMENTS = 2 << 20
"""What a worker decodes at least at a time, and the loop's thread at most of what is left at the
end: 8 MiB of f32, a third of a millisecond."""
HASH_UNIT_BYTES = 64
"""Of SHA-256, whose streams are interleaved while they are at multiples of it."""
HASH_STEP_BYTES = 1 << 20
HASH_ONE_BYTES, HASH_TWO_BYTES = 4 << 20, 16 << 20
"""What one job hashes at most of each message: a lone one soon looks for another to be paired with,
as two interleaved streams cost little more than one."""
WARM_BYTES = 256 << 10
"""Hashed and then decoded: it is in the cache of the core the second time."""


def work(arrival: Arrival, end: int) -> None:
    """All up to `end`, which `ready` gave."""
    if arrival.sha is None:
        arrival.decode_to(end)
        return
    arrival.decode_to(arrival.hashed)
    while arrival.hashed < end:
        upto = min(arrival.hashed + WARM_BYTES, end)
        arrival.sha.update(arrival.bytes(arrival.hashed, upto))
        arrival.hashed = upto
        arrival.decode_to(upto)
    if arrival.done == arrival.size:
        arrival.decoded.digest = arrival.sha.digest()


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
            work(arrival, end)


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
        room = space(SINK_LEAD + ROOM_BYTES).obj
        assert isinstance(room, Payload)
        self.room = room
        self.initial: list[Arrival] = []
        """Those to be hashed, the oldest first."""
        self.hashing = 0

    def by_piece(self, arrival: Arrival) -> bool:
        """Whether it is decoded on the spot, in any order."""
        return arrival.sha is None and (arrival.decoded.in_place or not self.aside)

    def expect(self, arrival: Arrival) -> None:
        """It is going to come in pieces."""
        if not self.by_piece(arrival):
            arrival.expect(None, self._go_on)
        else:  # bytes that may be needed again are received where they belong
            arrival.expect(None if arrival.decoded.tensor is not None else self.room, None)

    def whole(self, arrival: Arrival) -> None:
        """All of it has come."""
        arrival.there = arrival.size
        if not self.by_piece(arrival):
            self._go_on(arrival)
            return
        if sum(end - start for start, end in arrival.left()) <= self.step(arrival):
            with suppress(MemoryError):  # a worker's then, where memory is waited for
                arrival.finish()
        if not arrival.finished:
            self._submit([arrival], arrival.finish)

    def _go_on(self, arrival: Arrival) -> None:
        """There is more of it, in order."""
        if arrival.sha is not None:
            if arrival not in self.initial:
                self.initial.append(arrival)
            self._hash()
        elif not arrival.working:
            self._decode(arrival)

    @staticmethod
    def step(arrival: Arrival) -> int:
        """Bytes of a step."""
        return STEP_ELEMENTS * arrival.size // arrival.decoded.numel

    def _decode(self, arrival: Arrival) -> None:
        end = arrival.ready(arrival.size)
        if end > arrival.done and (end == arrival.size
                                   or end - arrival.done >= self.step(arrival)):
            self._submit([arrival], partial(work, arrival, end))

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
                run = partial(work, able[0], able[0].ready(HASH_ONE_BYTES))
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
