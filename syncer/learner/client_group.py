"""The sockets of one connection generation: a reader and a writer thread each, bounded queues.

Carries bytes between sockets and `Session`; must not dial, retry or decide what an end means:
`Client` does. A dead socket ends the whole group, since stripes of every message are on it.

All state is under the client's one lock, which is never held during I/O, hashing or reassembly.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeAlias

from syncer import tcp
from syncer.errors import NoMemory, SyncerError
from syncer.gather import advance
from syncer.learner.changes import Rebuilt
from syncer.learner.connection import CONTROL, Connection, Inbound
from syncer.learner.failures import TurnedAway
from syncer.learner.news import News
from syncer.learner.pulse import Pulse
from syncer.learner.session import Session
from syncer.learner.tls_pulse import TlsPulse
from syncer.tls import Stream, TlsSocket
from syncer.wire.messages import Bcast

Gather: TypeAlias = list[bytes | memoryview]
"""The buffers of one frame, in order."""

QUEUE_FRAMES_MAX = 256
"""Frames that wait for one socket; a message larger than that goes into empty queues only."""


class Receipt:
    """Whether a message has left: `sent` when every byte was handed to the kernel."""

    __slots__ = ("_waiting", "dropped")

    def __init__(self, frames: int, dropped: bool = False):
        self._waiting = frames
        self.dropped = dropped
        """The connection ended before; nothing of it will be sent again."""

    @property
    def sent(self) -> bool:
        """All of it was handed to the kernel."""
        return self._waiting == 0 and not self.dropped

    @property
    def settled(self) -> bool:
        """Sent or dropped: it will not change any more."""
        return self._waiting == 0 or self.dropped

    def one_sent(self) -> None:
        """Called by the writer for each frame."""
        self._waiting -= 1


class _Socket:
    __slots__ = ("bytes_received", "bytes_sent", "queue", "small", "socket", "threads", "wake")

    def __init__(self, connected: Stream, lock: threading.RLock):
        self.socket = connected
        self.queue: deque[tuple[Gather, Receipt]] = deque()
        self.small: deque[tuple[Gather, Receipt]] = deque()
        """Frames that no tensor is in front of but the piece that has begun."""
        self.wake = threading.Condition(lock)
        self.threads: list[threading.Thread] = []
        self.bytes_sent = 0
        self.bytes_received = 0


class NoThreads(OSError):
    """The system gives this process no more threads: an outage like any other, but at the start."""

    def __init__(self, what: str):
        self.text = (
            f"no thread can be made for {what}: this process, its user or its container has all "
            "it may have (ulimit -u, pids.max); allow more, or use fewer data sockets "
            "(num_streams), each of which takes two")
        super().__init__(errno.EAGAIN, self.text)


class ClientGroup:
    """One generation on its sockets: `sockets[0]` is the control socket, already greeted.

    received: bytes that came on it so far. changed: condition on the client's lock, notified
    whenever a waiter may go on. Raises OSError when the system has no descriptor for its pulse,
    `NoThreads` when it has no thread.

    Large: queues, threads and sockets are one life under one lock, and end together.
    """

    def __init__(self, session: Session, connection: Connection, sockets: list[Stream],
                 lock: threading.RLock, changed: threading.Condition, *, news: News,
                 received: int = 0):
        self.connection = connection
        self.ended_by: str | None = None
        """Why the group ends; None while it lives."""
        self.turned_away: str | None = None
        """What the server said that could not serve it now, but may later: the back-off goes on."""
        self.greeted = False
        """Whether it was said where the run is."""
        self.silence: float | None = None
        """How long a silence was that has ended, until somebody has said so."""
        self.heard_at = time.monotonic()
        """When the last byte came."""
        self._session, self._news = session, news
        self._lock = lock
        self._changed = changed
        self._sockets = [_Socket(connected, lock) for connected in sockets]
        self._sockets[CONTROL].bytes_received = received
        self._data = self._sockets[1:] or self._sockets
        self._reading = 0
        control = sockets[CONTROL]
        self._pulse = (TlsPulse(control) if isinstance(control, TlsSocket)
                       else Pulse(control.fileno()))

    def start(self) -> None:
        """Starts the threads; they end with the group. Raises `NoThreads`, having ended: it is to
        be closed then."""
        self._news.connected(time.monotonic())
        try:
            self._start_threads()
        except (OSError, RuntimeError):
            failure = NoThreads("a connection")
            self.end(failure.text)
            raise failure from None

    def _start_threads(self) -> None:
        self._pulse.start()
        for stream, each in enumerate(self._sockets):
            for name, body in (("read", self._read), ("write", self._write)):
                thread = threading.Thread(
                    target=self._run, args=(body, stream), daemon=True,
                    name=f"syncer-{name}-{stream}")
                thread.start()
                each.threads.append(thread)
                self._reading += name == "read"

    # --- under the client's lock -----------------------------------------------------------------

    def has_room(self, frames: int) -> bool:
        """Whether a message of so many CHUNKs may be queued now."""
        share = -(-frames // len(self._data))
        waiting = max(len(each.queue) for each in self._data)
        return waiting == 0 or waiting + share <= QUEUE_FRAMES_MAX

    def control_has_room(self) -> bool:
        """Whether a small frame may be queued on the control socket now."""
        return len(self._sockets[CONTROL].small) < QUEUE_FRAMES_MAX

    @property
    def idle(self) -> bool:
        """Everything that was queued is with the kernel."""
        return not any(each.queue or each.small for each in self._sockets)

    def enqueue(self, frames: Iterable[tuple[int, Gather]]) -> Receipt:
        """Queues frames given as (stream, gather list); the buffers must stay unchanged."""
        frames = list(frames)
        receipt = Receipt(len(frames), dropped=self.ended_by is not None)
        if not receipt.dropped:
            for stream, buffers in frames:
                each = self._sockets[stream]
                each.queue.append((buffers, receipt))
                each.wake.notify()
            if any(len(each.queue) > 1 for each in self._data):
                for each in self._data:
                    if not each.queue:
                        each.wake.notify()  # it may take of another one's
        return receipt

    def say(self, frame: bytes) -> Receipt:
        """Queues a small frame on the control socket, in front of every piece of a tensor there."""
        receipt = Receipt(1, dropped=self.ended_by is not None)
        if not receipt.dropped:
            control = self._sockets[CONTROL]
            control.small.append(([frame], receipt))
            control.wake.notify()
        return receipt

    def repeat(self, frame: bytes, due_s: float, every_s: float) -> None:
        """What the control socket says in a pause, from when on (monotonic), and how often."""
        self._pulse.repeat(frame, due_s, every_s)

    def end(self, reason: str) -> str:
        """The group sends nothing more; what was not sent is dropped. Returns the first reason."""
        if self.ended_by is not None:
            return self.ended_by
        self.ended_by = reason
        for each in self._sockets:
            for queue in (each.small, each.queue):
                for _, receipt in queue:
                    receipt.dropped = True
                queue.clear()
            each.wake.notify()
        self._session.lost(self.connection)
        self._changed.notify_all()
        return reason

    @property
    def bytes_sent(self) -> int:
        """Bytes handed to the kernel, without the greetings."""
        return sum(each.bytes_sent for each in self._sockets)

    @property
    def link(self) -> tcp.Link:
        """What its sockets were seen to carry; before they are closed."""
        return tcp.link(each.socket for each in self._sockets)

    @property
    def bytes_received(self) -> int:
        """Bytes taken from the kernel."""
        return sum(each.bytes_received for each in self._sockets)

    # --- without the lock ------------------------------------------------------------------------

    def close(self, drain_s: float) -> None:
        """Ends the connection and every thread; for an ended group.

        First only the sending side is shut, and the readers go on for up to `drain_s` seconds: an
        ERROR that is under way must not be lost, and closing a socket with unread input could
        reset the connection before the server has read our last frame.
        """
        self._shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + drain_s
        with self._lock:
            while self._reading and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
        self.shut()
        for each in self._sockets:
            for thread in each.threads:
                thread.join()
        self._pulse.stop()
        for each in self._sockets:
            each.socket.close()

    def forget(self) -> None:
        """In a forked child: closes its copies of the sockets; the connection is the parent's."""
        self._pulse.forget()
        for each in self._sockets:
            each.socket.close()

    def shut(self) -> None:
        """Nothing is sent or received any more: each thread finds that out and ends."""
        self._shutdown(socket.SHUT_RDWR)

    def _shutdown(self, how: int) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):  # not connected any more: that is what we want
                each.socket.shutdown(how)

    def _run(self, body: Callable[[int], None], stream: int) -> None:
        """One thread: whatever ends it ends the group."""
        reason = "closed by the syncer"
        try:
            body(stream)
        except OSError as error:
            reason = error.strerror or str(error)
        except (TurnedAway, NoMemory, MemoryError) as error:
            reason = str(error) or "no memory"
            self.turned_away = reason
        except SyncerError as error:
            reason = str(error)
            with self._lock:
                self._session.fail(error)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            with self._lock:
                self._session.fail(SyncerError(f"a connection thread failed: {reason}"))
        with self._lock:
            self._reading -= body == self._read
            self.end(reason)
            self._changed.notify_all()

    def _read(self, stream: int) -> None:
        each, connection = self._sockets[stream], self.connection
        while True:
            count = each.socket.recv_into(connection.buffer(stream))
            if count == 0:
                return
            each.bytes_received += count
            self.heard_at = time.monotonic()
            for msg_type, payload in connection.received(stream, count):
                inbound = connection.parse(msg_type, payload)
                while (ready := self._accept(inbound)) is not None:
                    inbound = connection.rebuild(ready)

    def _accept(self, inbound: Inbound) -> Rebuilt | None:
        """Into the session; a change of it that has waited, or that it is, and can be taken now."""
        with self._lock:
            if isinstance(inbound.message, Bcast):
                self.silence = self._news.heard(
                    time.monotonic(), inbound.message.version) or self.silence
            if self._session.accept(self.connection, inbound):
                self._changed.notify_all()
            return self._session.rebuilt(self.connection, inbound.fragment)

    def _relieves(self, idle: _Socket) -> bool:
        """Whether a data socket with nothing to send could take a piece that waits for another.

        Sockets that share a link are never equally fast, and a message is there with the last of
        its pieces.
        """
        busiest = max(self._data, key=lambda each: len(each.queue))
        if idle not in self._data or len(busiest.queue) < 2:
            return False
        idle.queue.append(busiest.queue[1])  # the first one is being sent
        del busiest.queue[1]
        return True

    def _write(self, stream: int) -> None:
        each = self._sockets[stream]
        while True:
            with self._lock:
                while not (each.small or each.queue or self._relieves(each)) and (
                        self.ended_by is None):
                    each.wake.wait()
                if self.ended_by is not None:
                    return
                queue = each.small or each.queue
                buffers, receipt = queue[0]
            count = (self._pulse.send(buffers) if stream == CONTROL
                     else send_all(each.socket, buffers))
            del buffers
            with self._lock:
                each.bytes_sent += count
                if self.ended_by is None:
                    queue.popleft()
                    receipt.one_sent()
                    self._changed.notify_all()


def send_all(connected: Stream, buffers: Gather) -> int:
    """Hands every byte of a gather list to the kernel, without a copy; the number of bytes."""
    rest = list(buffers)
    total = sum(map(len, rest))
    while rest:
        advance(rest, connected.sendmsg(rest))
    return total
