"""Simulated sockets: streams of bytes with delay, finite buffers, and several ways to end.

A `Wire` is one TCP connection: what the server holds of it is a `SimSocket` with the methods of a
socket, what a client holds is the wire itself. Bytes of one direction keep their order; two wires
overtake each other. What is sent and not yet read fills a buffer, and a full buffer stops the
sender. Nothing here knows the protocol.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections import deque
from collections.abc import Callable
from types import EllipsisType
from typing import Any

from tests.sim.clock import MS, SECOND, World
from tests.sim.tls import Sealed

PORT = 29400
KEEPALIVE_NS = 60 * SECOND
"""As `syncer.tcp` sets it up: 15 s of silence, then three probes; or 60 s without an answer."""

NO_MEMORY = 0
"""In the place of an error number: Python itself has none."""


class Bottleneck:
    """What all bytes of one direction pass at the server, one after the other. At 0 ns each it is
    none, and only counts them."""

    def __init__(self, ns_per_byte: float = 0.0):
        self.ns_per_byte = ns_per_byte
        self.free_ns = 0.0
        self.bytes = 0

    def passed_ns(self, now_ns: int, count: int) -> float:
        """When so many more bytes have passed it."""
        self.bytes += count
        if not self.ns_per_byte:
            return now_ns
        self.free_ns = max(now_ns, self.free_ns) + count * self.ns_per_byte
        return self.free_ns


class Pipe:
    """One direction of a wire. Calls `arrived` at the receiver, `drained` at the sender."""

    def __init__(self, world: World, delay_ns: float, ns_per_byte: float, capacity: int,
                 bottleneck: Bottleneck):
        self.world = world
        self.bottleneck = bottleneck
        self.delay_ns = delay_ns
        self.ns_per_byte = ns_per_byte
        self.capacity = capacity
        self.held = 0
        """Bytes that were sent and not yet read."""
        self.inbox = bytearray()
        self.dribble = 0
        """So many of the next bytes arrive one by one, or two or three."""
        self.finished = False
        self.eof = False
        self.dead = False
        self.full = False
        self.free_ns = 0.0
        self.last_ns = 0
        self.arrived: Callable[[], None] = lambda: None
        self.drained: Callable[[], None] = lambda: None

    @property
    def room(self) -> int:
        return max(0, self.capacity - self.held)

    def send(self, data: bytes) -> None:
        """Put bytes on their way; the caller has seen that there is room."""
        self.held += len(data)
        for piece in self._pieces(data):
            self.world.after(self._arrival_ns(len(piece)) - self.world.now_ns, self._arrive, piece)

    def finish(self) -> None:
        """No more bytes: the end arrives behind what is on its way."""
        if not self.finished:
            self.finished = True
            self.world.after(self._arrival_ns(0) - self.world.now_ns, self._arrive, None)

    def take(self, count: int) -> bytearray:
        """Up to `count` of the bytes that are there."""
        found = self.inbox[:count]
        del self.inbox[:count]
        self.held -= len(found)
        if self.full and 3 * self.room >= self.capacity:
            self.full = False
            self.drained()
        return found

    def _arrival_ns(self, count: int) -> int:
        begin = max(self.bottleneck.passed_ns(self.world.now_ns, count), self.free_ns)
        self.free_ns = begin + count * self.ns_per_byte
        jitter = self.world.rng.random() * self.delay_ns
        self.last_ns = max(self.last_ns, int(self.free_ns + self.delay_ns + jitter))
        return self.last_ns

    def _pieces(self, data: bytes) -> list[bytes]:
        """As they will be seen at the other end: whole, or cut anywhere."""
        rng = self.world.rng
        if len(data) > 1 and rng.random() < 0.1:
            cut = rng.randrange(1, len(data))
            data, rest = data[:cut], [data[cut:]]
        else:
            rest = []
        pieces = []
        while self.dribble > 0 and data:
            count = rng.randint(1, 3)
            pieces.append(data[:count])
            data = data[count:]
            self.dribble -= count
        return [*pieces, data, *rest] if data else [*pieces, *rest]

    def _arrive(self, data: bytes | None) -> None:
        if self.dead:
            return
        if data is None:
            self.eof = True
        else:
            self.inbox += data
        self.arrived()


class Wire:
    """One TCP connection, seen by its client.

    received(data): bytes have arrived and are read. ended(): the server has closed or reset it, or
    nobody listens; nothing comes after it. tls: what it shows in place of what the fleet does; None
    where it speaks none.
    """

    def __init__(self, network: Network, delay_ns: float, received: Callable[[bytes], None],
                 ended: Callable[[], None], tls: ssl.SSLContext | EllipsisType | None = ...):
        world = network.world
        self.network = network
        self.world = world
        self.received, self.ended = received, ended
        # A far peer has larger buffers: nobody gets less than about 4 kB/s.
        rate, capacity = network.ns_per_byte, max(network.capacity, int(4 * delay_ns / MS))
        self.up = Pipe(world, delay_ns * world.between(1, 3), rate, capacity, network.incoming)
        self.down = Pipe(world, delay_ns * world.between(1, 3), rate, capacity, network.outgoing)
        self.socket = SimSocket(self, network.next_number())
        self.backlog: deque[bytes] = deque()
        self.reading = True
        self.drowned = False
        self.listener: Listener | None = None
        """Of the process that it has reached."""
        self.over = False
        """The client has nothing to do with it any more."""
        self.up.drained = self._flush
        self.down.arrived = self._read
        world.after(self.up.delay_ns, self._dialed)
        context = network.tls if isinstance(tls, EllipsisType) else tls
        self.sealed = None if context is None else Sealed(context)
        if self.sealed is not None:
            self._send(self.sealed.begin())

    def _dialed(self) -> None:
        """The first packet reaches the server's machine."""
        self.listener = listener = self.network.listener
        if self.over or self.socket.error or self.drowned:
            return
        if listener is None or not listener.takes(self.socket):
            self.reset(client_after_ns=self.down.delay_ns)

    # ---- the client --------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Send, when there is room: a client's program waits with what does not fit."""
        if not (self.over or self.drowned):
            self._send(data if self.sealed is None else self.sealed.seal(data))

    def _send(self, data: bytes) -> None:
        if data:
            self.backlog.append(data)
            self._flush()

    def _flush(self) -> None:
        while self.backlog:
            room = self.up.room
            if not room:
                self.up.full = True
                return
            data = self.backlog.popleft()
            self.up.send(data[:room])
            if len(data) > room:
                self.backlog.appendleft(data[room:])

    def _read(self) -> None:
        while self.reading and not self.over and self.down.inbox:
            self._take(bytes(self.down.take(len(self.down.inbox))))
        if self.reading and not self.over and self.down.eof:
            self.end()

    def _take(self, data: bytes) -> None:
        if self.sealed is not None:
            try:
                data, answer = self.sealed.open(data)
            except ssl.SSLError:                  # the server wants nothing of what was shown
                self.close()
                self.ended()
                return
            self._send(answer)
        if data:
            self.received(data)

    def drown(self) -> None:
        """Nothing of it ever reaches the server, and the client believes that it does."""
        self.drowned = True

    def pause(self) -> None:
        """Stop reading: what comes fills the buffers."""
        self.reading = False

    def resume(self) -> None:
        if not self.reading:
            self.reading = True
            self._read()

    def close(self) -> None:
        """The client lets go: the server reads the end, or is told that nobody wants its bytes."""
        if self.over:
            return
        self.over = True
        if self.down.inbox or self.backlog:
            self.reset(server_after_ns=self.up.delay_ns)
        else:
            self.up.finish()

    def end(self) -> None:
        if not self.over:
            self.over = True
            self.ended()

    # ---- the network -------------------------------------------------------------------------

    def vanish(self, stray: bytes = b"", stray_ns: float = 0) -> None:
        """The client's machine is gone without a word, and the server's finds out by itself.

        stray: what it had sent last is that long on its way, if all before has arrived.
        """
        whole = not self.backlog and self.up.held == len(self.up.inbox)
        self.up.dead = self.down.dead = True
        if stray and whole:
            said = stray if self.sealed is None else self.sealed.seal(stray)
            self.world.after(stray_ns, self._stray, said)
        self.world.after(KEEPALIVE_NS, self.socket.fail, errno.ETIMEDOUT)
        self.end()

    def _stray(self, data: bytes) -> None:
        if not self.socket.closed and not self.socket.error:
            self.up.held += len(data)
            self.up.inbox += data
            self.up.arrived()

    def reset(self, client_after_ns: float = KEEPALIVE_NS,
              server_after_ns: float = KEEPALIVE_NS) -> None:
        """What is on its way is lost; each side hears of it after its own delay, at the latest when
        keep-alive finds out."""
        self.up.dead = self.down.dead = True
        late = errno.ETIMEDOUT if server_after_ns >= KEEPALIVE_NS else errno.ECONNRESET
        self.world.after(client_after_ns, self.end)
        self.world.after(server_after_ns, self.socket.fail, late)


