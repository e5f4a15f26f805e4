"""`Learner`: makes a NumPy training loop a learner. Anchors, blending, deltas, the step boundary.

Must not touch sockets or wire bytes but through `Client` and `Session`, and must not wait for the
network in `step`.
"""

from __future__ import annotations

import math
import os
import time
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from syncer.errors import ConfigError, SyncerError
from syncer.learner.answers import Answers
from syncer.learner.arguments import checked_key, checked_numbers
from syncer.learner.client import Client
from syncer.learner.client_group import Receipt
from syncer.learner.continuation import resume, state_of
from syncer.learner.dialing import Dialer
from syncer.learner.early_end import EarlyEnd
from syncer.learner.heartbeats import Heartbeats
from syncer.learner.holding import Arrays, Holding
from syncer.learner.initial_values import InitialValues
from syncer.learner.introduction import Introduction
from syncer.learner.partition import (
    NamedLayout,
    build_layout,
    layout_fingerprint,
    save_layout,
)
from syncer.learner.reports import TrainingFigures
from syncer.learner.send_buffers import SendBuffers
from syncer.learner.session import Phase, Session
from syncer.protocol import DTYPE_F32, DTYPES
from syncer.tls import TlsPaths
from syncer.wire.extended import LearnerReport
from syncer.wire.messages import Pull

ACK_TIMEOUT_S = 900.0
AGAIN_S = 0.1  # when to try again what the network has no room for
WAIT_REPORT_S = 30.0
"""Time between two progress lines about a wait."""
FRAGMENTS_SHOWN_MAX = 8


class Status(NamedTuple):
    """What one step boundary did, and where the learner stands."""

    step: int
    """Optimizer steps so far."""
    applied: tuple[tuple[int, int], ...]
    """(fragment, version) of the broadcasts blended in, in order."""
    answered: tuple[tuple[int, int], ...]
    """(fragment, global step) of the pulls answered with a delta, in order."""
    versions: tuple[int, ...]
    """Version each fragment is on; 0 also before the first broadcast."""
    connected: bool
    finished: bool
    """Training is over: leave the loop and call `finish`."""


