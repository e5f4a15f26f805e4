"""The fuzz target of reassembly: pieces over several sockets, compared with a slow twin.

An input is a list of pieces: which socket, which message, where in it, and how many of its bytes
wait until the socket gets its next piece. The twin keeps one bit for each byte of a message.
"""

from __future__ import annotations

import struct
from itertools import pairwise
from random import Random
from typing import NamedTuple

from syncer.errors import RemoteProtocolError
from syncer.layout import AVG, FragmentLayout, Layout
from syncer.protocol import DTYPE_F32, HEADER_BYTES, PARTIAL_MESSAGES_MAX, Msg
from syncer.wire import encode
from syncer.wire.frames import SINK_LEAD, FrameReader, Partial, Reassembly, Sink
from syncer.wire.limits import Limits
from syncer.wire.payload import Payload, space
from tests.fuzz.target import Target, must
from tests.fuzz.wire_targets import chunk, one_line

PIECE = struct.Struct("<BBHHHH")
"""A `Piece`."""
SOCKETS = 3
PATTERN = bytes(n % 251 for n in range(2**16 + 2**8))
LIMITS = Limits.for_server(Layout((FragmentLayout(AVG, (60,)),)), DTYPE_F32)._replace(
    open_bytes_max=4000)
"""So little that the sum of declared totals is met as well."""


class Piece(NamedTuple):
    """What one CHUNK carries; the last `held` bytes of it come with the next piece of its socket,
    or in the end."""

    socket: int
    msg_id: int
    total: int
    offset: int
    size: int
    held: int


def inner(msg_id: int, total: int) -> bytes:
    """The whole message: right if there is room for a header."""
    return encode.frame(Msg.INIT_PARAMS, PATTERN[msg_id : msg_id + max(0, total - HEADER_BYTES)])[
        :total]


class Twin:
    """Reassembly as it is written down (wire 8.1 to 8.5): a total and the bytes taken, as bits."""

    def __init__(self) -> None:
        self.open: dict[int, tuple[int, int]] = {}
        self.here: dict[int, int] = {}
        self.came: dict[int, int] = {}
        """Of open messages: the bytes that are in, as bits."""

    def take(self, msg_id: int, total: int, offset: int, size: int) -> bool:
        """Whether the head of a piece is accepted; its bytes are taken then."""
        if size == 0 or total > LIMITS.inner_bytes_max or offset + size > total:
            return False
        if msg_id not in self.open:
            declared = sum(each for each, _ in self.open.values())
            if (len(self.open) >= PARTIAL_MESSAGES_MAX
                    or declared + total > LIMITS.open_bytes_max):
                return False
            self.open[msg_id] = total, 0
        known, taken = self.open[msg_id]
        piece = ((1 << size) - 1) << offset
        if known != total or taken & piece:
            return False
        self.open[msg_id] = total, taken | piece
        return True

    def bring(self, msg_id: int, offset: int, size: int) -> None:
        """So many bytes of a piece are in."""
        self.came[msg_id] = self.came.get(msg_id, 0) | ((1 << size) - 1) << offset

    def there(self, msg_id: int) -> int:
        """Bytes that are in without a gap: the ones at the low end."""
        came = self.came[msg_id]
        return (~came & (came + 1)).bit_length() - 1

    def fill(self, msg_id: int, size: int) -> bool | None:
        """A piece is in: None, or whether the message that is whole now is a right one."""
        total, _ = self.open[msg_id]
        self.here[msg_id] = self.here.get(msg_id, 0) + size
        if self.here[msg_id] < total:
            return None
        del self.open[msg_id], self.here[msg_id], self.came[msg_id]
        return total >= HEADER_BYTES


class Taken(Sink):
    """Puts what comes into the message, for some from a room that takes little at a time."""

    told: tuple[int, int, int] | None = None

    def came(self, message: Partial, piece: int, start: int, end: int) -> None:
        self.told = piece, start, end
        if self.room is not None:
            memoryview(message.payload)[start:end] = memoryview(self.room)[SINK_LEAD:][
                : end - start]


