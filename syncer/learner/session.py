"""The protocol state of one learner, from first HELLO to the end: bytes and calls in, events out.

Deterministic and sans-IO: no socket, thread, clock or random source; a caller with threads
serialises its calls, except for the pure ones that say so. Tensors are not decoded here.

A learner lives through several connection generations. What belongs to one generation (readers,
reassembly, order of stripes) is a `Connection`; what outlives it is in `Session`:

* `accepted[f]`: newest broadcast of a fragment as (version, SHA-256). A lower version is dropped,
  an equal one with equal bytes is a replay and is dropped, an equal one with other bytes is fatal
  (wire 11.2). The first one of a fragment on a new connection is what the server holds now: if it
  is older, or the same with other bytes, the server was resumed from an earlier step, and the
  learner follows it (wire 11.3). Otherwise its anchor would be of a future that never comes, and no
  push would count again.
* `broadcasts`: accepted and not yet taken, in order of acceptance, the newest of each fragment: a
  trainer that pauses for minutes finds one model there, not every version. They survive an outage.
* `pulls`: not yet answered, in order of arrival, the newest of each fragment: the server has at
  most one round of a fragment open, so an answer to an older one would be refused. They end with
  their connection: the server asks the next generation again.
* `held`: from which server process each of `accepted` came, if it said who it is. HELLO tells, and
  what WELCOME says is kept counts as heard on the new connection: it is not sent again.
* `fates`: what became of the last answer of each fragment, if the introduction asks for that.
* the final cut: FINAL_FRAGMENTs with the three rules above in a cache of their own, and a manifest
  that must never change. With the manifest, broadcasts and pulls are no longer handed out.

A learner with an `Introduction` does nothing on a connection before it has judged its WELCOME
(wire 19); one without speaks protocol 4 alone, byte for byte.

`TRAINING -> FINALIZING (manifest) -> ACKNOWLEDGING (cut applied) -> SHUT_DOWN`; a fatal error sets
`error`, which ends everything.
"""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from syncer.errors import LocalProtocolError, RemoteProtocolError, SyncerError
from syncer.kernels import sha256
from syncer.layout import Layout
from syncer.learner.changes import Changes, Digest, Rebuilt
from syncer.learner.connection import Connection, Inbound, Received
from syncer.learner.continuation import FragmentMemory, Memory
from syncer.learner.failures import ConnectionFailed, RunMismatch, TurnedAway, refusal
from syncer.learner.fates import Fates
from syncer.learner.final_cut import ArrivingCut, is_news
from syncer.learner.introduction import Introduction
from syncer.learner.tensor_messages import TensorMessages
from syncer.protocol import DTYPE_BF16, RunState
from syncer.wire.encode import encode_final_ack, encode_heartbeat, encode_hello
from syncer.wire.extended import Fate, NoticeText, Welcome
from syncer.wire.extension import Held
from syncer.wire.hello import Hello
from syncer.wire.messages import (
    Bcast,
    BcastChange,
    FinalAck,
    FinalFragment,
    Heartbeat,
    Manifest,
    Pull,
    Push,
)

NOTICES_MAX = 4


class Phase(Enum):
    """Where a session stands on its way to the end."""

    TRAINING = "training"
    FINALIZING = "finalizing"
    ACKNOWLEDGING = "acknowledging"
    SHUT_DOWN = "shut down"


