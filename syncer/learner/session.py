"""The protocol state of one learner, from first HELLO to the end: bytes and calls in, events out.

Deterministic and sans-IO: no socket, thread, clock or random source; a caller with threads
serialises its calls, except for the pure ones that say so. Tensors are not decoded here.

A learner lives through several connection generations. What belongs to one generation (readers,
reassembly, order of stripes) is a `Connection`; what outlives it is in `Session`:

* `accepted[f]`: newest broadcast of a fragment as (version, SHA-256). A lower version is dropped,
  an equal one with equal bytes is a replay and is dropped, an equal one with other bytes is fatal.
  The first one of a fragment on a new connection is what the server holds now: if it is older, or
  the same with other bytes, the server was resumed from an earlier step, and the learner follows
  it. Otherwise its anchor would be of a future that never comes, and no push would count again.
* `broadcasts`: accepted and not yet taken, in order of acceptance. They survive an outage.
* `pulls`: not yet answered, in order of arrival, each once. They end with their connection: the
  server asks the next generation again.
* the final cut: FINAL_FRAGMENTs with the three rules above in a cache of their own, and a manifest
  that must never change. With the manifest, broadcasts and pulls are no longer handed out.

`TRAINING -> FINALIZING (manifest) -> ACKNOWLEDGING (cut applied) -> SHUT_DOWN`; a fatal error sets
`error`, which ends everything.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from syncer.errors import LocalProtocolError, RemoteProtocolError, SyncerError
from syncer.kernels import sha256
from syncer.layout import Layout
from syncer.protocol import DTYPE_BF16, Msg, bulk_dtype, tensor_bytes
from syncer.wire.encode import (
    chunk_message,
    encode_data_hello,
    encode_final_ack,
    encode_heartbeat,
    encode_hello,
    init_head,
    push_head,
)
from syncer.wire.frames import FrameReader, Reassembly
from syncer.wire.hello import Hello
from syncer.wire.limits import Limits
from syncer.wire.messages import (
    Bcast,
    DataHello,
    FinalAck,
    FinalFragment,
    Heartbeat,
    Manifest,
    Pull,
    Push,
    parse_bcast,
    parse_error,
    parse_final_fragment,
    parse_manifest,
    parse_pull,
    parse_shutdown,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

CONTROL = 0
"""Stream number of the control socket; data socket i is stream i + 1."""

REFUSALS = (
    ("session mismatch", "layout_hash_mismatch"),
    ("HELLO syncer semantic profile", "syncer_profile_mismatch"),
    ("HELLO is missing the required syncer semantic profile", "syncer_profile_mismatch"),
    ("HELLO authentication failed", "island_auth_failed"),
)
"""ERROR texts (by their start) that will be the same at every attempt, and their metric."""


class ConnectionFailed(SyncerError):
    """The server refused this learner, or cannot be reached any more.

    `metric` names a deterministic refusal ("layout_hash_mismatch", "syncer_profile_mismatch",
    "island_auth_failed"), for which the whole island must stop; None for anything else.
    """

    def __init__(self, text: str, metric: str | None = None):
        super().__init__(text)
        self.metric = metric


class Phase(Enum):
    """Where a session stands on its way to the end."""

    TRAINING = "training"
    FINALIZING = "finalizing"
    ACKNOWLEDGING = "acknowledging"
    SHUT_DOWN = "shut down"


class Inbound(NamedTuple):
    """One parsed frame of the server.

    `message` is None for SHUTDOWN and the text of an ERROR; `digest` is the SHA-256 of the tensor
    of a broadcast or final fragment, empty for others.
    """

    msg_type: int
    message: Pull | Bcast | FinalFragment | Manifest | str | None
    digest: bytes = b""


class TensorMessage(NamedTuple):
    """An outgoing tensor message; `body` must stay unchanged until it is sent."""

    msg_type: int
    head: bytes
    body: memoryview


def refusal(text: str) -> ConnectionFailed:
    """What an ERROR frame of this text means to a learner."""
    for prefix, metric in REFUSALS:
        if text.startswith(prefix):
            return ConnectionFailed(f"{metric}: {text}", metric)
    return ConnectionFailed(f"syncer connection failed: {text}")


class Session:
    """Everything a learner knows about the protocol, over all its connections.

    learner: id, a u32. fingerprint: 32 bytes. dtype: `DTYPE_F32`, `DTYPE_BF16` or `DTYPE_Q4`.
    num_streams: data sockets, 0..256. contract: 32 bytes, the fingerprint if None. profile_hash:
    32 bytes or None. key: island key for the HELLO, or None. min_steps_per_sync: a pull is
    answered after that many steps on the exact anchor.
    Raises `LocalProtocolError` for values that no HELLO can carry.
    """

    def __init__(self, layout: Layout, fingerprint: bytes, *, learner: int,
                 dtype: int = DTYPE_BF16, num_streams: int = 4, contract: bytes | None = None,
                 profile_hash: bytes | None = None, compat_group: str | None = None,
                 key: bytes | None = None, min_steps_per_sync: int = 1):
        if min_steps_per_sync < 1:
            raise LocalProtocolError(
                f"min_steps_per_sync must be at least 1, found {min_steps_per_sync}")
        self.layout = layout
        self.learner = learner
        self.dtype = dtype
        self.num_streams = num_streams
        self.min_steps_per_sync = min_steps_per_sync
        self._key = key
        self._hello = Hello(
            learner, 1, dtype, layout, fingerprint,
            fingerprint if contract is None else contract, profile_hash, num_streams, compat_group)
        encode_hello(self._hello, key)  # every check of a HELLO, before anything is dialed
        count = len(layout.fragments)
        self._bulk_bytes = [tensor_bytes(f.numel, bulk_dtype(dtype)) for f in layout.fragments]
        self._delta_bytes = [tensor_bytes(f.numel, dtype) for f in layout.fragments]

        self.connection: Connection | None = None
        self.error: SyncerError | None = None
        self.phase = Phase.TRAINING
        self.steps = 0
        self.tokens = 0
        self.accepted: list[tuple[int, bytes] | None] = [None] * count
        self.broadcasts: deque[Bcast] = deque()
        self.pulls: list[Pull] = []
        self.manifest: Manifest | None = None
        self._final: list[tuple[int, bytes, memoryview] | None] = [None] * count
        self._applied: list[_Applied | None] = [None] * count
        self.last_generation: int | None = None
        self._next_msg_id = 0
        self._unheard: set[int] = set()
        """Fragments of which the newest connection has brought no broadcast yet."""

    # --- connections -----------------------------------------------------------------------------

    def connect(self, generation: int) -> Connection:
        """Starts a connection generation; the one before it, if any, is lost.

        generation: fresh random u64, not 0 and not the last one. Raises `LocalProtocolError`.
        """
        if generation == self.last_generation:
            raise LocalProtocolError(f"generation {generation} is that of the last connection")
        connection = Connection(self, self._hello._replace(generation=generation), self._key)
        self.last_generation = generation
        self.lost(self.connection)
        self.connection = connection
        self._unheard = set(range(len(self.layout.fragments)))
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

    def parse(self, msg_type: int, payload: memoryview) -> Inbound:
        """Parses and hashes one complete frame. Pure: may run beside any other call.

        Raises `RemoteProtocolError` for a frame that a server of this session cannot send.
        """
        if msg_type == Msg.BCAST_FRAGMENT:
            bcast = parse_bcast(payload, self.layout, self.dtype)
            return Inbound(msg_type, bcast, sha256(bcast.tensor))
        if msg_type == Msg.FINAL_FRAGMENT:
            final = parse_final_fragment(payload, self.layout)
            return Inbound(msg_type, final, sha256(final.tensor))
        if msg_type == Msg.PULL_REQ:
            return Inbound(msg_type, parse_pull(payload, self.layout))
        if msg_type == Msg.FINAL_MANIFEST:
            return Inbound(msg_type, parse_manifest(payload, self.layout))
        if msg_type == Msg.SHUTDOWN:
            parse_shutdown(payload)
            return Inbound(msg_type, None)
        if msg_type == Msg.ERROR:
            return Inbound(msg_type, parse_error(payload))
        raise RemoteProtocolError(f"a learner cannot receive message type {msg_type}")

    def accept(self, connection: Connection, inbound: Inbound) -> bool:
        """Takes a parsed frame into the state; True if it changed anything.

        Raises `RemoteProtocolError` or `ConnectionFailed`, recorded in `error` as well.
        """
        if self.ended:
            return False
        try:
            return self._accept(connection, inbound.message, inbound.digest)
        except SyncerError as error:
            self.fail(error)
            raise

    def _accept(self, connection: Connection,
                message: Pull | Bcast | FinalFragment | Manifest | str | None,
                digest: bytes) -> bool:
        if isinstance(message, Bcast):
            return self._accept_broadcast(connection, message, digest)
        if isinstance(message, Pull):
            news = connection is self.connection and message not in self.pulls
            if news:
                self.pulls.append(message)
            return news
        if isinstance(message, FinalFragment):
            news = _is_news(message, digest, self._final[message.fragment], "FINAL_FRAGMENT")
            if news:
                self._final[message.fragment] = message.version, digest, message.tensor
            return news
        if isinstance(message, Manifest):
            return self._accept_manifest(message)
        if message is None:
            return self._accept_shutdown()
        raise refusal(message)

    def _accept_broadcast(self, connection: Connection, message: Bcast, digest: bytes) -> bool:
        if self.connection not in (None, connection):
            return False  # late: the new connection tells what holds now
        seen = self.accepted[message.fragment]
        if message.fragment in self._unheard:
            self._unheard.discard(message.fragment)
            if seen == (message.version, digest):
                return False
        elif not _is_news(message, digest, seen, "BCAST_FRAGMENT"):
            return False
        self.accepted[message.fragment] = message.version, digest
        self.broadcasts.append(message)
        return True

    def _accept_manifest(self, manifest: Manifest) -> bool:
        if self.manifest is not None:
            if manifest == self.manifest:
                return False
            raise RemoteProtocolError(
                f"FINAL_MANIFEST changed: first {self.manifest}, now {manifest}")
        self.manifest = manifest
        self.phase = Phase.FINALIZING
        return True

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
        return taken

    def due_pulls(self) -> list[Pull]:
        """Pulls that may be answered now: an anchor is there, and enough steps were made on it."""
        if self.phase is not Phase.TRAINING:
            return []
        return [pull for pull in self.pulls if self._due_anchor(pull) is not None]

    def _due_anchor(self, pull: Pull) -> _Applied | None:
        """The anchor that a pull may be answered on now."""
        applied = self._applied[pull.fragment]
        if applied is None or self.steps - applied.steps < self.min_steps_per_sync:
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
        return Push(
            self.learner, pull.fragment, pull.step, pull.attempt, applied.version, self.steps,
            self.steps - applied.steps, self.tokens - applied.tokens, memoryview(b""))

    @property
    def versions(self) -> tuple[int, ...]:
        """Version of each fragment that was last taken to be applied; 0 also before the first."""
        return tuple(applied.version if applied else 0 for applied in self._applied)

    # --- the final cut ---------------------------------------------------------------------------

    def final_cut(self) -> list[memoryview] | None:
        """The f32 bytes of every fragment, once the cache holds exactly the manifest's versions."""
        if self.manifest is None:
            return None
        cut = [entry[2] for entry, version in zip(self._final, self.manifest.versions, strict=True)
               if entry is not None and entry[0] == version]
        return cut if len(cut) == len(self._final) else None

    def missing_final_fragments(self) -> list[int]:
        """Fragments whose final version has not arrived."""
        versions = self.manifest.versions if self.manifest else [None] * len(self._final)
        return [f for f, (entry, version) in enumerate(zip(self._final, versions, strict=True))
                if entry is None or entry[0] != version]

    def acknowledge(self) -> bytes:
        """The FINAL_ACK frame; call it when the cut is applied, again for every resend.

        Raises `LocalProtocolError` while the cut is not complete.
        """
        if self.manifest is None or self.final_cut() is None:
            raise LocalProtocolError("FINAL_ACK before the whole final cut has arrived")
        if self.phase is Phase.FINALIZING:
            self.phase = Phase.ACKNOWLEDGING
        return encode_final_ack(FinalAck(self.manifest.step))

    # --- outgoing messages -----------------------------------------------------------------------

    def init(self, fragment: int, tensor: Buffer) -> TensorMessage:
        """INIT_PARAMS of one fragment; tensor: its bytes in the bulk dtype. Learner 0 only."""
        if self.learner != 0:
            raise LocalProtocolError(f"only learner 0 sends INIT_PARAMS, this is {self.learner}")
        self._check_body("INIT_PARAMS", fragment, tensor, self._bulk_bytes)
        return TensorMessage(Msg.INIT_PARAMS, init_head(fragment), memoryview(tensor))

    def push(self, push: Push, delta: Buffer) -> TensorMessage:
        """PUSH_FRAGMENT for an `answer`; delta: its bytes in the session dtype."""
        self._check_body("PUSH_FRAGMENT", push.fragment, delta, self._delta_bytes)
        return TensorMessage(Msg.PUSH_FRAGMENT, push_head(push), memoryview(delta))

    def heartbeat(self) -> bytes:
        """The HEARTBEAT frame for the steps made so far."""
        return encode_heartbeat(Heartbeat(self.learner, self.steps))

    def push_bytes(self, fragment: int) -> int:
        """Bytes of a delta of this fragment."""
        return self._delta_bytes[fragment]

    def init_bytes(self, fragment: int) -> int:
        """Bytes of an INIT tensor of this fragment."""
        return self._bulk_bytes[fragment]

    def take_msg_id(self) -> int:
        """Number of the next chunked message; never repeats in the life of this session."""
        msg_id = self._next_msg_id
        self._next_msg_id += 1
        return msg_id

    @staticmethod
    def _check_body(name: str, fragment: int, body: Buffer, sizes: list[int]) -> None:
        if not 0 <= fragment < len(sizes):
            raise LocalProtocolError(
                f"{name} for fragment {fragment}, the layout has {len(sizes)}")
        found = memoryview(body).nbytes
        if found != sizes[fragment]:
            raise LocalProtocolError(
                f"{name} fragment {fragment} has {found} bytes, expected {sizes[fragment]}")


