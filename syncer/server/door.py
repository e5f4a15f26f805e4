"""The way in: first frames, HELLO and DATA_HELLO.

It answers what can be refused without knowing rounds, and hands the rest on; it must not keep a
session of its own, and holds no more for strangers than the limits below.
"""

from __future__ import annotations

import socket
from typing import Protocol

from syncer.config import Config
from syncer.core import actions, events
from syncer.errors import ConfigError, RemoteProtocolError
from syncer.protocol import Msg
from syncer.server.conn import Channel, Owner
from syncer.server.farewell import Farewells
from syncer.server.group import Group
from syncer.server.log import Log
from syncer.server.loop import Loop
from syncer.wire.encode import encode_error
from syncer.wire.frames import FrameReader
from syncer.wire.hello import Hello, parse_hello
from syncer.wire.limits import Limits
from syncer.wire.messages import DataHello, parse_data_hello

STRANGERS_MAX = 1024
"""Sockets without an accepted first frame; one more ends the oldest of them."""
STRANGER_BYTES_MAX = 256 * 1024 * 1024
"""Received bytes of all unfinished first frames; who passes it is refused."""
FIRST_FRAME_NS = 30 * 10**9
"""Time from accept to a complete first frame."""
DATA_HELLO_WAIT_NS = 10 * 10**9
"""Time that a data socket waits for the HELLO of its group (wire 7.2)."""


class Host(Protocol):
    """What the way in needs of the server behind it."""

    def identity_refusal(self, hello: Hello) -> str | None:
        """Text of the ERROR for a HELLO that does not belong to this run, else None."""

    def open_session(self, hello: Hello) -> None:
        """The first HELLO that belongs to the run; nothing on a later one. Raises `ConfigError`
        when this server cannot merge such a layout."""

    def find_group(self, learner: int, generation: int) -> Group | None:
        """The admitted, still connected group."""

    def handle(self, event: events.Event) -> None:
        """For the scheduler, which answers a `Hello` with `Admit` or `Refuse`."""


class Stranger(Owner):
    """A socket whose first frame is awaited, or a data socket whose group is."""

    def __init__(self, door: Door, number: int, sock: socket.socket, peer: str):
        self.door, self.number = door, number
        self.bytes = 0
        self.reader = FrameReader(Limits.first_frame(), None)
        self.channel = Channel(door.loop, sock, peer, self, self.reader,
                               door.config.write_timeout_s * 10**9)
        self.timer = door.loop.call_at(door.loop.now_ns() + FIRST_FRAME_NS,
                                       lambda: door.too_late(self))
        self.data_hello: DataHello | None = None

    def on_bytes(self, channel: Channel, count: int) -> None:
        self.bytes += count
        self.door.count_bytes(self, count)

    def on_frame(self, channel: Channel, kind: int, payload: memoryview) -> None:
        self.door.first_frame(self, kind, payload)

    def on_broken(self, channel: Channel, text: str) -> None:
        self.door.refuse(channel, text)

    def on_lost(self, channel: Channel, reason: str) -> None:
        self.door.forget(self)
        channel.close()


