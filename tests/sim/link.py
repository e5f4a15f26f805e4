"""A learner's connection group over simulated wires: control stream 0 and data streams behind it.

It ends as a whole: one stream that ends takes the others with it. Must not know what frames say.
"""

from __future__ import annotations

from collections.abc import Callable

from syncer.learner.connection import Connection
from syncer.learner.tensor_messages import TensorMessage
from syncer.protocol import CHUNK_HEAD, Msg
from syncer.wire.encode import frame
from tests.sim.network import Network, Wire


class Link:
    """The group of one `Connection`. received(stream, data); lost(link) once, when it has ended."""

    def __init__(self, network: Network, connection: Connection,
                 received: Callable[[int, bytes], None], lost: Callable[[Link], None],
                 data_ns: float = 0):
        """data_ns: how much longer bytes are on their way on data streams."""
        self.world = network.world
        self.connection = connection
        self.lost = lost
        self.open = True
        self.missing: int | None = None
        """A stream that is never dialed."""
        self.next_id = 1 << 40  # the library numbers its own from 0
        delay_ns = network.delay_ns()
        self.dial = [lambda s=s: Wire(network, delay_ns + (data_ns if s else 0),
                                      lambda data: received(s, data), self._ended)
                     for s in range(connection.streams)]
        self.wires: list[Wire] = []

    def begin(self) -> None:
        """Say who it is on every stream; who introduces himself is answered on the first one
        before he dials the others."""
        streams = range(len(self.wires), self.connection.streams if self.connection.ready else 1)
        self.wires += [self.dial[stream]() for stream in streams]
        for stream in streams:
            if stream == self.missing:
                self.wires[stream].drown()
            else:
                self.wires[stream].write(self.connection.openings[stream])

    @property
    def idle(self) -> bool:
        """Nothing waits for room on the control stream."""
        return not self.wires[0].backlog

    # ---- what the learner says ---------------------------------------------------------------

    def control(self, data: bytes) -> None:
        if self.connection.ready:                 # until then nothing but its greeting is said
            self.wires[0].write(data)

    def tensor(self, message: TensorMessage) -> None:
        """A tensor message: as the library stripes it, or cut anywhere."""
        if not self.connection.ready:
            return
        if self.world.chance(0.5) or len(message.body) > 1 << 20:
            for stream, pieces in self.connection.stripe(message):
                self.wires[stream].write(b"".join(bytes(piece) for piece in pieces))
        else:
            self.cut_anywhere(message.msg_type, message.head + bytes(message.body))

    def cut_anywhere(self, msg_type: int, body: bytes) -> None:
        """A message in one to three CHUNKs on any streams."""
        if not self.connection.ready:
            return
        rng = self.world.rng
        inner = frame(msg_type, body)
        pieces = rng.choice([1, 1, 2, 3])
        cuts = sorted(rng.sample(range(1, len(inner)), min(pieces, len(inner)) - 1))
        self.next_id += 1
        msg_id = self.next_id
        for start, end in zip([0, *cuts], [*cuts, len(inner)], strict=True):
            wire = rng.choice(self.wires[1:] or self.wires)
            head = CHUNK_HEAD.pack(msg_id, len(inner), start)
            wire.write(frame(Msg.CHUNK, head + inner[start:end]))

    def close(self) -> None:
        """The learner lets go of it and hears nothing more."""
        self.open = False
        for wire in self.wires:
            wire.close()

    # ---- what is done to it ------------------------------------------------------------------

    def cut(self, learner_after_ns: float = 0, server_after_ns: float = 0) -> None:
        """The network loses it; each side hears of it after its own delay."""
        for wire in self.wires:
            if not wire.over:
                wire.reset(learner_after_ns, server_after_ns)

    def vanish(self, stray: bytes, stray_ns: float) -> None:
        """Its machine is gone; the control stream may have a last frame on the way."""
        for stream, wire in enumerate(self.wires):
            wire.vanish(b"" if stream else stray, stray_ns)

    def lose_stream(self) -> None:
        """One stream of the group breaks."""
        self.world.rng.choice(self.wires).reset(0, 0)

    def dribble(self) -> None:
        """For a while bytes come one by one."""
        self.world.rng.choice(self.wires).up.dribble = self.world.rng.randrange(1, 200)

    def stop_reading(self, pause_ns: float) -> None:
        for wire in self.wires:
            wire.pause()
            self.world.after(pause_ns, wire.resume)

    def _ended(self) -> None:
        if self.open:
            self.close()
            self.lost(self)

