"""One connection of a reader: its HELLO, and received bytes to whole cuts; must not own a socket.

A cut is believed when its manifest has come and every fragment is there in just that version. What
a fragment was before is let go as soon as a newer version of it is complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from syncer.errors import RemoteProtocolError
from syncer.layout import AVG, FragmentLayout, Layout
from syncer.learner.introduction import client_text
from syncer.protocol import DTYPE_F32, HASH_BYTES, Msg, tensor_bytes
from syncer.steps import version_at
from syncer.wire import messages
from syncer.wire.encode import encode_hello
from syncer.wire.extended import (
    NoticeText,
    SessionLayout,
    Welcome,
    parse_notice,
    parse_session_layout,
    parse_welcome,
)
from syncer.wire.extension import Extension, Role, RunClaim
from syncer.wire.frames import FrameReader, Reassembly
from syncer.wire.hello import Hello
from syncer.wire.limits import Limits

NOBODY = 2**32 - 1
"""Its id: a learner's in no run, and in place of one, since a HELLO must have one."""
NOTHING = Layout((FragmentLayout(AVG, (1,)),))
NO_CONTRACT = bytes(HASH_BYTES)


class ReceivedCut(NamedTuple):
    """All parameters after one step."""

    step: int
    tensors: tuple[memoryview, ...]
    """Per fragment, as they came."""
    dtype: int
    is_final: bool = False


class Refused(NamedTuple):
    """An ERROR: why the server ends this connection."""

    text: str


class ServerEnd(NamedTuple):
    """SHUTDOWN: there will be no other cut."""


Inbound = Welcome | SessionLayout | NoticeText | ReceivedCut | Refused | ServerEnd


class ReaderSession:
    """What one connection has brought. dtype: f32 or bf16, in which broadcasts come.

    Every method that takes bytes raises `RemoteProtocolError` for what no server sends.
    """

    def __init__(self, dtype: int, *, follows: bool, run: str | None = None):
        self.dtype, self.follows, self.run = dtype, follows, run
        self.welcome: Welcome | None = None
        self.layout: SessionLayout | None = None
        self.has: list[tuple[int, memoryview] | None] = []
        self.final: list[tuple[int, memoryview] | None] = []
        self._reader = FrameReader(Limits.for_new_reader(), None)

    def hello(self, generation: int, key: bytes | None) -> bytes:
        """What its socket says first; nothing else is ever sent."""
        claim = None if self.run is None else RunClaim(NO_CONTRACT, self.run)
        role = Role.FOLLOWER if self.follows else Role.READER
        return encode_hello(
            Hello(NOBODY, generation, self.dtype, NOTHING, NO_CONTRACT, NO_CONTRACT,
                  extension=Extension(client_text(" pull"), role=role, run=claim)), key)

    def buffer(self) -> memoryview:
        """Where the next bytes go; its length is how many are wanted at most."""
        return self._reader.buffer()

    @property
    def bytes_expected(self) -> int | None:
        """Of the tensors of a cut, once the layout is known."""
        return None if self.layout is None else sum(
            tensor_bytes(f.numel, self.dtype) for f in self.layout.layout.fragments)

    def received(self, count: int) -> Iterator[Inbound]:
        """`count` bytes were put into `buffer`; what they complete."""
        self._reader.received(count)
        while (frame := next(self._reader, None)) is not None:
            found = self._taken(*frame)
            if found is not None:
                yield found

    def _taken(self, kind: int, payload: memoryview) -> Inbound | None:
        if kind == Msg.ERROR:
            return Refused(messages.parse_error(payload))
        if kind == Msg.WELCOME and self.welcome is None:
            self.welcome = parse_welcome(payload, 0)
            return self.welcome
        if self.welcome is None:
            raise RemoteProtocolError(f"the server sent message type {kind} before its WELCOME")
        if kind == Msg.NOTICE:
            return parse_notice(payload)
        if kind == Msg.SHUTDOWN:
            messages.parse_shutdown(payload)
            return ServerEnd()
        if self.layout is None:
            return self._take_layout(kind, payload)
        return self._take_cut(kind, payload, self.layout.layout)

    def _take_layout(self, kind: int, payload: memoryview) -> SessionLayout:
        if kind != Msg.LAYOUT:
            raise RemoteProtocolError(f"the server sent message type {kind} before its LAYOUT")
        self.layout = parse_session_layout(payload)
        self.has = [None] * len(self.layout.layout.fragments)
        self.final = list(self.has)
        limits = Limits.for_client(self.layout.layout, self.dtype, extended=True)
        self._reader.limits, self._reader.reassembly = limits, Reassembly(limits)
        return self.layout

    def _take_cut(self, kind: int, payload: memoryview, layout: Layout) -> ReceivedCut | None:
        if kind == Msg.BCAST_FRAGMENT:
            bcast = messages.parse_bcast(payload, layout, self.dtype)
            self.has[bcast.fragment] = bcast.version, bcast.tensor
        elif kind == Msg.FINAL_FRAGMENT:
            final = messages.parse_final_fragment(payload, layout)
            self.has[final.fragment] = None  # its place is needed
            self.final[final.fragment] = final.version, final.tensor
        elif kind == Msg.FINAL_MANIFEST:
            return self._cut_of(messages.parse_manifest(payload, layout))
        else:
            raise RemoteProtocolError(f"a reader cannot receive message type {kind}")
        return None

    def _cut_of(self, manifest: messages.Manifest) -> ReceivedCut:
        is_final = any(self.final)
        there, count = self.final if is_final else self.has, len(self.has)
        tensors = []
        for fragment, (held, version) in enumerate(zip(there, manifest.versions, strict=True)):
            if held is None or held[0] != version or (
                    version != version_at(manifest.step, fragment, count)):
                raise RemoteProtocolError(
                    f"the manifest of step {manifest.step} has version {version} of fragment "
                    f"{fragment}, expected {version_at(manifest.step, fragment, count)}, and "
                    f"{'none' if held is None else held[0]} has come")
            tensors.append(held[1])
        return ReceivedCut(manifest.step, tuple(tensors), DTYPE_F32 if is_final else self.dtype,
                           is_final)