class Door:
    """Who has connected and is nobody yet: strangers, data sockets without their group, arrivals.

    A stranger becomes an arrival by its HELLO and a member by the scheduler's answer.

    Large: one method per step of that way, and a limit at each.
    """

    def __init__(self, loop: Loop, config: Config, log: Log, farewells: Farewells, host: Host):
        self.loop, self.config, self.log, self.host = loop, config, log, host
        self.farewells = farewells
        self.strangers: dict[int, Stranger] = {}
        self.stranger_bytes = 0
        self.welcomed = 0
        self.waiting: dict[tuple[int, int], list[Stranger]] = {}
        self.arrivals: dict[int, tuple[Channel, Hello]] = {}
        self.arrived_count = 0

    def welcome(self, sock: socket.socket, peer: str) -> None:
        """A new connection: it has `FIRST_FRAME_NS` for its first frame."""
        if len(self.strangers) >= STRANGERS_MAX:
            oldest = next(iter(self.strangers.values()))
            self.log.warning("too many connections without a HELLO: the oldest is closed",
                             peer=oldest.channel.peer, limit=STRANGERS_MAX)
            oldest.on_lost(oldest.channel, "evicted")
        self.welcomed += 1
        stranger = Stranger(self, self.welcomed, sock, peer)
        self.strangers[stranger.number] = stranger

    def close(self) -> None:
        """Drop everybody who is not in; goodbyes go on."""
        for stranger in list(self.strangers.values()):
            stranger.on_lost(stranger.channel, "the server ends")
        for channel, _ in self.arrivals.values():  # to be answered by a run that has ended
            channel.close()
        self.arrivals.clear()

    # --------------------------------------------------------------------------- first frames
    def count_bytes(self, stranger: Stranger, count: int) -> None:
        self.stranger_bytes += count
        if self.stranger_bytes > STRANGER_BYTES_MAX:
            self.refuse(stranger.channel, "invalid first frame: this syncer receives too many "
                        "large first frames at once; try again later")

    def first_frame(self, stranger: Stranger, kind: int, payload: memoryview) -> None:
        if kind == Msg.HELLO:
            self._hello(stranger, payload)
        else:
            self._data_hello(stranger, parse_data_hello(payload))

    def _hello(self, stranger: Stranger, payload: memoryview) -> None:
        config = self.config
        hello = parse_hello(payload, key=config.key_bytes, learners=config.learners)
        refusal = self.host.identity_refusal(hello)
        if refusal is not None:
            raise RemoteProtocolError(refusal)
        self.forget(stranger)
        channel = stranger.channel
        try:
            self.host.open_session(hello)
        except ConfigError as error:
            self.refuse(channel, f"invalid HELLO: {error}")
            return
        self.arrived_count += 1
        self.arrivals[self.arrived_count] = channel, hello
        channel.pause()
        self.host.handle(events.Hello(self.arrived_count, hello.learner, hello.generation,
                                      len(hello.layout.fragments), hello.fingerprint))

    def arrived(self, connection: int) -> tuple[Channel, Hello]:
        """Who was told to the scheduler by this number; it is known by its group from now on."""
        return self.arrivals.pop(connection)

    def refuse_arrival(self, action: actions.Refuse) -> None:
        channel, _ = self.arrived(action.connection)
        self.refuse(channel, action.text)

    def _data_hello(self, stranger: Stranger, data_hello: DataHello) -> None:
        group = self.host.find_group(data_hello.learner, data_hello.generation)
        if group is not None:
            self._attach(stranger, data_hello, group)
            return
        stranger.channel.pause()
        stranger.data_hello = data_hello
        self.waiting.setdefault(data_hello[:2], []).append(stranger)
        stranger.timer.cancel()
        stranger.timer = self.loop.call_at(
            self.loop.now_ns() + DATA_HELLO_WAIT_NS, lambda: self._no_group(stranger, data_hello))

    def group_ready(self, group: Group) -> None:
        """A HELLO was admitted: the data sockets that came before it join."""
        for stranger in self.waiting.pop((group.learner, group.generation), ()):
            stranger.timer.cancel()
            data_hello, stranger.data_hello = stranger.data_hello, None
            assert data_hello is not None  # it is why it waits
            try:
                self._attach(stranger, data_hello, group)
            except RemoteProtocolError as error:
                self.refuse(stranger.channel, str(error))
            else:
                stranger.channel.resume()

    def _attach(self, stranger: Stranger, data_hello: DataHello, group: Group) -> None:
        index, count = data_hello.stream, group.hello.num_streams
        if index >= count:
            raise RemoteProtocolError(
                f"data stream index {index} is out of bounds, learner {group.learner} declared "
                f"{count} streams")
        if index in group.data:
            raise RemoteProtocolError(
                f"duplicate data stream index {index} of learner {group.learner}")
        self.forget(stranger)
        self.open_reader(stranger.channel, group)
        group.attach(index, stranger.channel)

    @staticmethod
    def open_reader(channel: Channel, group: Group) -> None:
        """From the next frame on the channel reads what a member of the group may send."""
        reader = channel.reader
        assert reader is not None  # whoever reads first frames has one
        reader.reassembly = group.reassembly
        reader.limits = group.limits

    def _no_group(self, stranger: Stranger, data_hello: DataHello) -> None:
        learner, generation, _ = data_hello
        if any((hello.learner, hello.generation) == (learner, generation)
               for _, hello in self.arrivals.values()):
            # The run ends and leaves its HELLO unanswered, so that the learner dials again. An
            # ERROR here would end that learner.
            stranger.timer = self.loop.call_at(self.loop.now_ns() + DATA_HELLO_WAIT_NS,
                                               lambda: self._no_group(stranger, data_hello))
            return
        self.refuse(stranger.channel, f"unknown learner {learner} generation {generation}: no "
                    f"HELLO within {DATA_HELLO_WAIT_NS // 10**9} s of this DATA_HELLO")

    def too_late(self, stranger: Stranger) -> None:
        """No complete first frame came in time."""
        self.log.info("connection without a complete first frame is closed",
                      peer=stranger.channel.peer, seconds=FIRST_FRAME_NS // 10**9)
        stranger.on_lost(stranger.channel, "no first frame")

    # ------------------------------------------------------------------------------- goodbyes
    def forget(self, stranger: Stranger) -> None:
        """The socket is no stranger any more."""
        if self.strangers.pop(stranger.number, None) is None:
            return
        self.stranger_bytes -= stranger.bytes
        stranger.timer.cancel()
        if stranger.data_hello is not None:
            waiting = self.waiting[stranger.data_hello[:2]]
            waiting.remove(stranger)
            if not waiting:
                del self.waiting[stranger.data_hello[:2]]

    def refuse(self, channel: Channel, text: str) -> None:
        """Answer with ERROR `text` and close without losing it."""
        self.log.warning("connection refused", peer=channel.peer, reason=text)
        if isinstance(channel.owner, Stranger):
            self.forget(channel.owner)
        self.farewells.say([channel], channel, [encode_error(text)])