class Connection:
    """One generation: what each of its sockets says first, reads, and carries.

    Streams: 0 is the control socket, 1..num_streams are the data sockets.
    """

    def __init__(self, session: Session, hello: Hello, key: bytes | None):
        self._session = session
        self.generation = hello.generation
        self.streams = 1 + hello.num_streams
        self.openings = [encode_hello(hello, key)] + [
            encode_data_hello(DataHello(hello.learner, hello.generation, index))
            for index in range(hello.num_streams)]
        """The first frame of each stream."""
        limits = Limits.for_client(session.layout, session.dtype)
        reassembly = Reassembly(limits)
        self._readers = [FrameReader(limits, reassembly) for _ in range(self.streams)]
        self._next_data = 0

    def buffer(self, stream: int) -> memoryview:
        """Where the next bytes of a stream go; its length is how many are wanted at most."""
        return self._readers[stream].buffer()

    def received(self, stream: int, count: int) -> Iterator[tuple[int, memoryview]]:
        """`count` bytes were put into `buffer(stream)`; the complete frames, for `parse`.

        Streams may be read by different threads. Raises `RemoteProtocolError` while iterating;
        the caller hands it to `Session.fail`.
        """
        return self._readers[stream].received(count)

    def feed(self, stream: int, data: bytes | bytearray | memoryview) -> list[Inbound]:
        """Takes bytes of a stream in one go: the frames that changed the session's state.

        For callers without sockets; copies `data`. Raises as `received`, `parse` and `accept`,
        with the error recorded.
        """
        session = self._session
        accepted = []
        try:
            for msg_type, payload in self._readers[stream].feed(data):
                inbound = session.parse(msg_type, payload)
                if session.accept(self, inbound):
                    accepted.append(inbound)
        except RemoteProtocolError as error:
            session.fail(error)
            raise
        return accepted

    def stripe(self, message: TensorMessage) -> Iterator[tuple[int, list[bytes | memoryview]]]:
        """Cuts a message into CHUNK frames: (stream, gather list of buffers), in sending order.

        Data sockets take turns, and the turn goes on from message to message.
        """
        msg_id = self._session.take_msg_id()
        for pieces in chunk_message(message.msg_type, message.head, message.body, msg_id):
            yield self._take_stream(), pieces

    def _take_stream(self) -> int:
        if self.streams == 1:
            return CONTROL
        stream = 1 + self._next_data
        self._next_data = (self._next_data + 1) % (self.streams - 1)
        return stream


class _Applied(NamedTuple):
    version: int
    steps: int
    tokens: int


def _is_news(message: Bcast | FinalFragment, digest: bytes,
             seen: tuple[int, bytes] | tuple[int, bytes, memoryview] | None, name: str) -> bool:
    if seen is None or message.version > seen[0]:
        return True
    if message.version == seen[0] and digest != seen[1]:
        raise RemoteProtocolError(
            f"{name} fragment {message.fragment} version {message.version} came with other bytes "
            f"than before: SHA-256 first {seen[1].hex()}, now {digest.hex()}")
    return False
