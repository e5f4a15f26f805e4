"""Dials the sockets of one connection and says on each who is there; waits for the WELCOME.

Must not try again or start threads. Whoever has introduced himself dials no data socket before the
answer on the control socket is judged: nothing else may be sent or used by then (wire 19.11).
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from syncer.errors import SyncerError
from syncer.learner.connection import CONTROL, Connection
from syncer.learner.dialing import Dialer
from syncer.learner.failures import TurnedAway
from syncer.learner.session import Session
from syncer.tls import Stream

UNANSWERED_S = 10.0
"""A server that has not answered for so long is told of."""


class Greeting:
    """One connection after the other, until `end`. lock: the session's; say: a progress line."""

    def __init__(self, session: Session, lock: threading.RLock, say: Callable[[str], None]):
        self._session, self._lock, self._say = session, lock, say
        self._control: Stream | None = None
        self._over = False

    def open(self, connection: Connection, dialer: Dialer,
             left_s: Callable[[], float]) -> tuple[list[Stream], int]:
        """The sockets, greeted, the control socket first; and the number of bytes that came.

        left_s: how long the next thing may take. Raises `OSError`; `TurnedAway` when another
        connection may be welcome; and `SyncerError`, recorded in the session, when none will.
        """
        sockets: list[Stream] = []
        received = 0
        try:
            for opening in connection.openings:
                sockets.append(dialer.dial(left_s()))
                sockets[-1].settimeout(left_s())
                sockets[-1].sendall(opening)
                if len(sockets) == 1 and (line := dialer.expiring(sockets[CONTROL], time.time())):
                    self._say(line)
                if not connection.ready:
                    received = self._await_welcome(connection, sockets[-1], left_s())
                sockets[-1].settimeout(None)
        except BaseException:
            for connected in sockets:
                connected.close()
            raise
        return sockets, received

    def end(self) -> None:
        """Under the lock: the wait ends, and so does every later one."""
        self._over = True
        if self._control is not None:
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """In a forked child: closes its copy of the socket."""
        if self._control is not None:
            self._control.close()

    def _await_welcome(self, connection: Connection, control: Stream,
                       timeout_s: float) -> int:
        with self._lock:
            if self._over:
                raise ConnectionAbortedError("closed by the learner")
            self._control = control
        try:
            return self._read(connection, control, timeout_s)
        finally:
            with self._lock:
                self._control = None

    def _read(self, connection: Connection, control: Stream, timeout_s: float) -> int:
        quiet_s, deadline = UNANSWERED_S, time.monotonic() + timeout_s
        received = 0
        while not connection.ready:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"no answer to the HELLO within {timeout_s:.0f} s")
            control.settimeout(min(left_s, quiet_s))
            try:
                count = control.recv_into(connection.buffer(CONTROL))
            except TimeoutError:
                if quiet_s < left_s:
                    self._say(f"connected, and no answer for {quiet_s:.3g} s; waiting for "
                              f"{left_s - quiet_s:.3g} s more")
                quiet_s = timeout_s
                continue
            if count == 0:
                raise ConnectionResetError("closed by the syncer before its WELCOME")
            received += count
            self._take(connection, count)
        return received

    def _take(self, connection: Connection, count: int) -> None:
        try:
            for msg_type, payload in connection.received(CONTROL, count):
                inbound = connection.parse(msg_type, payload)
                with self._lock:
                    self._session.accept(connection, inbound)
        except TurnedAway:
            raise
        except SyncerError as error:
            with self._lock:
                self._session.fail(error)
            raise
