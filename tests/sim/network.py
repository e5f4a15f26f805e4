"""Simulated connections: streams of bytes with delay, cut into pieces, lost together.

A `Link` is one connection group, control stream 0 and data streams behind it. Bytes of one stream
keep their order; two streams overtake each other. A cut drops what is under way, and each side
learns of it in its own time (half-open until then).
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct

from syncer.protocol import Msg
from syncer.wire.encode import frame
from tests.sim.clock import MS, World

CHUNK_HEAD = Struct("<QQQ")


class Pipe:
    """One direction of one stream."""

    def __init__(self, world: World, delay_ns: float, ns_per_byte: float):
        self.world = world
        self.delay_ns = delay_ns
        self.ns_per_byte = ns_per_byte
        self.free_ns = 0.0
        self.last_ns = 0
        self.dead = False
        self.deliver: Callable[[bytes], None] | None = None

    def send(self, data: bytes) -> int:
        """Queue bytes; returns when the last of them will have left this side."""
        begin = max(self.world.now_ns, self.free_ns)
        self.free_ns = begin + len(data) * self.ns_per_byte
        jitter = self.world.rng.random() * self.delay_ns
        arrival = max(self.last_ns, int(self.free_ns + self.delay_ns + jitter))
        self.last_ns = arrival
        self.world.after(arrival - self.world.now_ns, self._arrive, data)
        return int(self.free_ns)

    def _arrive(self, data: bytes) -> None:
        if self.dead:
            return
        if len(data) > 1 and self.world.chance(0.2):
            cut = self.world.rng.randrange(1, len(data))
            self.deliver(data[:cut])
            if not self.dead:
                self.deliver(data[cut:])
            return
        self.deliver(data)


class Link:
    """One connection group between a learner and the server."""

    def __init__(self, world: World, streams: int, delay_ns: float, ns_per_byte: float):
        self.world = world
        self.streams = streams
        self.born_ns = world.now_ns
        self.up = [Pipe(world, delay_ns * world.between(1, 3), ns_per_byte) for _ in range(streams)]
        self.down = [Pipe(world, delay_ns * world.between(1, 3), ns_per_byte)
                     for _ in range(streams)]
        self.open = True
        self.learner_lost: Callable[[], None] | None = None
        self.server_lost: Callable[[], None] | None = None
        self._turn = {"up": 0, "down": 0}
        self._msg_id = {"up": 0, "down": 0}

    def cut(self, learner_after_ns: float = 0, server_after_ns: float = 0) -> None:
        """The connection breaks; both sides are told after their own delay."""
        if not self.open:
            return
        self.open = False
        for pipe in (*self.up, *self.down):
            pipe.dead = True
        self.world.after(learner_after_ns, self.learner_lost)
        self.world.after(server_after_ns, self.server_lost)

    def close_after(self, flush_ns: float) -> None:
        """A graceful end by the server: what is queued still arrives."""
        self.world.after(flush_ns, self.cut)

    def control(self, side: str, data: bytes) -> None:
        (self.up if side == "up" else self.down)[0].send(data)

    def chunked(self, side: str, msg_type: int, body: bytes) -> int:
        """A message in CHUNKs cut anywhere, striped; returns when its last byte has left."""
        rng = self.world.rng
        inner = frame(msg_type, body)
        pieces = rng.choice([1, 1, 2, 3])
        cuts = sorted(rng.sample(range(1, len(inner)), min(pieces, len(inner)) - 1))
        pipes = self.up if side == "up" else self.down
        msg_id = self._msg_id[side]
        self._msg_id[side] += 1
        left_ns = 0
        for start, end in zip([0, *cuts], [*cuts, len(inner)], strict=True):
            if self.streams > 1:
                self._turn[side] = (self._turn[side] + 1) % (self.streams - 1)
            pipe = pipes[1 + self._turn[side] if self.streams > 1 else 0]
            head = CHUNK_HEAD.pack(msg_id, len(inner), start)
            left_ns = max(left_ns, pipe.send(frame(Msg.CHUNK, head + inner[start:end])))
        return left_ns


def default_delay_ns(world: World) -> float:
    return world.between(0.1, 50) * MS
