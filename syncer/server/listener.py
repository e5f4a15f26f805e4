"""Accepts connections and hands them on; must not read from them.

When descriptors or memory run out the backlog waits, and those who are in go on. What fails for one
connection ends that one.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable

from syncer import tcp
from syncer.server.log import Log
from syncer.server.loop import READ, Handler, Loop, Timer
from syncer.server.unix_place import process_of

ACCEPTS_PER_TURN = 64
NO_DESCRIPTORS_PAUSE_NS = 10**9
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ENOSPC})
"""Errors of the machine; every other one of `accept` is of the connection that was waiting."""


class Listener(Handler):
    """`welcome(socket, "host:port")` for every connection until `close`; the listening socket
    comes from `System.listen`."""

    def __init__(self, loop: Loop, log: Log, sock: socket.socket,
                 welcome: Callable[[socket.socket, str], None]):
        self.loop, self.log, self.sock, self.welcome = loop, log, sock, welcome
        self.listening = False
        self.pause: Timer | None = None
        self._listen()

    @property
    def address(self) -> tuple[str, int]:
        """(host, port) as bound."""
        host, port = self.sock.getsockname()[:2]
        return host, port

    def ready(self, events: int) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, address = self.sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue  # it has left before it was looked at
            except OSError as error:
                if error.errno in EXHAUSTED:
                    self.loop.unregister(self.sock)
                    self._pause(error)
                    return
                self.loop.refused("", _reason(error))
                continue
            peer = tcp.address_text(address)
            try:
                if self.sock.family == socket.AF_UNIX:
                    peer = process_of(sock)
                sock.setblocking(False)
                tcp.configure(sock)
                self.welcome(sock, peer)
            except (OSError, MemoryError) as error:
                sock.close()
                self.loop.refused(peer, _reason(error))

    def _listen(self) -> None:
        if not self.listening and self.sock.fileno() >= 0:
            try:
                self.loop.register(self.sock, READ, self)
            except (OSError, MemoryError) as error:
                self._pause(error)
            else:
                self.listening = True

    def _pause(self, error: OSError | MemoryError) -> None:
        """Whoever dials waits; the selector does not have the socket."""
        self.log.warning("cannot accept connections for a moment",
                         error=_reason(error))
        self.listening = False
        self.pause = self.loop.call_at(self.loop.now_ns() + NO_DESCRIPTORS_PAUSE_NS, self._listen)

    def close(self) -> None:
        """Accept nobody any more."""
        if self.listening:
            self.loop.unregister(self.sock)
            self.listening = False
        if self.pause is not None:
            self.pause.cancel()
        self.sock.close()


def _reason(error: OSError | MemoryError) -> str:
    number = error.errno if isinstance(error, OSError) else errno.ENOMEM
    return os.strerror(number or 0)