class Learner:
    """One island of a Decoupled DiLoCo run, on f32 arrays in this process.

    parameters: name -> C-contiguous, writable f32 array of any shape; they are changed in place, so
    the arrays must stay the ones the training loop uses; empty ones are left out. Or a `Holding`.
    address: "host:port" of the server, or "unix:/path" on its machine (--listen). local_address: an
    address or interface of this machine to dial from; None: the system's choice. tls: a PEM file
    with certificate, key and authority, or three of them; None: plain.
    learner_id: below the server's --learners; learner 0 brings the initial values.
    dtype: "f32", "bf16" or "q4", how deltas travel. fragments, matrix_merge, pattern, avg_regex,
    identity_shapes: as in `build_layout`; these, dtype and the names must be equal in all learners.
    error_feedback: in q4 and bf16, what a delta has lost when it was packed is added to the next
    one of its fragment once it was merged; 4 bytes a parameter. Each learner as it likes.
    alpha: 0 <= alpha < 1, how much of its own values a learner keeps when a broadcast arrives.
    min_steps_per_sync: optimizer steps on an anchor before a pull is answered.
    bounded_lag: whether a pull waits for the broadcast it is about however long that takes, as a
    server with --max-base-lag demands; False: for one step at most, in runs without that flag.
    num_streams: data sockets, 0..256. key: of the island; None: SYNCER_HMAC_KEY, else
    YETO_ISLAND_HMAC_KEY, of the environment. profile_hash, contract: 32 bytes or None.
    max_reconnects: over the life, None for no limit. connect_timeout_s: of the first connection.
    run: the name of the run, as the server's --run: 1 to 64 of A-Z a-z 0-9 . _ -; a server of
    another run refuses this learner. on_lost_run: what to do when the server begins anew at step 0
    and this learner holds merged values: None raises `RunLost`; "reseed" forgets them, and learner
    0 brings its parameters as the initial values. state: of `state_dict` of an earlier process, to
    go on with its parameters: what they hold is not sent again, and nothing is lost.

    The constructor connects, waiting up to `connect_timeout_s`, and learner 0 sends its values. An
    object that is dropped without `close` leaves the run when it is collected; a second one for the
    same address and id in this process closes the first, whose `step` raises from then on.
    Raises `ConfigError` or `LocalProtocolError` for arguments that cannot be used, and
    `ConnectionFailed` when the server is not reached or refuses; its kinds `RunLost` and
    `RunMismatch` (a server answers that is older than one before) can end a learner at any time.

    Large: half of it is what a training loop may call, and the step boundary is one order of
    things; initial values, send buffers and arithmetic are elsewhere.
    """

    def __init__(self, parameters: Mapping[str, np.ndarray] | Holding, address: str, *,
                 learner_id: int, dtype: str = "bf16", fragments: int = 8,
                 matrix_merge: str = "rda", pattern: str = "binpack", avg_regex: str | None = None,
                 identity_shapes: bool = False, alpha: float = 0.5, min_steps_per_sync: int = 1,
                 num_streams: int = 4, key: str | bytes | None = None,
                 compat_group: str | None = None, profile_hash: bytes | None = None,
                 contract: bytes | None = None, max_reconnects: int | None = None,
                 connect_timeout_s: float = 900.0, bounded_lag: bool = True,
                 run: str | None = None, on_lost_run: str | None = None,
                 local_address: str | None = None, tls: TlsPaths | None = None,
                 state: Mapping[str, Any] | None = None, error_feedback: bool = False):
        codes = {name: code for code, name in DTYPES.items()}
        if dtype not in codes:
            raise ConfigError(f"dtype must be one of {', '.join(codes)}, found {dtype!r}")
        if error_feedback and codes[dtype] == DTYPE_F32:
            raise ConfigError("error_feedback needs dtype bf16 or q4: deltas in f32 lose nothing")
        checked_numbers(learner_id=learner_id, alpha=alpha, num_streams=num_streams,
                        min_steps_per_sync=min_steps_per_sync, max_reconnects=max_reconnects,
                        connect_timeout_s=connect_timeout_s)
        holding = parameters if isinstance(parameters, Holding) else Arrays(parameters)
        self._alpha = float(alpha)
        self._layout = build_layout(
            holding.shapes, fragments, pattern=pattern, avg_regex=avg_regex,
            matrix_merge=matrix_merge, identity_shapes=identity_shapes)
        self._fragments = [
            holding.fragment([tensor.name for tensor in fragment.tensors], codes[dtype])
            for fragment in self._layout.fragments]
        for each in self._fragments if error_feedback else ():
            each.feed_back()
        fingerprint = self._fingerprint = layout_fingerprint(self._layout)
        introduction = Introduction(
            fingerprint if contract is None else contract, run=run, on_lost_run=on_lost_run,
            names=self._layout.names if learner_id == 0 else None, wants_fates=error_feedback)
        self._session = Session(
            self._layout.wire, fingerprint, learner=learner_id, dtype=codes[dtype],
            num_streams=num_streams, introduction=introduction, profile_hash=profile_hash,
            compat_group=compat_group, key=checked_key(key), min_steps_per_sync=min_steps_per_sync,
            bounded_lag=bounded_lag)
        self.resumed = state is not None and resume(
            state, self._session, self._fragments, fingerprint)
        """Whether it has gone on from a state with an anchor of every fragment."""
        self._client = Client(self._session, Dialer(address, local_address, tls),
                              connect_timeout_s=connect_timeout_s, max_reconnects=max_reconnects)
        tensors = self._session.tensors
        buffers = SendBuffers(max(max(tensors.push_bytes(f), tensors.init_bytes(f))
                                  for f in range(len(self._fragments))), holding.buffer)
        self._heartbeats = Heartbeats(time.monotonic())
        self._reports = TrainingFigures()
        self._count = self._session.heartbeat()
        """The last heartbeat that was sent, or that says what a push has said."""
        self._owed: list[Pull] = []
        """Of an early `finish`: pulls that it has seen and cannot answer."""
        self._done = False
        parts = self._session, self._client, self._fragments, buffers
        self._initial, self._answers = InitialValues(*parts), Answers(*parts)
        # The threads know the client alone, so that a learner nobody holds any more is collected.
        # At the end of the process the kernel closes the sockets.
        weakref.finalize(self, self._client.close_aside).atexit = False
        _succeed(self._client, address, learner_id)
        try:
            self._client.start()
            self._client.repeat(self._count, self._heartbeats.due, self._heartbeats.every)
            self._initial.send_all()
        except BaseException:
            self.close()
            raise

    # --- what a training loop calls --------------------------------------------------------------

    def step(self, tokens: int) -> Status:
        """The step boundary: call it after every optimizer step, on `tokens` raw tokens.

        Blends broadcasts that have arrived into the parameters and answers pulls with deltas.
        Never waits for the network. Raises `ConnectionFailed` or `RemoteProtocolError` once the
        connection has failed for good; an outage raises nothing.
        """
        self._client.check()
        with self._client.lock:
            self._session.advance(tokens)
        self._heartbeats.stepped(time.monotonic())
        return self._boundary()

    def report(self, *, loss: float | None = None, tokens_per_s: float | None = None,
               lr: float | None = None, goodput: float | None = None) -> None:
        """How training goes, for the server's status, metrics and tape; no decision is made of it.

        goodput: share of wall time in optimizer steps. Call it as often as you like: at most once a
        second the newest figures are sent, now or at a step boundary. A server that speaks protocol
        4 alone gets none. Raises as `step`.
        """
        self._client.check()
        figures = (loss, tokens_per_s, lr, goodput)
        self._reports.put(LearnerReport(
            *(None if figure is None else float(figure) for figure in figures)))
        self._send_report()

    def finish(self, timeout_s: float | None = None) -> Status:
        """Waits for the final cut, writes it into the parameters, and acknowledges it.

        Afterwards the parameters are exactly the server's f32 values. May be called before
        training is over: the learner then goes on following the others without steps of its own.
        Waits as long as the run takes; with `timeout_s`, raises `SyncerError` when the cut is not
        complete, or not acknowledged, after so many seconds. Raises as `step`.
        """
        if self._done:
            return self._status((), ())
        deadline = _deadline(timeout_s)
        cut = self._wait_for_cut(deadline)
        for fragment, tensor in zip(self._fragments, cut, strict=True):
            fragment.overwrite(tensor)
        self._acknowledge(min(deadline, time.monotonic() + ACK_TIMEOUT_S))
        self._done = True
        return self._status((), ())

    def adopt(self, timeout_s: float | None = None) -> Status:
        """Sets the parameters to the newest merged values, waiting until every fragment has some.

        For values that have nothing to do with the run's, before the first step: without it a
        learner that joins late blends its fresh parameters in and pushes the difference. Counts
        no step and answers no pull. Returns early, with the parameters as they were, when the
        final cut is already there. Waits for the run to start; with `timeout_s`, raises
        `SyncerError` when the fragments have not arrived after so many seconds. Raises as `step`.
        """
        self._client.check()
        session, client = self._session, self._client
        start = time.monotonic()
        deadline, report_s = _deadline(timeout_s), start + WAIT_REPORT_S
        applied = self._apply_broadcasts()
        while missing := session.unapplied():
            if session.phase is not Phase.TRAINING:
                return self._status(applied, ())
            self._initial.offer()
            arrived = client.wait_for(
                lambda: session.broadcasts or session.phase is not Phase.TRAINING
                or self._initial.can_go_on(), min(deadline, report_s) - time.monotonic())
            now = time.monotonic()
            if not arrived and now >= deadline:
                raise SyncerError(
                    f"no broadcast of {_fragments(missing)} within {_seconds(deadline - start)}: "
                    f"has the run started? {client.situation()}")
            if not arrived:
                report_s = now + WAIT_REPORT_S
                client.say(f"waiting for merged values of {_fragments(missing)}{_left(deadline)}; "
                           f"{client.situation()}")
            applied += self._apply_broadcasts()
        for fragment in self._fragments:
            fragment.restore()
        return self._status(applied, ())

    def state_dict(self) -> dict[str, Any]:
        """What a later process with these parameters, as they are now, gives as `state`: anchors
        (f32 arrays, 4 bytes a parameter), versions and counters. Between two steps."""
        return state_of(self._session, self._fragments, self._fingerprint)

    def close(self) -> None:
        """Leaves the run and ends all threads, within seconds. May be called again."""
        self._client.close()

    def save_layout(self, path: str | os.PathLike[str]) -> None:
        """Writes names, shapes and fragments as JSON, for exports. Raises `ConfigError`."""
        save_layout(path, self._layout)

    def __enter__(self) -> Learner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def status(self) -> Status:
        """Where the learner stands, without a step."""
        return self._status((), ())

    @property
    def brings_values(self) -> bool:
        """Whether the run waits for the values of this learner, and has none to `adopt`."""
        with self._client.lock:
            return self._session.wants_initial_values

    @property
    def layout(self) -> NamedLayout:
        """Which parameters are in which fragment."""
        return self._layout

    @property
    def bytes_sent(self) -> int:
        """Bytes handed to the network over all connections."""
        return self._client.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes received over all connections."""
        return self._client.bytes_received

    # --- the step boundary -----------------------------------------------------------------------

    def _boundary(self) -> Status:
        """Everything after the health check, in the order of wire 12.1 to 12.3.

        Broadcasts before pulls: a pull can overtake the broadcast it is based on.
        """
        applied = self._apply_broadcasts()
        self._initial.offer()
        answered = self._answers.give()
        self._send_heartbeat(bool(answered))
        if self._reports.waiting is not None:
            self._send_report()
        return self._status(applied, answered)

    def _apply_broadcasts(self) -> tuple[tuple[int, int], ...]:
        if not self._session.broadcasts:
            return ()  # nearly always; what comes at this moment is for the next boundary
        with self._client.lock:
            held = self._session.versions
            taken = self._session.take_broadcasts()
        if any(bcast.version < held[bcast.fragment] for bcast in taken):
            self._client.say("the server was resumed from an earlier step; following it")
        for bcast in taken:
            self._fragments[bcast.fragment].rebase(bcast.tensor, self._alpha)
        return tuple((bcast.fragment, bcast.version) for bcast in taken)

    def _send_heartbeat(self, reported: bool) -> None:
        """Says the number of steps, when a push has not just `reported` it; and what to repeat."""
        beats, client = self._heartbeats, self._client
        if beats.is_due(time.monotonic()):
            client.send_control(self._session.heartbeat())
            reported = True
        if reported:
            self._count = self._session.heartbeat()
        client.repeat(self._count, beats.due, beats.every)

    def _send_report(self) -> None:
        with self._client.lock:
            connection = self._session.connection
            reads = connection is not None and connection.welcome is not None
        if reads and self._client.connected and (frame := self._reports.due(time.monotonic())):
            self._client.send_control(frame)

    def _status(self, applied: tuple[tuple[int, int], ...],
                answered: tuple[tuple[int, int], ...]) -> Status:
        session = self._session
        with self._client.lock:
            return Status(session.steps, applied, answered, session.versions,
                          self._client.connected, session.phase is not Phase.TRAINING)

    # --- start and end ---------------------------------------------------------------------------

    def _wait_for_cut(self, deadline: float) -> list[memoryview]:
        """The f32 bytes of every fragment of the final cut."""
        session, client = self._session, self._client
        start = time.monotonic()
        report_s = start + WAIT_REPORT_S
        early = EarlyEnd()
        while True:
            client.check()
            self._boundary()
            if self._answers.wait():
                continue
            until = min(deadline, report_s, self._leave_rounds(early))
            if client.wait_for(self._has_work, until - time.monotonic()):
                with client.lock:
                    cut = session.final.tensors()
                if cut is not None:
                    return cut
                continue
            with client.lock:
                missing = _fragments(session.final.missing())
                if session.final.manifest is None:
                    missing = "manifest"
            now = time.monotonic()
            if now < min(deadline, report_s):
                continue
            if now >= deadline:
                raise SyncerError(
                    f"the final cut was not complete after {_seconds(deadline - start)}: {missing} "
                    f"missing; {client.situation()}")
            report_s = now + WAIT_REPORT_S
            client.say(f"waiting for the final cut ({missing} missing){_left(deadline)}; "
                       f"{client.situation()}")

    def _leave_rounds(self, early: EarlyEnd) -> float:
        """Leaves if the run waits for an answer that will not come; when to look again."""
        session, client, now = self._session, self._client, time.monotonic()
        news = client.news
        with client.lock:
            self._owed = session.owed_pulls() if session.phase is Phase.TRAINING else []
            early.look(now, session.last_generation or 0, self._owed)
            early.everybody = session.needs_everybody
            reason = early.reason(now, news.last, news.expected_s)
            due = early.due(news.last, news.expected_s)
        if reason is not None:
            if not client.leave(early.away_s, f"no more steps are made here, and {reason}"):
                return now + AGAIN_S
            early.left()
            return math.inf
        return math.inf if due is None else due

    def _has_work(self) -> bool:
        """Whether a boundary, or the end of the wait for the cut, has something to do."""
        session = self._session
        if session.phase is not Phase.TRAINING:
            return session.final.tensors() is not None
        due = session.due_pulls()
        if session.owed_pulls() != self._owed:
            return True
        return bool(session.broadcasts) or self._initial.can_go_on() or bool(
            due and self._client.has_room(session.tensors.push_bytes(due[0].fragment)))

    def _acknowledge(self, deadline: float) -> None:
        """Sends FINAL_ACK until its bytes were handed over; SHUTDOWN meanwhile counts as well."""
        session, client, start = self._session, self._client, time.monotonic()
        report_s, receipt = start + WAIT_REPORT_S, None
        with client.lock:
            frame = session.acknowledge()
        while True:
            if receipt is None and client.connected:
                receipt = client.send_control(frame)

            def has_moved(receipt: Receipt | None = receipt) -> bool:
                return session.ended or (
                    client.connected if receipt is None else receipt.settled)

            client.wait_for(has_moved, min(deadline, report_s) - time.monotonic())
            if session.ended or (receipt is not None and receipt.sent):
                return
            now = time.monotonic()
            if now >= deadline:
                raise SyncerError(
                    f"FINAL_ACK could not be sent within {_seconds(now - start)}; the parameters "
                    f"are the final ones nevertheless; {client.situation()}")
            if now >= report_s:
                report_s = now + WAIT_REPORT_S
                client.say(f"waiting to acknowledge the final cut{_left(deadline)}; "
                           f"{client.situation()}")
            if receipt is not None and receipt.dropped:
                receipt = None
                if client.connected:  # no room for it: what is in front does not move
                    client.wait_for(lambda: session.ended, min(AGAIN_S, deadline - now))


_living: weakref.WeakValueDictionary[tuple[str, int], Client] = weakref.WeakValueDictionary()


def _succeed(client: Client, address: str, learner: int) -> None:
    """Ends the client that this process has for the same place in the same run.

    Two would take turns in being the newest connection, and one of them may be trained by nobody.
    """
    older = _living.get((address, learner))
    _living[address, learner] = client
    if older is not None and older.give_way(
            f"another Learner with id {learner} for {address} was made in this process"):
        client.say(f"learner {learner} of this process for {address} was still connected; "
                   "closing it")


def _deadline(timeout_s: float | None) -> float:
    """On the monotonic clock; never, without a limit."""
    return math.inf if timeout_s is None else time.monotonic() + timeout_s


def _fragments(numbers: list[int]) -> str:
    """A few of them, and how many more."""
    more = len(numbers) - FRAGMENTS_SHOWN_MAX
    shown = ", ".join(map(str, numbers[:FRAGMENTS_SHOWN_MAX])) + (
        f" and {more} more" if more > 0 else "")
    return f"fragment{'s' if len(numbers) > 1 else ''} {shown}"


def _seconds(seconds: float) -> str:
    return f"{max(round(seconds, 1), 0.0):g} s"


def _left(deadline: float) -> str:
    return "" if deadline == math.inf else f", {deadline - time.monotonic():.0f} s left"