class SimSocket:
    """The server's end of a wire, as `socket.socket` has it, never blocking."""

    def __init__(self, wire: Wire, number: int):
        self.wire = wire
        self.number = number
        self.error = 0
        self.touched: Callable[[SimSocket], None] | None = None
        """Of the loop that waits for it."""
        self.closed = False
        self.family = socket.AF_INET
        wire.up.arrived = self._touch
        wire.down.drained = self._touch

    def _touch(self) -> None:
        if self.touched is not None:
            self.touched(self)

    def fail(self, number: int) -> None:
        if not self.error:
            self.error = number
            self._touch()

    @property
    def readable(self) -> bool:
        up = self.wire.up
        return bool(up.inbox or up.eof or self.error)

    @property
    def writable(self) -> bool:
        down = self.wire.down
        return bool(self.error or not down.full)

    @property
    def unacknowledged(self) -> int:
        """Bytes that have not arrived: who reads them, and when, is the peer's affair."""
        down = self.wire.down
        return down.held - len(down.inbox)

    def _raise(self) -> None:
        if self.closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if self.error:
            raise OSError(self.error, os.strerror(self.error))

    # ---- what the server calls ---------------------------------------------------------------

    def fileno(self) -> int:
        return -1 if self.closed else self.number

    def setblocking(self, flag: bool) -> None:
        assert flag is False

    def setsockopt(self, *given: Any) -> None:
        self._raise()
        self.wire.network.call("setsockopt")

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", PORT

    def getsockopt(self, *given: Any) -> bytes:
        raise OSError(errno.ENOPROTOOPT, os.strerror(errno.ENOPROTOOPT))

    def recv_into(self, buffer: memoryview) -> int:
        up = self.wire.up
        self.wire.network.call("recv_into")
        if not up.inbox:
            self._raise()
            if up.eof:
                return 0
            raise BlockingIOError
        if self.wire.network.spurious and self.wire.world.chance(0.05):
            raise InterruptedError
        found = up.take(len(buffer))
        buffer[:len(found)] = found
        return len(found)

    def sendmsg(self, buffers: list[Any]) -> int:
        """Takes what fits; a reset of which nobody has heard yet swallows it."""
        self._raise()
        self.wire.network.call("sendmsg")
        down = self.wire.down
        assert not down.finished, "sent behind the end"
        room = down.room
        if not room:
            down.full = True
            raise BlockingIOError
        data = b"".join(bytes(buffer) for buffer in buffers)
        down.send(data[:room])
        if len(data) > room:
            down.full = True
        return min(len(data), room)

    def send(self, data: Any) -> int:
        return self.sendmsg([data])

    def shutdown(self, how: int) -> None:
        self._raise()
        self.wire.network.call("shutdown")
        self.wire.down.finish()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.touched = None
        wire = self.wire
        if wire.up.inbox and not self.error:
            # Unread bytes: the peer gets a reset, which may overtake what was sent to it.
            if wire.world.chance(0.5):
                wire.down.inbox.clear()
                wire.down.dead = True
            wire.up.dead = True
            wire.world.after(wire.down.delay_ns, wire.end)
        elif not self.error:
            wire.down.finish()
            wire.up.arrived = wire.up.inbox.clear  # nobody reads


