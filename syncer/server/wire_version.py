"""What one version of a fragment looks like on the wire, shared by every learner it goes to.

f32 is the fragment's own memory; bf16 is encoded once per version, range by range as it is first
needed. It must not know who receives it, and it never changes a byte that was handed out. Of the
version it keeps the parameters and nothing else, so that a slow reader holds no optimizer state.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from syncer.kernels import encode_bf16
from syncer.merge.buffers import BufferPool
from syncer.protocol import DTYPE_F32, Msg, bulk_dtype
from syncer.wire.encode import bcast_head, chunk_message, final_head


class Source(Protocol):
    """A published version of a fragment."""

    @property
    def fragment(self) -> int: ...

    @property
    def version(self) -> int: ...

    @property
    def params(self) -> np.ndarray: ...


class Image(Protocol):
    """What an outbox takes: a version as a message, in pieces of a head and a part of its body, of
    which the first `end` bytes are final after `ready(end)`. Nobody may change a piece."""

    @property
    def kind(self) -> Msg: ...

    @property
    def fragment(self) -> int: ...

    @property
    def version(self) -> int: ...

    @property
    def change(self) -> Change | None: ...

    def pieces(self, msg_id: int, streams: int) -> list[list[bytes | memoryview]]: ...

    def is_ready(self, end: int) -> bool: ...

    def ready(self, end: int) -> None: ...


class Change(Image, Protocol):
    """The same version for who has that of `base`."""

    @property
    def base(self) -> int: ...


class CutOnce:
    """The pieces of a message, `kind`, `head` and `body`, for all who are sent it."""

    __slots__ = ("body", "cut", "head", "kind")

    def __init__(self, kind: Msg, head: bytes, body: memoryview):
        self.kind, self.head, self.body = kind, head, body
        self.cut: tuple[tuple[int, int], list[list[bytes | memoryview]]] | None = None
        """Its newest `pieces`, and what they were asked for."""

    def pieces(self, msg_id: int, streams: int) -> list[list[bytes | memoryview]]:
        """Its CHUNK frames. Learners that were sent as many messages share them: to cut them for
        each of 64 was a tenth of a small round."""
        if self.cut is None or self.cut[0] != (msg_id, streams):
            self.cut = (msg_id, streams), chunk_message(
                self.kind, self.head, self.body, msg_id, streams)
        return self.cut[1]

    def is_ready(self, end: int) -> bool:
        """Whether `body[:end]` is final: all of it is, where nothing has to be encoded."""
        return True

    def ready(self, end: int) -> None:
        """Make `body[:end]` final."""


class WireVersion(CutOnce):
    """A BCAST_FRAGMENT or FINAL_FRAGMENT: `kind`, `fragment`, `version`, `head`, `body`.

    Bytes of `body` up to `n` may be read after `ready(n)`. Encoded bytes land in memory of `pool`,
    which has it back when the last view is gone.
    """

    __slots__ = ("__weakref__", "encoded", "fragment", "params", "version")
    change = None

    def __init__(self, kind: Msg, source: Source, dtype: int, pool: BufferPool):
        self.params: np.ndarray | None = None
        """What is still to be encoded."""
        self.fragment: int = source.fragment
        self.version: int = source.version
        final = kind == Msg.FINAL_FRAGMENT
        if final or bulk_dtype(dtype) == DTYPE_F32:
            body = source.params.data.cast("B")
            self.encoded = len(body)
        else:
            numel = len(source.params)
            body = memoryview(pool.take((numel + 1) // 2)).cast("B")[: 2 * numel]
            self.encoded = 0
            self.params = source.params
        super().__init__(kind, (final_head if final else bcast_head)(
            source.fragment, source.version), body)

    def is_ready(self, end: int) -> bool:
        """Whether `body[:end]` is final."""
        return self.params is None or end <= self.encoded

    def ready(self, end: int) -> None:
        """Make `body[:end]` final. `end` may lie inside a value."""
        if end <= self.encoded or self.params is None:
            return
        first, last = self.encoded // 2, -(-end // 2)
        encode_bf16(self.params[first:last], self.body[2 * first : 2 * last])
        self.encoded = 2 * last
        if self.encoded == len(self.body):
            self.params = None  # the f32 version is not pinned once nothing of it is needed
