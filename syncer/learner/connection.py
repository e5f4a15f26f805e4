"""One connection generation of a learner: what each of its sockets says first, reads and carries.

Sans-IO: received bytes to parsed frames, messages to frames of its streams. Must not keep what
outlives the connection: that is in `Session`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from syncer.errors import RemoteProtocolError
from syncer.kernels import sha256
from syncer.learner.changes import Digest, LateDigest, Rebuilt
from syncer.learner.tensor_messages import TensorMessage
from syncer.protocol import DTYPE_Q4, Msg, bulk_dtype
from syncer.wire.encode import chunk_message, encode_data_hello, encode_hello
from syncer.wire.extended import (
    Fate,
    NoticeText,
    Welcome,
    parse_fate,
    parse_notice,
    parse_welcome,
)
from syncer.wire.frames import FrameReader, Reassembly
from syncer.wire.hello import Hello
from syncer.wire.limits import Limits
from syncer.wire.messages import (
    Bcast,
    BcastChange,
    DataHello,
    FinalFragment,
    Manifest,
    Pull,
    parse_bcast,
    parse_bcast_change,
    parse_error,
    parse_final_fragment,
    parse_manifest,
    parse_pull,
    parse_shutdown,
)

if TYPE_CHECKING:
    from syncer.learner.session import Session

CONTROL = 0
"""Stream number of the control socket; data socket i is stream i + 1."""


Received: TypeAlias = (Pull | Bcast | BcastChange | FinalFragment | Manifest | Welcome | NoticeText
                       | Fate | str | None)
"""A message of the server; the text of an ERROR, None for SHUTDOWN."""


class Inbound(NamedTuple):
    """One parsed frame of the server.

    `digest` is the SHA-256 of the tensor of a broadcast or final fragment, empty for others.
    """

    msg_type: int
    message: Received
    digest: Digest = b""

    @property
    def fragment(self) -> int:
        """Of a broadcast, whole or as a change; -1 of anything else."""
        return self.message.fragment if isinstance(self.message, Bcast | BcastChange) else -1


class Connection:
    """One generation: what each of its sockets says first, reads, and carries.

    Streams: 0 is the control socket, 1..num_streams are the data sockets.
    """

    def __init__(self, session: Session, hello: Hello, key: bytes | None):
        self._session = session
        self.generation = hello.generation
        self.streams = 1 + hello.num_streams
        extension = hello.extension
        extended = extension is not None
        self.openings = [encode_hello(hello, key)] + [
            encode_data_hello(DataHello(hello.learner, hello.generation, index),
                              key if extended else None)
            for index in range(hello.num_streams)]
        """The first frame of each stream."""
        self.extended = extended
        """Whether it introduces itself."""
        self.welcome: Welcome | None = None
        """What the server has answered to that, once the session has judged it."""
        self.limits = limits = Limits.for_client(
            session.layout, session.dtype, extended=extended,
            changes=extension is not None and bool(extension.changes),
            fates=extension is not None and extension.fates)
        reassembly = Reassembly(limits)
        self._readers = [FrameReader(limits, reassembly) for _ in range(self.streams)]
        self._next_data = 0

    @property
    def ready(self) -> bool:
        """Whether its data sockets may be dialed, and anything sent but a greeting."""
        return self.welcome is not None or not self.extended

    @property
    def takes_changes(self) -> bool:
        """Whether broadcasts may come as changes (wire 20)."""
        return self.welcome is not None and self.welcome.changes == DTYPE_Q4

    @property
    def stripes(self) -> int:
        """How many sockets a message is cut for: one unless it introduces itself (wire 19.14)."""
        return max(1, self.streams - 1) if self.extended else 1

    @property
    def instance(self) -> int | None:
        """The server process at the other end, if it has said so."""
        return None if self.welcome is None else self.welcome.instance

    def buffer(self, stream: int) -> memoryview:
        """Where the next bytes of a stream go; its length is how many are wanted at most."""
        return self._readers[stream].buffer()

    def received(self, stream: int, count: int) -> Iterator[tuple[int, memoryview]]:
        """`count` bytes were put into `buffer(stream)`; the complete frames, for `parse`.

        Streams may be read by different threads. Raises `RemoteProtocolError` while iterating;
        the caller hands it to `Session.fail`.
        """
        return self._readers[stream].received(count)

    def parse(self, msg_type: int, payload: memoryview) -> Inbound:
        """Parses and hashes one complete frame. Pure: may run beside any other call.

        Raises `RemoteProtocolError` for a frame that a server of this session cannot send.
        """
        session, layout = self._session, self._session.layout
        message: Received = None
        digest = b""
        if msg_type == Msg.BCAST_FRAGMENT:
            message = parse_bcast(payload, layout, session.dtype)
            digest = sha256(message.tensor)
        elif msg_type == Msg.BCAST_CHANGE:
            message = parse_bcast_change(payload, layout)
        elif msg_type == Msg.FINAL_FRAGMENT:
            message = parse_final_fragment(payload, layout)
            digest = sha256(message.tensor)
        elif msg_type == Msg.PULL_REQ:
            message = parse_pull(payload, layout)
        elif msg_type == Msg.FINAL_MANIFEST:
            message = parse_manifest(payload, layout)
        elif msg_type == Msg.SHUTDOWN:
            parse_shutdown(payload)
        elif msg_type == Msg.ERROR:
            message = parse_error(payload)
        elif self.extended and msg_type == Msg.WELCOME:
            message = parse_welcome(payload, len(layout.fragments))
        elif self.extended and msg_type == Msg.NOTICE:
            message = parse_notice(payload)
        elif msg_type == Msg.PUSH_FATE:
            message = parse_fate(payload, len(layout.fragments))
        else:
            raise RemoteProtocolError(f"unexpected message type {msg_type}")  # impossible: limits
        return Inbound(msg_type, message, digest)

    def rebuild(self, rebuilt: Rebuilt) -> Inbound:
        """The broadcast that a change stands for, as `parse` would give it. Pure, as that."""
        message = rebuilt.broadcast(bulk_dtype(self._session.dtype))
        return Inbound(Msg.BCAST_FRAGMENT, message, LateDigest(message.tensor))

    def feed(self, stream: int, data: bytes | bytearray | memoryview) -> list[Inbound]:
        """Takes bytes of a stream in one go: the frames that changed the session's state.

        For callers without sockets; copies `data`. Raises as `received`, `parse` and `accept`,
        with the error recorded.
        """
        session = self._session
        accepted = []
        try:
            for msg_type, payload in self._readers[stream].feed(data):
                accepted += self.taken(self.parse(msg_type, payload))
        except RemoteProtocolError as error:
            session.fail(error)
            raise
        return accepted

    def taken(self, inbound: Inbound) -> list[Inbound]:
        """What of it, and of changes that have waited for it, has changed the session's state.

        Long, and no call may be beside it.
        """
        session, accepted = self._session, []
        following: Inbound | None = inbound
        while following is not None:
            if session.accept(self, following):
                accepted.append(following)
            ready = session.rebuilt(self, following.fragment)
            following = None if ready is None else self.rebuild(ready)
        return accepted

    def stripe(self, message: TensorMessage) -> Iterator[tuple[int, list[bytes | memoryview]]]:
        """Cuts a message into CHUNK frames: (stream, gather list of buffers), in sending order.

        Data sockets take turns, and the turn goes on from message to message.
        """
        msg_id = next(self._session.msg_ids)
        for pieces in chunk_message(message.msg_type, message.head, message.body, msg_id,
                                    self.stripes):
            yield self._take_stream(), pieces

    def _take_stream(self) -> int:
        if self.streams == 1:
            return CONTROL
        stream = 1 + self._next_data
        self._next_data = (self._next_data + 1) % (self.streams - 1)
        return stream
