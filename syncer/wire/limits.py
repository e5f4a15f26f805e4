"""What a peer may send, per side and state (wire 9.1 to 9.3), checked before memory is taken.

Must not hold buffers or counters: a `Limits` is a value, made once per session.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from syncer.errors import LocalProtocolError
from syncer.layout import Layout
from syncer.protocol import (
    CHUNK_HEAD,
    CHUNK_SIZE,
    DTYPE_F32,
    DTYPE_Q4,
    ERROR_FRAME_BYTES_MAX,
    FRAME_BYTES_MAX,
    HEADER_BYTES,
    HELLO_FRAME_BYTES_MAX,
    NOTICE_TEXT_BYTES_MAX,
    OPEN_BYTES_FLOOR,
    REPORT_BYTES_MAX,
    WELCOME_BYTES_MAX,
    Msg,
    bulk_dtype,
    tensor_bytes,
)
from syncer.wire import messages
from syncer.wire.layout import LayoutBytes

NOTICE_HEAD_BYTES = 2
FATE_BYTES = 17
CHUNK_FRAME_BYTES_MAX = CHUNK_HEAD.size + CHUNK_SIZE


_INTRODUCTIONS: dict[int, int] = {
    Msg.WELCOME: WELCOME_BYTES_MAX,
    Msg.NOTICE: NOTICE_HEAD_BYTES + NOTICE_TEXT_BYTES_MAX,
}
"""What a syncer says to whoever has introduced itself."""


class Limits(NamedTuple):
    """Allowed message types and their sizes; a type without an entry is an error."""

    frame_bytes_max: Mapping[int, int]
    """Payload bytes of a bare frame, by message type."""
    inner_bytes_max: int
    """Total bytes (13-byte header included) of a message that arrives in CHUNKs; 0: none may."""
    inner_bytes_min: int = 0
    """Totals below this are refused at the first piece; the syncer waits for completion (0)."""
    open_bytes_max: int = 0
    """Sum of declared totals in reassembly at a time."""
    prefix: str = ""
    """Put in front of every framing refusal."""

    @classmethod
    def first_frame(cls) -> Limits:
        """Of a new socket on the syncer: HELLO or DATA_HELLO, nothing else."""
        allowed: dict[int, int] = {
            Msg.HELLO: HELLO_FRAME_BYTES_MAX, Msg.DATA_HELLO: HELLO_FRAME_BYTES_MAX}
        return cls(allowed, 0, prefix="invalid first frame: ")

    @classmethod
    def for_server(cls, layout: Layout | LayoutBytes, dtype: int, *,
                   extended: bool = False) -> Limits:
        """Of a connection group on the syncer after its HELLO; extended: it had a block.

        Raises LocalProtocolError if a size of this layout cannot be addressed.
        """
        largest = layout.largest
        init = messages.INIT_HEAD.size + tensor_bytes(largest, bulk_dtype(dtype))
        push = messages.PUSH_HEAD.size + tensor_bytes(largest, dtype)
        # The final cut is f32 whatever the session dtype: it must be addressable too.
        final = messages.VERSIONED_HEAD.size + tensor_bytes(largest, DTYPE_F32)
        allowed: dict[int, int] = {
            Msg.INIT_PARAMS: init,
            Msg.PUSH_FRAGMENT: push,
            Msg.HEARTBEAT: messages.HEARTBEAT.size,
            Msg.FINAL_ACK: messages.FINAL_ACK.size,
            Msg.BUDGET_DONE: messages.BUDGET_DONE.size,
            Msg.CHUNK: CHUNK_FRAME_BYTES_MAX,
        }
        if extended:
            allowed[Msg.REPORT] = REPORT_BYTES_MAX
        _check_addressable(final)
        return _session_limits(allowed, max(init, push), inner_bytes_min=0)

    @classmethod
    def for_reader_group(cls) -> Limits:
        """Of a reader's connection on the syncer: it says that it is there, and no more."""
        return cls({Msg.HEARTBEAT: messages.HEARTBEAT.size}, 0)

    @classmethod
    def for_client(cls, layout: Layout, dtype: int, *, extended: bool = False,
                   changes: bool = False, fates: bool = False) -> Limits:
        """Of every socket of a learner, or of a reader that knows the layout; extended: its HELLO
        had a block; changes: which said that it understands them; fates: which asked for those of
        pushes. Raises LocalProtocolError like `for_server`."""
        largest = layout.largest
        bcast = messages.VERSIONED_HEAD.size + tensor_bytes(largest, bulk_dtype(dtype))
        final = messages.VERSIONED_HEAD.size + tensor_bytes(largest, DTYPE_F32)
        allowed: dict[int, int] = {
            Msg.PULL_REQ: messages.PULL.size,
            Msg.BCAST_FRAGMENT: bcast,
            Msg.FINAL_FRAGMENT: final,
            Msg.FINAL_MANIFEST: messages.MANIFEST_HEAD.size + 8 * len(layout.fragments),
            Msg.SHUTDOWN: 0,
            Msg.ERROR: ERROR_FRAME_BYTES_MAX,
            Msg.CHUNK: CHUNK_FRAME_BYTES_MAX,
        }
        if extended:
            allowed |= _INTRODUCTIONS
            allowed[Msg.WELCOME] += len(layout.fragments)
        if changes:
            allowed[Msg.BCAST_CHANGE] = (
                messages.CHANGE_HEAD.size + tensor_bytes(largest, DTYPE_Q4))
        if fates:
            allowed[Msg.PUSH_FATE] = FATE_BYTES
        return _session_limits(allowed, max(bcast, final, allowed.get(Msg.BCAST_CHANGE, 0)),
                               inner_bytes_min=HEADER_BYTES)

    @classmethod
    def for_new_reader(cls) -> Limits:
        """Of a reader that does not know the layout yet."""
        return cls({**_INTRODUCTIONS, Msg.LAYOUT: HELLO_FRAME_BYTES_MAX,
                    Msg.ERROR: ERROR_FRAME_BYTES_MAX, Msg.SHUTDOWN: 0}, 0)


def _session_limits(allowed: dict[int, int], largest: int, inner_bytes_min: int) -> Limits:
    inner = HEADER_BYTES + largest
    _check_addressable(inner)
    open_bytes = min(max(OPEN_BYTES_FLOOR, 4 * inner), FRAME_BYTES_MAX)
    return Limits(allowed, inner, inner_bytes_min, open_bytes)


def _check_addressable(size: int) -> None:
    if size > FRAME_BYTES_MAX:
        raise LocalProtocolError(
            f"layout needs a message of {size} bytes, more than {FRAME_BYTES_MAX} can be addressed"
        )
