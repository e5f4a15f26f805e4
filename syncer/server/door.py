"""The way in: listening, first frames, HELLO and DATA_HELLO.

It answers what can be refused without knowing rounds, and hands the rest on; it must not keep a
session of its own, and holds no more for strangers than the limits below.
"""

from __future__ import annotations

import os
import socket
from typing import Any, Protocol

from syncer.config import Config
from syncer.errors import RemoteProtocolError
from syncer.protocol import Msg
from syncer.server.conn import Channel, Farewell, Group, Owner, configure
from syncer.server.log import Log
from syncer.server.loop import READ, Handler, Loop
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
ACCEPTS_PER_TURN = 64
NO_DESCRIPTORS_PAUSE_NS = 10**9


class Host(Protocol):
    """What the way in needs of the server behind it."""


    def identity_refusal(self, hello: Hello) -> str | None:
        """Why a HELLO does not belong to the run that was resumed, else None."""

    def hello(self, channel: Channel, hello: Hello) -> None:
        """A HELLO that equals the session: admit it or refuse it, now."""

    def find_group(self, learner: int, generation: int) -> Group | None:
        """The admitted, still connected group."""


class Stranger(Owner):
    """A socket whose first frame is awaited, or a data socket whose group is."""

    def __init__(self, door: Door, number: int):
        self.door = door
        self.number = number
        self.bytes = 0
        self.timer: Any = None
        self.channel: Any = None
        self.data_hello: DataHello | None = None

    def on_bytes(self, channel: Channel, count: int) -> None:
        self.bytes += count
        self.door.count_bytes(self, count)

    def on_frame(self, channel: Channel, kind: int, payload: Any) -> None:
        self.door.first_frame(self, kind, payload)

    def on_broken(self, channel: Channel, text: str) -> None:
        self.door.refuse(channel, text)

    def on_lost(self, channel: Channel, reason: str) -> None:
        self.door.forget(self)
        channel.close()


class Door(Handler):
    """Accepts sockets until `close`; a listening socket comes from `System.listen`."""

    def __init__(self, loop: Loop, config: Config, log: Log, sock: socket.socket, host: Host):
        self.loop, self.config, self.log, self.host = loop, config, log, host
        self.sock = sock
        self.strangers: dict[int, Stranger] = {}
        self.stranger_bytes = 0
        self.accepted = 0
        self.farewells: dict[Farewell, None] = {}
        self.waiting: dict[tuple[int, int], list[Stranger]] = {}
        self.listening = False
        self._listen()

    @property
    def address(self) -> tuple[str, int]:
        return self.sock.getsockname()[:2]

    # ----------------------------------------------------------------------------- accepting
    def ready(self, events: int) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, address = self.sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # Out of descriptors or memory: the backlog waits, those who are in go on.
                self.log.warning("cannot accept connections for a moment",
                                 error=os.strerror(error.errno or 0))
                self._pause()
                return
            self._welcome(sock, address)

    def _welcome(self, sock: socket.socket, address: tuple) -> None:
        try:
            configure(sock)
        except OSError:
            sock.close()  # reset before it was looked at
            return
        if len(self.strangers) >= STRANGERS_MAX:
            oldest = next(iter(self.strangers.values()))
            self.log.warning("too many connections without a HELLO: the oldest is closed",
                             peer=oldest.channel.peer, limit=STRANGERS_MAX)
            oldest.on_lost(oldest.channel, "evicted")
        self.accepted += 1
        stranger = Stranger(self, self.accepted)
        reader = FrameReader(Limits.first_frame(), None)
        peer = f"{address[0]}:{address[1]}"
        stranger.channel = Channel(self.loop, sock, peer, stranger, reader,
                                   self.config.write_timeout_s * 10**9)
        stranger.timer = self.loop.call_at(self.loop.now_ns() + FIRST_FRAME_NS,
                                           lambda: self._too_late(stranger))
        self.strangers[stranger.number] = stranger

    def _listen(self) -> None:
        if not self.listening and self.sock.fileno() >= 0:
            self.listening = True
            self.loop.register(self.sock, READ, self)

    def _pause(self) -> None:
        self.listening = False
        self.loop.unregister(self.sock)
        self.loop.call_at(self.loop.now_ns() + NO_DESCRIPTORS_PAUSE_NS, self._listen)

    def close(self) -> None:
        """Stop listening and drop everybody who is not in; farewells go on."""
        if self.listening:
            self.loop.unregister(self.sock)
            self.listening = False
        self.sock.close()
        for stranger in list(self.strangers.values()):
            stranger.on_lost(stranger.channel, "the server ends")

    # --------------------------------------------------------------------------- first frames
    def count_bytes(self, stranger: Stranger, count: int) -> None:
        self.stranger_bytes += count
        if self.stranger_bytes > STRANGER_BYTES_MAX:
            self.refuse(stranger.channel, "invalid first frame: this syncer receives too many "
                        "large first frames at once; try again later")

    def first_frame(self, stranger: Stranger, kind: int, payload: Any) -> None:
        if kind == Msg.HELLO:
            self._hello(stranger, payload)
        else:
            self._data_hello(stranger, parse_data_hello(payload))

    def _hello(self, stranger: Stranger, payload: Any) -> None:
        config = self.config
        hello = parse_hello(payload, key=config.key_bytes, learners=config.learners)
        refusal = self.host.identity_refusal(hello)
        if refusal is not None:
            raise RemoteProtocolError(refusal)
        self.forget(stranger)
        self.host.hello(stranger.channel, hello)

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
            self.loop.now_ns() + DATA_HELLO_WAIT_NS, lambda: self._no_group(stranger))

    def group_ready(self, group: Group) -> None:
        """A HELLO was admitted: the data sockets that came before it join."""
        for stranger in self.waiting.pop((group.learner, group.generation), ()):
            stranger.timer.cancel()
            data_hello, stranger.data_hello = stranger.data_hello, None
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
        channel.reader.reassembly = group.reassembly
        channel.reader.limits = group.limits

    def _no_group(self, stranger: Stranger) -> None:
        learner, generation, _ = stranger.data_hello
        self.refuse(stranger.channel, f"unknown learner {learner} generation {generation}: no "
                    f"HELLO within {DATA_HELLO_WAIT_NS // 10**9} s of this DATA_HELLO")

    def _too_late(self, stranger: Stranger) -> None:
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
        self.say_farewell([channel], channel, [encode_error(text)])

    def say_farewell(self, channels: list, main: Channel, frames: list[bytes]) -> None:
        """Send `frames` on `main` and close all these channels without losing them."""
        farewell = Farewell(channels, main, lambda: self.farewells.pop(farewell, None))
        self.farewells[farewell] = None
        farewell.finish(frames)
        if len(self.farewells) > STRANGERS_MAX:
            next(iter(self.farewells)).close()