class Sockets:
    """The readers of a group, fed with the same pieces as the twin."""

    def __init__(self) -> None:
        self.group = Reassembly(LIMITS, self.sink_of)
        room = space(SINK_LEAD + 30).obj
        must(isinstance(room, Payload), "it is not in memory of a message")
        self.rooms = None, room
        self.asked_for = 0
        self.messages: dict[int, Partial] = {}
        """Those with a sink."""
        self.readers = [FrameReader(LIMITS, self.group) for _ in range(SOCKETS)]
        self.waiting: list[tuple[bytes, Piece] | None] = [None] * SOCKETS
        self.twin = Twin()

    def sink_of(self, message: Partial) -> Sink:
        self.messages[self.asked_for] = message
        return Taken(self.rooms[self.asked_for % 2])

    def feed(self, socket: int, data: bytes) -> list[bytes] | None:
        """Messages that come out; None: refused."""
        try:
            return [bytes(payload) for _, payload in self.readers[socket].feed(data)]
        except RemoteProtocolError as error:
            one_line(error)
            return None

    def piece(self, piece: Piece) -> bool:
        """Whether the group goes on after it."""
        socket, msg_id, total, offset, size, held = piece
        if not self.rest(socket):
            return False
        data = inner(msg_id, total)[offset : offset + size].ljust(size, b"?")
        wire = chunk(msg_id, total, offset, data)
        held = min(held, size)
        accepted = self.twin.take(msg_id, total, offset, size)
        got = self.feed(socket, wire[: len(wire) - held])
        if not accepted:
            must(got is None, "a piece is taken that breaks a rule")
            return False
        self.waiting[socket] = wire[len(wire) - held :], piece
        self.twin.bring(msg_id, offset, size - held)
        if not held:
            return self.settle(socket, got)
        must(got == [], "half a piece is refused, or gives a message")
        self.asked_for = msg_id
        self.readers[socket].buffer()
        must(self.messages[msg_id].there == self.twin.there(msg_id),
             "another number of bytes is there without a gap")
        return True

    def rest(self, socket: int) -> bool:
        """Feeds what was held back; whether the group goes on."""
        waits = self.waiting[socket]
        if waits is None:
            return True
        *_, offset, size, held = waits[1]
        got = self.feed(socket, waits[0])
        if min(held, size):
            sink = self.messages[waits[1].msg_id].sink
            must(isinstance(sink, Taken) and sink.told is not None and sink.told[0] == offset
                 and sink.told[2] == offset + size, "other bytes are said to have come")
        return self.settle(socket, got)

    def settle(self, socket: int, got: list[bytes] | None) -> bool:
        """The last piece of this socket is in: compares what came out."""
        waits, self.waiting[socket] = self.waiting[socket], None
        if waits is None:
            return True
        _, msg_id, total, offset, size, _ = waits[1]
        self.twin.bring(msg_id, offset, size)
        whole = self.twin.fill(msg_id, size)
        if whole is None:
            must(got == [], "a message comes before its last piece")
        elif whole:
            must(got == [inner(msg_id, total)[HEADER_BYTES:]], "another message comes out")
        else:
            must(got is None, "a message without room for a header comes out")
        if whole is not None:
            self.messages.pop(msg_id, None)
        must(self.group.messages_open == len(self.twin.open), "another number of open messages")
        must(self.group.bytes_open == sum(t for t, _ in self.twin.open.values()),
             "another sum of open bytes")
        return got is not None


def check(data: bytes) -> bool:
    sockets = Sockets()
    for at in range(0, len(data) - PIECE.size + 1, PIECE.size):
        piece = Piece(*PIECE.unpack_from(data, at))
        if not sockets.piece(piece._replace(socket=piece.socket % SOCKETS)):
            return False
    return all(sockets.rest(socket) for socket in range(SOCKETS))


def make(random: Random) -> bytes:
    """Messages cut anywhere, their pieces in any order over the sockets."""
    pieces = []
    for msg_id in range(random.choice((1, 1, 2, 3, 70))):
        total = random.choice((random.randrange(13, 254), random.randrange(13, 60), 13, 253))
        edges = sorted({0, total, *(random.randrange(1, total) for _ in range(3))})
        for a, b in pairwise(edges):
            held = random.choice((0, 0, random.randrange(b - a + 1)))
            pieces.append(PIECE.pack(random.randrange(SOCKETS), msg_id, total, a, b - a, held))
    random.shuffle(pieces)
    return b"".join(pieces)


TARGET = Target(make, check)
