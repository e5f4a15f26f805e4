"""The way in: first frames, HELLO and DATA_HELLO.

It answers what can be refused without knowing rounds, and hands the rest on; it must not keep a
session of its own, and holds no more for strangers than the limits below. A long HELLO stops
nobody (rule 14.7): a worker reads it. A generation is no secret, it stands in log and tape: with a
key, a data socket of who has introduced himself is proved (rule 17.3).
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from typing import Any, Protocol

from syncer.config import Config
from syncer.core import actions, events
from syncer.errors import ConfigError, RemoteProtocolError
from syncer.layout import Layout
from syncer.protocol import Msg
from syncer.server.addresses import host_of
from syncer.server.capacity import Capacity
from syncer.server.conn import Channel, Owner
from syncer.server.farewell import Farewells
from syncer.server.group import Group
from syncer.server.log import Log
from syncer.server.loop import Loop
from syncer.server.reading import Reading
from syncer.server.secured import Secured, failure_of, is_plain, same_certificate
from syncer.server.workers import Job, Workers
from syncer.tls import Stream
from syncer.wire.encode import encode_error
from syncer.wire.extension import Role
from syncer.wire.frames import FrameReader
from syncer.wire.hello import Claim, Hello, carries, is_proved, read_hello
from syncer.wire.identity import Identity
from syncer.wire.layout import LayoutBytes
from syncer.wire.limits import Limits
from syncer.wire.messages import DataHello, no_proof_expected, parse_data_hello

STRANGERS_MAX = 1024
"""Sockets without an accepted first frame, if there are descriptors for so many; one more ends the
oldest of them."""
STRANGER_BYTES_MAX = 64 * 1024 * 1024
"""Received bytes of all unfinished first frames; beyond it the largest of them is refused. As there
are at most `STRANGERS_MAX`, that one has more than 64 KiB."""
FIRST_FRAME_NS = 30 * 10**9
"""Time from accept to a complete first frame."""
DATA_HELLO_WAIT_NS = 10 * 10**9
"""Time that a data socket waits for the HELLO of its group (wire 7.2)."""
HELLO_INLINE_MAX = 64 * 1024
"""A HELLO of at most so many bytes is read on the loop's thread: that takes up to 5 ms for the most
fragments that it can hold. A larger one stops everybody for up to a second and a half."""


class Host(Protocol):
    """What the way in needs of the server behind it."""

    @property
    def identity(self) -> Identity | None:
        """Of the session, or of what was resumed before it has one."""

    @property
    def layout(self) -> Layout | None:
        """Of the session."""

    def take_reader(self, channel: Channel, claim: Claim) -> Group:
        """Somebody who reads is let in. Raises RemoteProtocolError, with nothing done."""

    def identity_refusal(self, claim: Claim) -> str | None:
        """Text of the ERROR for a HELLO that does not belong to this run, else None."""

    def versions_held(self, hello: Hello) -> tuple[int, ...]:
        """Of each fragment the version of this run that its learner has, -1 for none."""

    def open_session(self, hello: Hello, identity: Identity) -> None:
        """The first HELLO that belongs to the run. Raises `ConfigError` when this server cannot
        merge such a layout."""

    def make_room(self, learner: int, sockets: int) -> None:
        """End the oldest connection of a learner that dials again, if it has one."""

    def find_group(self, learner: int, generation: int) -> Group | None:
        """The admitted, still connected group."""

    def handle(self, event: events.Event) -> None:
        """For the scheduler, which answers a `Hello` with `Admit` or `Refuse`."""


class Stranger(Owner):
    """A socket whose first frame is awaited, or a data socket whose group is."""

    def __init__(self, door: Door, number: int, sock: Stream, peer: str):
        self.door, self.number = door, number
        self.bytes = 0
        try:
            self.reader = FrameReader(Limits.first_frame(), None)
        except RemoteProtocolError as error:  # no memory, for which no message of it is to blame
            raise MemoryError(str(error)) from None
        self.channel = Channel(door.loop, sock, peer, self, self.reader,
                               door.config.write_timeout_s * 10**9)
        self.timer = door.loop.call_at(door.loop.now_ns() + FIRST_FRAME_NS,
                                       lambda: door.too_late(self))
        self.data_hello: DataHello | None = None

    def on_bytes(self, channel: Channel, count: int) -> None:
        self.bytes += count
        self.door.count_bytes(self, count)

    def on_frame(self, channel: Channel, kind: int, payload: memoryview) -> None:
        try:
            self.door.first_frame(self, kind, payload)
        except MemoryError:
            if self.number not in self.door.strangers:
                raise  # it is a member, or to be one
            self.no_memory()

    def no_memory(self) -> None:
        """For its HELLO, or for the session that this one would make."""
        self.door.loop.refused(self.channel.peer, os.strerror(errno.ENOMEM))
        self.on_lost(self.channel, "no memory")

    def on_broken(self, channel: Channel, text: str) -> None:
        self.door.refuse(channel, text)

    def on_lost(self, channel: Channel, reason: str) -> None:
        if failure := failure_of(channel):
            if is_plain(channel):
                self.door.refuse(channel, failure)
                return
            self.door.log.warning("TLS failed with who has connected", peer=channel.peer,
                                  reason=failure)
        self.door.forget(self)
        channel.close()


class Door:
    """Who has connected and is nobody yet: strangers, data sockets without their group, arrivals.

    A stranger becomes an arrival by its HELLO and a member by the scheduler's answer.

    Large: one method per step of that way, and a limit at each.
    """

    def __init__(self, loop: Loop, workers: Workers, config: Config, *, log: Log,
                 farewells: Farewells, capacity: Capacity, host: Host,
                 secured: Secured | None = None):
        self.secured = secured
        self.loop, self.config, self.log, self.host = loop, config, log, host
        self.farewells, self.capacity = farewells, capacity
        self.reading = Reading(workers)
        self.strangers: dict[int, Stranger] = {}
        self.stranger_bytes = 0
        self.welcomed = 0
        self.waiting: dict[tuple[int, int], list[Stranger]] = {}
        self.arrivals: dict[int, tuple[Channel, Hello]] = {}
        self.arrived_count = 0

    def welcome(self, sock: socket.socket, peer: str) -> None:
        """A new connection: it has `FIRST_FRAME_NS` for its first frame."""
        if len(self.strangers) >= STRANGERS_MAX:
            self._evict()
        while self._others() >= self.capacity.rest and (self.farewells.open or self.strangers):
            if self.farewells.open:
                self.farewells.shorten()
            else:
                self._evict()
        if self._others() >= self.capacity.rest:
            self.log.warning("too many learners wait for an answer: who comes now is closed",
                             peer=peer, limit=self.capacity.rest)
            sock.close()
            return
        self.welcomed += 1
        stream = sock if self.secured is None else self.secured.wrap(sock)
        stranger = Stranger(self, self.welcomed, stream, peer)
        self.strangers[stranger.number] = stranger

    def _others(self) -> int:
        """Sockets that belong to no member."""
        return len(self.strangers) + len(self.arrivals) + self.farewells.sockets

    def _evict(self) -> None:
        oldest = next(iter(self.strangers.values()))
        self.log.warning("too many connections without a HELLO: the oldest is closed",
                         peer=oldest.channel.peer, limit=min(STRANGERS_MAX, self.capacity.rest))
        oldest.on_lost(oldest.channel, "evicted")

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
            largest = max(self.strangers.values(), key=lambda other: other.bytes)
            self.refuse(largest.channel, "invalid first frame: this syncer receives too many "
                        "large first frames at once; try again later")

    def first_frame(self, stranger: Stranger, kind: int, payload: memoryview) -> None:
        if kind == Msg.HELLO:
            self._hello(stranger, payload)
        else:
            self._data_hello(stranger, parse_data_hello(payload))

    def _hello(self, stranger: Stranger, payload: memoryview) -> None:
        def read() -> Claim:
            return read_hello(payload, key=self.config.key_bytes, learners=self.config.learners)

        if self._is_short(payload):
            self._claim(stranger, read())
            return
        self._aside(stranger, read, lambda claim: self._claim(stranger, claim))

    # rule 14.7
    def _is_short(self, payload: memoryview) -> bool:
        """Whether a HELLO takes next to nothing to read: by its size, or as its layout, the long
        part of it, is that of the session byte for byte."""
        if len(payload) <= HELLO_INLINE_MAX:
            return True
        identity = self.host.identity
        layout = None if identity is None else identity.shape
        return (isinstance(layout, LayoutBytes) and carries(payload, layout)
                and len(payload) - len(layout) <= HELLO_INLINE_MAX)

    def _aside(self, stranger: Stranger, run: Callable[[], Any], then: Callable[[Any], None],
               next_one: bool = False) -> None:
        """`then(run())`, whose first half is done on a worker; unless it has gone meanwhile."""
        def done(result: Any, error: BaseException | None) -> None:
            if stranger.number not in self.strangers:
                return
            try:
                if error is not None:
                    raise error
                then(result)
            except RemoteProtocolError as refusal:
                self.refuse(stranger.channel, str(refusal))
            except MemoryError:
                if stranger.number not in self.strangers:
                    raise  # it is a member, or to be one
                stranger.no_memory()

        stranger.channel.pause()  # what follows its HELLO is for whoever takes it in
        stranger.timer.cancel()  # the rest of its time is this server's
        self.reading.submit(Job(run, done), next_one=next_one)

    def _claim(self, stranger: Stranger, claim: Claim) -> None:
        """A HELLO is read: who belongs to the run gets the session's layout, and the first one of a
        run gives it."""
        if claim.extension is not None and claim.extension.role is not Role.LEARNER:
            group = self.host.take_reader(stranger.channel, claim)
            self.forget(stranger)
            if not group.ended:
                self.open_reader(stranger.channel, group)
                stranger.channel.resume()
            return
        refusal = None
        if self.secured is not None:
            refusal = self.secured.refusal(stranger.channel, claim.learner)
        refusal = refusal or self.host.identity_refusal(claim)
        if refusal is not None:
            raise RemoteProtocolError(refusal)
        self._check_room(claim)
        layout = self.host.layout
        if layout is not None:
            self._arrive(stranger, claim.hello(layout))
        elif len(claim.layout) <= HELLO_INLINE_MAX:
            self._first(stranger, claim, claim.layout.read())
        else:
            self._aside(stranger, claim.layout.read,
                        lambda layout: self._first(stranger, claim, layout), next_one=True)

    def _check_room(self, claim: Claim) -> None:
        """Its sockets fit, those that it will dial as well: whoever is let in trains with all."""
        sockets = 1 + claim.num_streams
        if not self.capacity.has_room(sockets):
            self.host.make_room(claim.learner, sockets)
        if not self.capacity.has_room(sockets):
            raise RemoteProtocolError(
                f"this syncer has no room for {sockets} more sockets of a learner within its "
                f"{self.capacity.limit} descriptors; try again later")

    def _first(self, stranger: Stranger, claim: Claim, layout: Layout) -> None:
        if self.host.layout is not None:  # a shorter one was faster
            self._claim(stranger, claim)
            return
        hello, identity = claim.hello(layout), Identity.of_hello(claim)
        try:
            self.host.open_session(hello, identity._replace(shape=claim.layout.kept()))
        except ConfigError as error:
            raise RemoteProtocolError(f"invalid HELLO: {error}") from None
        self._arrive(stranger, hello)

    def _arrive(self, stranger: Stranger, hello: Hello) -> None:
        channel = stranger.channel
        self.forget(stranger)
        self.arrived_count += 1
        self.arrivals[self.arrived_count] = channel, hello
        channel.pause()
        self.host.handle(events.Hello(self.arrived_count, hello.learner, hello.generation,
                                      len(hello.layout.fragments), hello.fingerprint,
                                      self.host.versions_held(hello),
                                      hello.extension is not None and hello.extension.fates))

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
        self._check_proof(stranger, data_hello, group)
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

    # rule 17.3
    def _check_proof(self, stranger: Stranger, data_hello: DataHello, group: Group) -> None:
        """The generation of a group stands in logs: with a key, who has introduced himself proves
        each of his sockets. Of others there is only the address to go by."""
        key, peer, control = self.config.key_bytes, stranger.channel.peer, group.control.peer
        if self.secured is not None and not same_certificate(stranger.channel, group.control):
            raise RemoteProtocolError(
                f"unknown learner {data_hello.learner} generation {data_hello.generation}: its "
                "other sockets came with another certificate")
        if group.extended and key:
            if not is_proved(data_hello, key):
                raise RemoteProtocolError(
                    f"unknown learner {data_hello.learner} generation {data_hello.generation}: "
                    "this DATA_HELLO is not proved with the island key")
        elif data_hello.proof:
            raise no_proof_expected()
        elif host_of(peer) != host_of(control):
            self.log.warning("a data socket comes from another address than its learner",
                             learner=group.learner, peer=peer, control_peer=control)

    @staticmethod
    def open_reader(channel: Channel, group: Group) -> None:
        """From the next frame on the channel reads what a member of the group may send."""
        reader = channel.reader
        assert reader is not None  # whoever reads first frames has one
        reader.reassembly = group.reassembly
        reader.limits = group.limits

    def _no_group(self, stranger: Stranger, data_hello: DataHello) -> None:
        learner, generation = data_hello[:2]
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