class Session:
    """Everything a learner knows about the protocol, over all its connections.

    learner: id, a u32. fingerprint: 32 bytes. dtype: `DTYPE_F32`, `DTYPE_BF16` or `DTYPE_Q4`.
    num_streams: data sockets, 0..256. contract: 32 bytes, the fingerprint if None. profile_hash:
    32 bytes or None. key: island key for the HELLO, or None. min_steps_per_sync: a pull is
    answered after that many steps on the exact anchor. bounded_lag: whether the run may bound how
    old an anchor is; a pull then waits for the version that it is about, else for one step at most.
    introduction: what is said beside protocol 4, whose contract is then that of the session; None:
    nothing. Raises `LocalProtocolError` for values that no HELLO can carry.

    Large: one state machine; every method is something that happens to a learner, or asks where it
    stands. What it sends is made by `tensors`, what ends it is in `final`.
    """

    def __init__(self, layout: Layout, fingerprint: bytes, *, learner: int,
                 dtype: int = DTYPE_BF16, num_streams: int = 4, contract: bytes | None = None,
                 profile_hash: bytes | None = None, compat_group: str | None = None,
                 key: bytes | None = None, min_steps_per_sync: int = 1,
                 bounded_lag: bool = True, introduction: Introduction | None = None):
        if min_steps_per_sync < 1:
            raise LocalProtocolError(
                f"min_steps_per_sync must be at least 1, found {min_steps_per_sync}")
        self.layout = layout
        self.learner = learner
        self.dtype = dtype
        self.num_streams = num_streams
        self.min_steps_per_sync = min_steps_per_sync
        self.bounded_lag = bounded_lag
        self._key = key
        self._introduction = introduction
        if introduction is not None:
            contract = introduction.contract
        self._hello = Hello(
            learner, 1, dtype, layout, fingerprint,
            fingerprint if contract is None else contract, profile_hash, num_streams, compat_group)
        encode_hello(self._hello, key)  # every check of a HELLO, before anything is dialed
        count = len(layout.fragments)
        self.welcome: Welcome | None = None
        """Of the newest connection that has been judged."""
        self.notices: deque[NoticeText] = deque(maxlen=NOTICES_MAX)
        """What the server says that it waits for, until somebody has told it."""
        self.tensors = TensorMessages(learner, layout, dtype)

        self.connection: Connection | None = None
        self.error: SyncerError | None = None
        self.phase = Phase.TRAINING
        self.steps = self.tokens = 0
        self.accepted: list[tuple[int, Digest] | None] = [None] * count
        self._sources: list[int | None] = [None] * count
        """The server process that sent what was accepted last; None: not known."""
        if introduction is not None:
            self._fit(introduction)
        self.broadcasts: deque[Bcast] = deque()
        self.pulls: list[Pull] = []
        self.answered: Pull | None = None
        """The last one."""
        self._pulled_at: dict[int, int] = {}
        """Steps that were made when the newest pull of a fragment came."""
        self.final = ArrivingCut(count)
        self._concluded_by: Connection | None = None
        """The connection on which the manifest of the final cut came."""
        self._applied: list[_Applied | None] = [None] * count
        self._changes = Changes(count)
        self.fates = Fates(count, bool(introduction and introduction.wants_fates))
        self.versions: tuple[int, ...] = (0,) * count  # taken to be applied; 0 before the first
        self.last_generation: int | None = None
        self.msg_ids = itertools.count()  # of chunked messages; none repeats in a session's life
        self.unheard: set[int] = set()
        """Fragments of which the newest connection has brought no broadcast yet."""
        self._unconfirmed: set[int] = set()
        """Those whose anchor is of an older connection, and not known to hold on this one."""

    def _fit(self, introduction: Introduction) -> None:
        """Leaves the names out if no HELLO of this layout can carry them; raises for the rest."""
        hello = self._hello._replace(extension=introduction.extension(self.held))
        try:
            encode_hello(hello, self._key)
        except LocalProtocolError:
            introduction.names = None
            encode_hello(hello._replace(extension=introduction.extension(self.held)), self._key)

    # --- connections -----------------------------------------------------------------------------

    def connect(self, generation: int) -> Connection:
        """Starts a connection generation; the one before it, if any, is lost.

        generation: fresh random u64, not 0 and not the last one. Raises `LocalProtocolError`.
        """
        if generation == self.last_generation:
            raise LocalProtocolError(f"generation {generation} is that of the last connection")
        hello = self._hello._replace(generation=generation)
        if self._introduction is not None:
            hello = hello._replace(extension=self._introduction.extension(self.held))
        connection = Connection(self, hello, self._key)
        self.last_generation = generation
        self.lost(self.connection)
        self.connection = connection
        self.unheard = set(range(len(self.layout.fragments)))
        self._unconfirmed = set(self.unheard)
        self._changes.begin()
        self.fates.begin(connection.extended)
        return connection

    def lost(self, connection: Connection | None) -> None:
        """A connection has ended: its pulls end with it. Late frames of it may still arrive."""
        if connection is not None and connection is self.connection:
            self.connection = None
            self.pulls.clear()

    def fail(self, error: SyncerError) -> None:
        """Records a fatal error; the first one stays."""
        if self.error is None and self.phase is not Phase.SHUT_DOWN:
            self.error = error

    def check(self) -> None:
        """Raises the fatal error, if there is one."""
        if self.error is not None:
            raise self.error

    @property
    def ended(self) -> bool:
        """Nothing will be sent or accepted any more."""
        return self.error is not None or self.phase is Phase.SHUT_DOWN

    # --- frames of the server --------------------------------------------------------------------

    def accept(self, connection: Connection, inbound: Inbound) -> bool:
        """Takes a parsed frame into the state; True if somebody may have something to do.

        Raises `RemoteProtocolError` or `ConnectionFailed`, recorded in `error` as well, and
        `TurnedAway`, which ends the connection alone.
        """
        if self.ended:
            return False
        try:
            return self._accept(connection, inbound.message, inbound.digest)
        except TurnedAway:
            raise
        except SyncerError as error:
            self.fail(error)
            raise

    def _accept(self, connection: Connection, message: Received, digest: Digest) -> bool:
        if isinstance(message, str):
            raise self._refusal(connection, message)
        if not connection.ready or isinstance(message, Welcome | NoticeText | Fate):
            return self._accept_introduction(connection, message)
        if isinstance(message, Bcast | BcastChange):
            return self._accept_broadcast(connection, message, digest)
        if isinstance(message, Pull):
            return self._accept_pull(connection, message)
        if isinstance(message, FinalFragment):
            return self.final.take(message, digest)
        if isinstance(message, Manifest):
            news = self.final.take_manifest(message)
            if news:
                self.phase, self._concluded_by = Phase.FINALIZING, connection
            return news
        return self._accept_shutdown()

    def _refusal(self, connection: Connection, text: str) -> ConnectionFailed:
        if connection.ready or self._introduction is None:
            return refusal(text)
        return self._introduction.refused(text)

    def _accept_introduction(self, connection: Connection, message: Received) -> bool:
        """NOTICE, fates, and WELCOME: the first word of a server to whom has introduced itself."""
        if connection.ready and isinstance(message, Fate):
            return connection is self.connection and self.fates.take(message)
        if connection.ready and isinstance(message, NoticeText):
            self.notices.append(message)
            return True
        if not isinstance(message, Welcome):
            raise RemoteProtocolError("the server has sent something else before its WELCOME")
        if connection.welcome is not None:
            raise RemoteProtocolError("a second WELCOME on one connection")
        if connection is not self.connection or self._introduction is None:
            return False  # late
        kept = [fragment for fragment, kept in enumerate(message.kept) if kept]
        for fragment in kept:
            if self._sources[fragment] is None:
                raise RemoteProtocolError(
                    f"WELCOME keeps fragment {fragment}, which this learner has not said to hold")
        newest = max((seen[0] for seen in self.accepted if seen is not None), default=0)
        if self._introduction.meet(message, newest, may_forget=self.phase is Phase.TRAINING):
            self._forget(set(kept))
        connection.welcome = self.welcome = message
        if not connection.takes_changes:
            self._changes.forget_all()
        self.fates.welcomed(message.kept, [seen[0] if seen else 0 for seen in self.accepted])
        for fragment in kept:
            self.unheard.discard(fragment)
            self._confirm(fragment)
        return True

    def _forget(self, kept: set[int]) -> None:
        """Every version that is of a run that is lost: all but what the server keeps."""
        for fragment in set(range(len(self.layout.fragments))) - kept:
            self.accepted[fragment] = self._sources[fragment] = self._applied[fragment] = None
            self._changes.forget(fragment)
        self.versions = (0,) * len(self.layout.fragments)
        self.answered = None
        self.broadcasts = deque(b for b in self.broadcasts if b.fragment in kept)

    def _accept_broadcast(self, connection: Connection, message: Bcast | BcastChange,
                          digest: Digest) -> bool:
        if self.connection not in (None, connection):
            return False  # late: the new connection tells what holds now
        if isinstance(message, BcastChange):
            return self._accept_change(connection, message)
        fragment, seen = message.fragment, self.accepted[message.fragment]
        is_replay = fragment in self.unheard and seen == (message.version, digest)
        if fragment not in self.unheard and not is_news(message, digest, seen, "BCAST_FRAGMENT"):
            return False
        self.unheard.discard(fragment)
        self._sources[fragment] = connection.instance
        if connection.takes_changes:
            self._changes.keep(message)
        if is_replay:
            self._confirm(fragment)
            return False
        self.accepted[fragment] = message.version, digest
        for older in self.broadcasts:
            if older.fragment == message.fragment:
                self.broadcasts.remove(older)
                break
        self.broadcasts.append(message)
        return True

    def _accept_change(self, connection: Connection, change: BcastChange) -> bool:
        """It waits for what it changes, if only for a moment: see `rebuilt`."""
        if not connection.takes_changes:
            raise RemoteProtocolError("BCAST_CHANGE from a server whose WELCOME speaks of none")
        seen = None if change.fragment in self.unheard else self.accepted[change.fragment]
        try:
            self._changes.put(change, seen and seen[0], connection.limits.open_bytes_max)
        except TurnedAway:
            self._sources[change.fragment] = None  # so that the next connection brings it whole
            raise
        return False

    def rebuilt(self, connection: Connection, fragment: int) -> Rebuilt | None:
        """A change of this fragment whose base is here now, for `Connection.rebuild`."""
        if fragment < 0 or fragment in self.unheard or self.connection not in (None, connection):
            return None
        return self._changes.take(fragment)

    def _accept_pull(self, connection: Connection, pull: Pull) -> bool:
        if connection is not self.connection or pull in self.pulls:
            return False
        manifest = self.final.manifest
        if manifest is not None and connection is not self._concluded_by:
            raise RunMismatch(
                f"the run goes on: step {pull.step} is asked for, and this learner has the final "
                f"cut of step {manifest.step}. Somebody has gone back behind it, or wants more "
                "steps; start this learner again to take part")
        self.pulls[:] = [p for p in self.pulls if p.fragment != pull.fragment]
        self.pulls.append(pull)
        self._pulled_at[pull.fragment] = self.steps
        return True

    def _confirm(self, fragment: int) -> None:
        """What was accepted last holds on this connection: so does the anchor, if it is that."""
        if all(waiting.fragment != fragment for waiting in self.broadcasts):
            self._unconfirmed.discard(fragment)

    def _accept_shutdown(self) -> bool:
        if self.phase is not Phase.ACKNOWLEDGING:
            raise RemoteProtocolError(
                f"SHUTDOWN while {self.phase.value}, expected only after FINAL_ACK")
        self.phase = Phase.SHUT_DOWN
        return True

    # --- step boundary ---------------------------------------------------------------------------

    def advance(self, tokens: int) -> None:
        """Counts one optimizer step on `tokens` raw tokens, an integer."""
        tokens = operator.index(tokens)
        if tokens < 0:
            raise LocalProtocolError(f"a step cannot use {tokens} tokens")
        self.steps += 1
        self.tokens += tokens

    def take_broadcasts(self) -> list[Bcast]:
        """The accepted broadcasts, to be applied now in this order; they become the anchors.

        Steps and tokens of a push count from here. Empty once the manifest has arrived.
        """
        if self.phase is not Phase.TRAINING:
            return []
        taken = list(self.broadcasts)
        self.broadcasts.clear()
        for bcast in taken:
            self._applied[bcast.fragment] = _Applied(bcast.version, self.steps, self.tokens)
            if bcast.fragment not in self.unheard:
                self._unconfirmed.discard(bcast.fragment)
        self.versions = tuple(applied.version if applied else 0 for applied in self._applied)
        return taken

    def due_pulls(self) -> list[Pull]:
        """Pulls that may be answered now: on the anchor they are about, after enough steps on it.

        A pull can overtake the broadcast that was sent ahead of it. Rounds of a fragment are as
        many steps apart as there are fragments, which tells the version: an answer on an older
        anchor would be stale, and one on that of a lost connection may be of no history at all.
        """
        if self.phase is not Phase.TRAINING:
            return []
        return [pull for pull in self.pulls if self._due_anchor(pull) is not None]

    def owed_pulls(self) -> list[Pull]:
        """Pulls that cannot be answered now, and never without another step or broadcast."""
        return [pull for pull in self.pulls if self._due_anchor(pull) is None]

    def _due_anchor(self, pull: Pull) -> _Applied | None:
        """The anchor that a pull may be answered on now."""
        applied = self._applied[pull.fragment]
        if applied is None or pull.fragment in self._unconfirmed or (
                self.steps - applied.steps < self.min_steps_per_sync):
            return None
        if applied.version < pull.step - len(self.layout.fragments):
            waited = self.steps - self._pulled_at.get(pull.fragment, 0)
            if self.bounded_lag or waited <= 1:  # the step under way when it came is no whole one
                return None
        return applied

    def answer(self, pull: Pull) -> Push | None:
        """Ends a pull and returns its PUSH without a delta; None if an outage ended it before."""
        if pull not in self.pulls:
            return None
        applied = self._due_anchor(pull)
        if applied is None:
            raise LocalProtocolError(f"{pull} cannot be answered yet")
        self.pulls.remove(pull)
        self.answered = pull
        self.fates.answered(pull)
        return Push(
            self.learner, pull.fragment, pull.step, pull.attempt, applied.version, self.steps,
            self.steps - applied.steps, self.tokens - applied.tokens, memoryview(b""))

    def unapplied(self) -> list[int]:
        """Fragments without an anchor of this run."""
        return [fragment for fragment, applied in enumerate(self._applied) if applied is None]

    @property
    def needs_everybody(self) -> bool:
        """Whether the server has said that no round closes without all its learners."""
        return self.welcome is not None and self.welcome.quorum == self.welcome.learners

    @property
    def held(self) -> tuple[Held | None, ...]:
        """Of each fragment the newest broadcast that is here bit for bit, applied or to be applied,
        if the server process is known that sent it."""
        return tuple(
            None if seen is None or source is None else Held(source, seen[0])
            for seen, source in zip(self.accepted, self._sources, strict=True))

    @property
    def wants_initial_values(self) -> bool:
        """Whether the run begins with what this learner brings: learner 0, in a run that waits.

        One that speaks protocol 4 alone says nothing of that: then until a broadcast shows that
        there are values.
        """
        if self.learner != 0 or self.phase is not Phase.TRAINING:
            return False
        if self.welcome is None:
            return not any(self.accepted)
        return (self.welcome.epoch == 1 and self.welcome.state is RunState.WAITING
                and len(self.unheard) == len(self.layout.fragments))

    # --- from one process to the next ------------------------------------------------------------

    def remember(self) -> Memory:
        """What the next process of this learner can go on from, beside its anchors."""
        known = None if self._introduction is None else self._introduction.known
        return Memory(
            self.steps, self.tokens, known,
            tuple(None if applied is None else FragmentMemory(
                      applied.version, source if seen and seen[0] == applied.version else None,
                      applied.steps, applied.tokens)
                  for applied, seen, source in zip(
                      self._applied, self.accepted, self._sources, strict=True)))

    def resume(self, memory: Memory, anchors: Sequence[memoryview | None]) -> None:
        """Goes on from there; before the first connection. anchors: in the bulk dtype."""
        self.steps, self.tokens = memory.steps, memory.tokens
        if self._introduction is not None:
            self._introduction.known = memory.known
        for fragment, (known, anchor) in enumerate(zip(memory.fragments, anchors, strict=True)):
            if known is not None and anchor is not None:
                self.accepted[fragment] = known.version, sha256(anchor)
                self._sources[fragment] = known.source
                self._applied[fragment] = _Applied(known.version, known.steps, known.tokens)
                self._changes.keep(Bcast(fragment, known.version, anchor))
        self.versions = tuple(applied.version if applied else 0 for applied in self._applied)

    # --- the final cut ---------------------------------------------------------------------------

    def acknowledge(self) -> bytes:
        """The FINAL_ACK frame; call it when the cut is applied, again for every resend.

        Raises `LocalProtocolError` while the cut is not complete.
        """
        if self.final.manifest is None or self.final.tensors() is None:
            raise LocalProtocolError("FINAL_ACK before the whole final cut has arrived")
        if self.phase is Phase.FINALIZING:
            self.phase = Phase.ACKNOWLEDGING
        return encode_final_ack(FinalAck(self.final.manifest.step))

    def heartbeat(self) -> bytes:
        """The HEARTBEAT frame for the steps made so far."""
        return encode_heartbeat(Heartbeat(self.learner, self.steps))


class _Applied(NamedTuple):
    version: int
    steps: int
    tokens: int