class Listener:
    """The listening socket of one server process."""

    def __init__(self, network: Network, backlog_max: int = 512, sockets_max: int | None = None):
        self.network = network
        self.sockets_max = sockets_max
        """More would be descriptors that files need."""
        self.backlog_max = backlog_max
        self.waiting: deque[SimSocket] = deque()
        self.closed = False
        self.family = socket.AF_INET
        self.touched: Callable[[Listener], None] | None = None
        self.accepted: list[SimSocket] = []
        self.failing: deque[int] = deque()
        """Error numbers of the next calls of `accept`."""
        assert network.listener is None, "two servers listen on one port"
        network.listener = self

    def takes(self, sock: SimSocket) -> bool:
        """A client has dialed; False if nobody will answer."""
        if len(self.waiting) >= self.backlog_max:
            return False
        self.waiting.append(sock)
        if self.touched is not None:
            self.touched(self)
        return True

    @property
    def readable(self) -> bool:
        return bool(self.waiting)

    writable = False

    def accept(self) -> tuple[SimSocket, tuple[str, int]]:
        if not self.waiting:
            raise BlockingIOError
        if self.failing:
            number = self.failing.popleft()
            raise OSError(number, os.strerror(number))
        sock = self.waiting.popleft()
        if self.sockets_max is not None:          # this one is yet to be looked at
            assert sum(not other.closed for other in self.accepted) <= self.sockets_max
        self.accepted.append(sock)
        return sock, ("127.0.0.1", sock.number)

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", PORT

    def fileno(self) -> int:
        return -1 if self.closed else 0

    def close(self) -> None:
        """Whoever waits to be accepted is reset."""
        if self.closed:
            return
        self.closed = True
        self.touched = None
        self.network.listener = None
        for sock in self.waiting:
            sock.wire.reset(client_after_ns=sock.wire.down.delay_ns)
        self.waiting.clear()


class Network:
    """All wires of a run lead to one port. `spurious`: a wait may end although nothing is there.

    failing: error numbers of the system's next answers to a call of this name. tls: what the fleet
    shows; None if it speaks no TLS.
    """

    CALLS = ("register", "modify", "setsockopt", "recv_into", "sendmsg", "shutdown")

    def __init__(self, world: World, ns_per_byte: float, capacity: int, spurious: bool):
        self.world = world
        self.ns_per_byte = ns_per_byte
        self.capacity = capacity
        self.spurious = spurious
        self.listener: Listener | None = None
        self.tls: ssl.SSLContext | None = None
        self.number = 0
        self.incoming, self.outgoing = Bottleneck(), Bottleneck()
        self.failing: dict[str, deque[int]] = {name: deque() for name in self.CALLS}

    def call(self, name: str) -> None:
        """The server asks its system for this on behalf of a connection."""
        if self.failing[name]:
            number = self.failing[name].popleft()
            if number == NO_MEMORY:
                raise MemoryError
            raise OSError(number, os.strerror(number))

    def next_number(self) -> int:
        self.number += 1
        return self.number

    def delay_ns(self) -> float:
        """Of a new link."""
        return self.world.between(0.1, 50) * MS
