"""A session on real sockets: first connect, reconnect with a fresh generation, sending, the end.

Owns the threads; must not know what a tensor means or take a training step: `Learner` does.

One lock guards the session and all queues. It is held for moments only, so a caller that takes it
at a step boundary never waits for the network. `changed` is notified whenever somebody who waits
for the session, the queues or the connection should look again.

A supervisor thread follows one connection group after the other. When a group ends, it waits for
a random part of 3, 6, 12, 24, 30, 30, ... seconds before each attempt at a new one, starting anew
for every outage (wire 13.1), but going on where the server only said "try again later". A server
that comes back would otherwise meet all its learners in the same tenth of a second. What was queued
is dropped, since a message never spans two generations.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import weakref
from collections.abc import Callable

from syncer.errors import ConfigError, LocalProtocolError, SyncerError
from syncer.learner import lines, situation
from syncer.learner.client_group import ClientGroup, NoThreads, Receipt
from syncer.learner.dialing import BACKOFF_MAX_S, Dialer, backoff_s, fresh_generation, jitter
from syncer.learner.failures import ConnectionFailed, NotUnderstood, TurnedAway
from syncer.learner.greeting import Greeting
from syncer.learner.news import News
from syncer.learner.notices import Notices
from syncer.learner.session import Phase, Session
from syncer.learner.tensor_messages import TensorMessage
from syncer.tls import TlsError
from syncer.wire.encode import chunk_count

FIRST_TRY_S = 30.0
FIRST_PAUSE_S = 2.0
FIRST_REPORT_S = 30.0
REDIAL_TRY_S = 20.0
LAST_TRY_S = 0.1  # a socket has so long at least, whatever those before it took
SPREAD = 3.0
"""The most that is waited, in back-offs: 64 learners come back over 3 s, whatever the outage."""
DRAIN_S = 1.0
"""So long an ended connection is still read: see `ClientGroup.close`."""
CLOSE_S = 5.0
"""How long `close` waits for the threads; a dial that hangs is left behind."""
MUTE_S = 10.0
"""A connection that fails after so long without a byte was silent: the line about it says so."""
LATE_S = 1.0
"""A wait that took so much longer than asked for says that no Python thread could run."""

_clients: weakref.WeakSet[Client] = weakref.WeakSet()


class Client:
    """Keeps a session connected to a server.

    address: "host:port", or its dialer. connect_timeout_s: for the first one, all tries together.
    max_reconnects: attempts over the client's life; None: no limit, 0: the first drop is fatal.
    clock, pause, say, jitter: for tests; seconds, a wait that `close` ends, a line, a random part.
    Raises `ConfigError` for an address or limit that cannot be used.

    Large: dialing, following a connection and ending are one life under one lock; apart they would
    hand that lock and the session around.
    """

    def __init__(self, session: Session, address: str | Dialer, *, connect_timeout_s: float = 900.0,
                 max_reconnects: int | None = None,
                 clock: Callable[[], float] = time.monotonic,
                 pause: Callable[[float], object] | None = None,
                 say: Callable[[str], None] = lines.say,
                 jitter: Callable[[float], float] = jitter):
        if max_reconnects is not None and max_reconnects < 0:
            raise ConfigError(f"max_reconnects must not be negative, found {max_reconnects}")
        self.session = session
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self._dialer = Dialer(address) if isinstance(address, str) else address
        self._shown = self._dialer.address
        self.connect_timeout_s = connect_timeout_s
        self._max_reconnects = max_reconnects
        self._reconnects = 0
        self._closing = threading.Event()
        self._clock = clock
        self._pause = pause or self._closing.wait
        self._say = say
        self._jitter = jitter
        self._group: ClientGroup | None = None
        self._supervisor: threading.Thread | None = None
        self._past_bytes = [0, 0]
        self._greeting = Greeting(session, self.lock, self.say)
        self._notices = Notices()
        self.news = News(len(session.layout.fragments), time.monotonic())
        self._away_s: float | None = None
        """How long a connection that is ended by `leave` is not dialed again."""
        self._repeated: tuple[bytes, float, float] | None = None
        self._pid = os.getpid()
        _clients.add(self)

    # --- life ------------------------------------------------------------------------------------

    def say(self, line: str) -> None:
        """A progress line. That it cannot be said must not end a learner."""
        with contextlib.suppress(Exception):
            self._say(line)

    def start(self) -> None:
        """Connects for the first time and starts the threads.

        Tries for `connect_timeout_s` seconds, with a progress line now and then. Raises
        `ConnectionFailed` when the server could not be reached in that time, and at once when the
        system has no threads for it.
        """
        self._check_process()
        start = reported = self._clock()
        deadline = start + self.connect_timeout_s
        attempts = 0
        self.say(f"dialing {self._shown}")
        while True:
            attempts += 1
            try:
                self._adopt(self._connect(FIRST_TRY_S, max(deadline - self._clock(), 1.0)))
                break
            except (NoThreads, TlsError) as error:
                raise ConnectionFailed(error.text) from None
            except OSError as error:
                now = self._clock()
                reason = error.strerror or str(error)
            if self._closing.is_set() or now + FIRST_PAUSE_S >= deadline:
                raise ConnectionFailed(
                    f"syncer at {self._shown} was not reachable within "
                    f"{self.connect_timeout_s:.0f} s ({reason}); start it, or correct the address")
            if now - reported >= FIRST_REPORT_S:
                reported = now
                self.say(f"{self._shown} not reachable yet after {now - start:.0f} s ({reason})")
            self._pause(self._jitter(2 * FIRST_PAUSE_S))
        self.say(f"connected to {self._shown} after {attempts} "
                  f"attempt{'s' if attempts > 1 else ''}")
        supervisor = threading.Thread(
            target=self._supervise, daemon=True, name="syncer-supervisor")
        try:
            supervisor.start()
        except RuntimeError:
            self.close()
            raise ConnectionFailed(NoThreads("a supervisor").text) from None
        self._supervisor = supervisor

    def check(self) -> None:
        """Raises the fatal error if there is one, or says that the client was closed.

        A lost connection is no error while tries remain.
        """
        self._check_process()
        with self.lock:
            self._check_open()

    def _check_open(self) -> None:
        self.session.check()
        if self._closing.is_set():
            raise LocalProtocolError("this learner was closed; it cannot go on, make another one")

    @property
    def connected(self) -> bool:
        """Whether a connection is up at this moment."""
        group = self._group
        return group is not None and group.ended_by is None

    def situation(self) -> str:
        """How things stand with the server, for a line about a wait."""
        with self.lock:
            group, said_so = self._group, self._notices.since(self.news.last)
            awaited = said_so or f"waiting for {situation.awaited(self.session)}"
            if group is None or group.ended_by is not None:
                return f"not connected to {self._shown} at the moment"
            silent_s = time.monotonic() - group.heard_at
            said = (f"which spoke last {silent_s:.0f} s ago" if group.bytes_received
                    else f"which has said nothing in {silent_s:.0f} s")
            return f"connected to {self._shown}, {said}; {awaited}"

    @property
    def bytes_sent(self) -> int:
        """Bytes handed to the kernel over all connections, without HELLOs."""
        self._check_process()  # the lock may be one that a thread of the parent held at the fork
        with self.lock:
            return self._past_bytes[0] + (self._group.bytes_sent if self._group else 0)

    @property
    def bytes_received(self) -> int:
        """Bytes received over all connections."""
        self._check_process()
        with self.lock:
            return self._past_bytes[1] + (self._group.bytes_received if self._group else 0)

    @property
    def bytes_on_connection(self) -> int:
        """Bytes handed to the kernel on the connection that is up; 0 without one."""
        with self.lock:
            return self._group.bytes_sent if self._group else 0

    def close(self) -> None:
        """Ends every connection and thread, within seconds whatever the network does.

        What is still queued is dropped. Never raises for the network; may be called again.
        """
        if os.getpid() != self._pid:
            return
        self._closing.set()
        with self.lock:
            if self._group is not None:
                self._group.end("closed by the learner")
            self._greeting.end()
            self.changed.notify_all()
        if self._supervisor is not None:
            self._supervisor.join(CLOSE_S)
            if self._supervisor.is_alive():
                return  # a dial that hangs: it looks at `_closing` when it is through
        if self._group is not None:
            self._group.close(0.0)

    def close_aside(self) -> None:
        """`close` on a thread of its own, for a finalizer, which runs in the middle of anything;
        without one to be had the sockets are shut, and the supervisor does the rest."""
        if os.getpid() != self._pid or self._closing.is_set():
            return
        try:
            threading.Thread(target=self.close, daemon=True, name="syncer-close").start()
        except RuntimeError:
            self._closing.set()
            if self._group is not None:
                self._group.shut()

    def give_way(self, reason: str) -> bool:
        """Closes for a successor, and fails with `reason`; False if it had ended before."""
        if os.getpid() != self._pid:
            return False
        with self.lock:
            if self._closing.is_set() or self.session.ended:
                return False
            self.session.fail(ConnectionFailed(f"syncer connection closed: {reason}"))
        self.close()
        return True

    def leave(self, away_s: float, reason: str) -> bool:
        """Ends the connection for so many seconds, and then dials again as after an outage.

        Not while something is queued on it (False): it would be lost. It is no attempt of
        `max_reconnects`.
        """
        with self.lock:
            group = self._group
            if group is None or group.ended_by is not None or not group.idle:
                return False
            self._away_s = away_s
            group.end(reason)
            return True

    def wait_for(self, condition: Callable[[], object], timeout_s: float | None = None) -> bool:
        """Waits until `condition()`, called under the lock, holds; False after `timeout_s` seconds.

        Raises the fatal error as soon as there is one, and as `check` when it is closed meanwhile.
        """
        with self.lock:
            held = self.changed.wait_for(
                lambda: self.session.error is not None or self._closing.is_set() or condition(),
                None if timeout_s is None else max(timeout_s, 0.0))
            self._check_open()
        return bool(held)

    # --- sending ---------------------------------------------------------------------------------

    def has_room(self, payload_bytes: int) -> bool:
        """Whether a message of about so many bytes may be queued now; room only grows meanwhile."""
        with self.lock:
            group = self._group
            return group is not None and group.has_room(
                chunk_count(0, payload_bytes, group.connection.stripes))

    def send(self, message: TensorMessage) -> Receipt:
        """Queues a tensor message, striped over the data sockets.

        Dropped silently when there is no connection; the receipt says so.
        """
        self._check_process()
        with self.lock:
            group = self._group
            if group is None or self.session.ended:
                return Receipt(1, dropped=True)
            return group.enqueue(group.connection.stripe(message))

    def send_control(self, frame: bytes) -> Receipt:
        """Queues a small frame on the control socket; dropped as in `send`, or for lack of room."""
        self._check_process()
        with self.lock:
            group = self._group
            if group is None or self.session.ended or not group.control_has_room():
                return Receipt(1, dropped=True)
            return group.say(frame)

    def repeat(self, frame: bytes, due_s: float, every_s: float) -> None:
        """What to say in a pause: from `due_s` of the monotonic clock on, every `every_s` seconds.

        Until it is called again, on every connection, and whoever holds the GIL.
        """
        with self.lock:
            self._repeated = frame, due_s, every_s
            if self._group is not None:
                self._group.repeat(frame, due_s, every_s)

    # --- connecting ------------------------------------------------------------------------------

    def _connect(self, socket_s: float, all_s: float = math.inf) -> ClientGroup:
        """One try at a new connection: with a server that knows no introductions a second one.

        socket_s: for each of its sockets; all_s: together. A peer may accept and not read what
        greets it. Raises `OSError`, or a `SyncerError` that the session has recorded.
        """
        until = time.monotonic() + all_s
        try:
            return self._open(socket_s, until)
        except NotUnderstood as error:
            self.say(f"{self._shown} speaks protocol 4 alone ({error}): no reports, and every "
                     "connection brings all fragments; dialing again without an introduction")
        except TurnedAway as error:
            raise ConnectionRefusedError(str(error)) from None
        return self._open(socket_s, until)

    def _open(self, socket_s: float, until: float) -> ClientGroup:
        """A new generation with all its sockets."""
        def left_s() -> float:
            return min(socket_s, max(until - time.monotonic(), LAST_TRY_S))

        with self.lock:
            connection = self.session.connect(fresh_generation(self.session.last_generation))
        sockets, received = self._greeting.open(connection, self._dialer, left_s)
        try:
            return ClientGroup(self.session, connection, sockets, self.lock, self.changed,
                               news=self.news, received=received)
        except BaseException:
            for connected in sockets:
                connected.close()
            raise

    def _adopt(self, group: ClientGroup) -> None:
        with self.lock:
            self._group = group
            if self._closing.is_set():
                group.end("closed by the learner")
            if self._repeated is not None:
                group.repeat(*self._repeated)
            try:
                group.start()
                self.changed.notify_all()
                return
            except NoThreads as error:
                failure = error
        group.close(0.0)  # without the lock, which the threads that there are take at their end
        with self.lock:
            self._group = None
        raise failure

    def _supervise(self) -> None:
        try:
            self._follow_groups()
        except Exception as error:
            with self.lock:
                self.session.fail(SyncerError(
                    f"the connection cannot be kept up: {type(error).__name__}: {error}"))
                self.changed.notify_all()

    def _follow_groups(self) -> None:
        attempt = -1
        while True:
            group = self._group
            assert group is not None  # `start` and `_reconnect` leave one behind
            while (line := self._line(group)) is not None:
                self.say(line)
            with self.lock:
                reason = group.end("the session has ended")
                failed = self.session.error is not None
            if (silent_s := time.monotonic() - group.heard_at) >= MUTE_S:
                reason += f"; nothing came for {silent_s:.0f} s"
            told = lines.of_link(group.link, group.bytes_sent, self._shown)
            group.close(0.0 if failed else DRAIN_S)
            self.say(told) if told else None
            with self.lock:
                self._past_bytes[0] += group.bytes_sent
                self._past_bytes[1] += group.bytes_received
                self._group = None
                away_s, self._away_s = self._away_s, None
                over = self.session.ended or self._closing.is_set()
            if over or (away_s is not None and not self._stay_away(reason, away_s)):
                return
            found = self._reconnect(
                group.turned_away or reason, attempt + 1 if group.turned_away else 0,
                asked=away_s is not None)
            if found is None:
                return
            attempt = found

    def _line(self, group: ClientGroup) -> str | None:
        """Waits for something worth a line: where the run is, a silence, its end.

        None when the group has ended.
        """
        news = self.news
        with self.lock:
            while group.ended_by is None and not self.session.ended:
                if not group.greeted and (line := situation.standing(self.session)) is not None:
                    group.greeted = True
                    return line
                if (text := self._notices.take(self.session.notices, time.monotonic())) is not None:
                    return f"{self._shown}: {text}"
                if group.silence is not None:
                    silent_s, group.silence = group.silence, None
                    return f"news of {self._shown} again, after {silent_s:.0f} s"
                now, due = time.monotonic(), news.due()
                if self.session.phase is not Phase.TRAINING:
                    self.changed.wait()
                elif now < due:
                    self.changed.wait(due - now)
                    if time.monotonic() > due + LATE_S:  # nobody ran here: let the readers go first
                        self.changed.wait(LATE_S)
                else:
                    usual = ("" if news.expected_s is None else
                             f", where a merge takes {news.expected_s:.2g} s")
                    silent = ("" if group.bytes_received else
                              ": it has said nothing on this connection")
                    return (f"no news of {self._shown} for {news.say(now):.0f} s{usual}{silent}; "
                            f"training goes on, waiting for {situation.awaited(self.session)}")
        return None

    def _stay_away(self, reason: str, away_s: float) -> bool:
        """Whether the client is to come back after a time that it was told to stay away."""
        self.say(f"left {self._shown} ({reason}); dialing again in {away_s:.0f} s")
        self._pause(away_s)
        return not self._closing.is_set()

    def _reconnect(self, reason: str, first: int, *, asked: bool = False) -> int | None:
        """Redials from attempt `first` on; the one that worked, or None: the client is to end.

        asked: this is the end of an absence, no outage; the first attempt is made at once.
        """
        for attempt in range(first, 2**62):
            if asked:
                asked = False
                self._reconnects -= 1
            elif not self._wait_to_dial(reason, attempt):
                return None
            if self._closing.is_set():
                return None
            self._reconnects += 1
            try:
                self._adopt(self._connect(REDIAL_TRY_S))
            except OSError as error:
                reason = error.strerror or str(error)
                continue
            except SyncerError:
                return None  # it is the session's
            self.say(f"connected to {self._shown} again after {attempt + 1} "
                      f"attempt{'s' if attempt else ''}")
            return attempt
        return None

    def _wait_to_dial(self, reason: str, attempt: int) -> bool:
        """The back-off before an attempt; False if there must be none."""
        if self._max_reconnects is not None and self._reconnects >= self._max_reconnects:
            with self.lock:
                self.session.fail(ConnectionFailed(
                    f"syncer connection failed: {reason}; no reconnect is left of "
                    f"{self._max_reconnects}"))
                self.changed.notify_all()
            return False
        wait_s = self._jitter(min(SPREAD * backoff_s(attempt), BACKOFF_MAX_S))
        self.say(f"connection to {self._shown} lost ({reason}); dialing in {wait_s:.1f} s")
        self._pause(wait_s)
        return True

    # --- fork ------------------------------------------------------------------------------------

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise LocalProtocolError(
                "this learner belongs to the parent process; a forked child cannot use it")

    def _forget(self) -> None:
        """In a forked child: its copies of the sockets would keep the connection open for good."""
        if self._group is not None:
            self._group.forget()
        self._greeting.forget()


def _after_fork_in_child() -> None:
    for client in list(_clients):
        client._forget()


os.register_at_fork(after_in_child=_after_fork_in_child)
