"""Messages to bytes: whole frames for small ones, heads and gather lists for bulk ones.

Bodies of bulk messages are never copied here. Must not touch a socket or choose a stream.
"""

from __future__ import annotations

import struct
from struct import Struct
from typing import TYPE_CHECKING

from syncer.errors import LocalProtocolError
from syncer.layout import ISO, Layout
from syncer.protocol import (
    CHUNK_HEAD,
    CHUNK_SIZE,
    COMPAT_GROUP_BYTES_MAX,
    COMPAT_MAGIC,
    DTYPES,
    ERROR_FRAME_BYTES_MAX,
    FINALIZATION_REVISION,
    FRAME_HEADER,
    HASH_BYTES,
    HEADER_BYTES,
    HELLO_FRAME_BYTES_MAX,
    MAGIC,
    PROTOCOL_VERSION,
    STREAMS_MAX,
    Msg,
)
from syncer.wire import messages as m
from syncer.wire.extension import encode_extension
from syncer.wire.hello import HELLO_HEAD, Hello, data_mac, hello_mac
from syncer.wire.layout import FRAGMENT_HEAD

if TYPE_CHECKING:
    from typing_extensions import Buffer

STRIPE_BYTES_MIN = 256 * 1024
"""A message is not cut smaller for the sake of more sockets."""
CHUNK_HEADER = Struct(FRAME_HEADER.format + CHUNK_HEAD.format.removeprefix("<"))
"""Frame header of a CHUNK and its msg_id, total_len, offset."""


def frame_header(msg_type: int, payload_bytes: int) -> bytes:
    """The 13 bytes in front of a payload."""
    return FRAME_HEADER.pack(MAGIC, msg_type, payload_bytes)


def frame(msg_type: int, payload: m.Bytes) -> bytes:
    """A whole frame."""
    return frame_header(msg_type, len(payload)) + bytes(payload)


def _pack(layout: Struct, msg_type: Msg, *values: int) -> bytes:
    try:
        return layout.pack(*values)
    except struct.error as error:
        raise LocalProtocolError(f"{msg_type.name} cannot hold {values}: {error}") from None


# --- HELLO -------------------------------------------------------------------------------------


def encode_hello(hello: Hello, key: bytes | None = None) -> bytes:
    """HELLO frame, with its MAC when `key` is given.

    Raises LocalProtocolError for anything a syncer would refuse in every session.
    """
    body = _hello_body(hello)
    payload = body if key is None else body + hello_mac(key, body)
    if len(payload) > HELLO_FRAME_BYTES_MAX:
        raise LocalProtocolError(
            f"HELLO of {len(payload)} bytes exceeds limit {HELLO_FRAME_BYTES_MAX}; "
            "the layout has too many tensors"
        )
    return frame(Msg.HELLO, payload)


def _hello_body(hello: Hello) -> bytes:
    _refuse_if(hello.generation == 0, "generation must be nonzero")
    _refuse_if(hello.dtype not in DTYPES, f"dtype is {hello.dtype}, expected 1, 2 or 3")
    _refuse_if(
        not 0 <= hello.num_streams <= STREAMS_MAX,
        f"num_streams is {hello.num_streams}, expected 0..{STREAMS_MAX}",
    )
    hashes = {"fingerprint": hello.fingerprint, "contract": hello.contract}
    if hello.profile_hash is not None:
        hashes["profile_hash"] = hello.profile_hash
    for name, value in hashes.items():
        _refuse_if(
            len(value) != HASH_BYTES, f"{name} has {len(value)} bytes, expected {HASH_BYTES}"
        )
    head = _pack(
        HELLO_HEAD,
        Msg.HELLO,
        PROTOCOL_VERSION,
        hello.learner,
        hello.generation,
        hello.dtype,
        len(hello.layout.fragments),
    )
    streams = hello.num_streams.to_bytes(2, "little")
    return b"".join(
        [head, encode_layout(hello.layout), *hashes.values(), streams,
         _trailer(hello.compat_group),
         b"" if hello.extension is None else encode_extension(hello.extension)]
    )


def encode_layout(layout: Layout) -> bytes:
    """The fragments as HELLO has them. Raises LocalProtocolError for a layout no HELLO can have."""
    _refuse_if(not layout.fragments, "layout must contain at least one fragment")
    parts = []
    for index, (merge_mode, numels, shapes) in enumerate(layout.fragments):
        _refuse_if(not numels, f"fragment {index} must contain at least one tensor")
        _refuse_if(min(numels, default=0) < 1, f"fragment {index} has a tensor without elements")
        count = len(numels)
        parts.append(_pack(FRAGMENT_HEAD, Msg.HELLO, merge_mode, count))
        parts.append(_pack(Struct(f"<{count}Q"), Msg.HELLO, *numels))
        if merge_mode == ISO:
            _refuse_if(
                [rows * cols for rows, cols in shapes] != list(numels),
                f"fragment {index} has iso shapes that do not match its numels",
            )
            flat = [size for shape in shapes for size in shape]
            parts.append(_pack(Struct(f"<{2 * count}Q"), Msg.HELLO, *flat))
    return b"".join(parts)


def _trailer(compat_group: str | None) -> bytes:
    if compat_group is None:
        return b""
    group = compat_group.encode("utf-8")
    _refuse_if(
        not 1 <= len(group) <= COMPAT_GROUP_BYTES_MAX,
        f"compat group has {len(group)} bytes of UTF-8, expected 1..{COMPAT_GROUP_BYTES_MAX}",
    )
    return COMPAT_MAGIC + len(group).to_bytes(4, "little") + group


def _refuse_if(wrong: bool, text: str) -> None:
    if wrong:
        raise LocalProtocolError(f"HELLO cannot be sent: {text}")


# --- small frames ------------------------------------------------------------------------------


def encode_data_hello(hello: m.DataHello, key: bytes | None = None) -> bytes:
    """DATA_HELLO frame; with `key`, proved as an extended group must. `hello.proof` is not used."""
    payload = _pack(m.DATA_HELLO, Msg.DATA_HELLO, PROTOCOL_VERSION, *hello[:3])
    return frame(Msg.DATA_HELLO, payload if key is None else payload + data_mac(key, payload))


def encode_pull(pull: m.Pull) -> bytes:
    """PULL_REQ frame."""
    return frame(Msg.PULL_REQ, _pack(m.PULL, Msg.PULL_REQ, *pull))


def encode_heartbeat(heartbeat: m.Heartbeat) -> bytes:
    """HEARTBEAT frame."""
    return frame(Msg.HEARTBEAT, _pack(m.HEARTBEAT, Msg.HEARTBEAT, *heartbeat))


def encode_shutdown() -> bytes:
    """SHUTDOWN frame."""
    return frame(Msg.SHUTDOWN, b"")


def encode_error(text: str) -> bytes:
    """ERROR frame; a text over the client's cap is cut at a character."""
    payload = text.encode("utf-8", "replace")
    if len(payload) > ERROR_FRAME_BYTES_MAX:
        payload = payload[:ERROR_FRAME_BYTES_MAX].decode("utf-8", "ignore").encode("utf-8")
    return frame(Msg.ERROR, payload)


def encode_manifest(manifest: m.Manifest) -> bytes:
    """FINAL_MANIFEST frame."""
    count = len(manifest.versions)
    head = _pack(m.MANIFEST_HEAD, Msg.FINAL_MANIFEST, FINALIZATION_REVISION, manifest.step, count)
    versions = _pack(Struct(f"<{count}Q"), Msg.FINAL_MANIFEST, *manifest.versions)
    return frame(Msg.FINAL_MANIFEST, head + versions)


def encode_final_ack(ack: m.FinalAck) -> bytes:
    """FINAL_ACK frame."""
    payload = _pack(m.FINAL_ACK, Msg.FINAL_ACK, FINALIZATION_REVISION, ack.step)
    return frame(Msg.FINAL_ACK, payload)


def encode_budget_done(done: m.BudgetDone) -> bytes:
    """BUDGET_DONE frame; for other learners, since ours has no budget mode."""
    return frame(Msg.BUDGET_DONE, _pack(m.BUDGET_DONE, Msg.BUDGET_DONE, *done))


# --- bulk messages: a head of a few bytes, and a body that stays where it is ----------------------


def init_head(fragment: int) -> bytes:
    """Payload bytes of INIT_PARAMS before the tensor."""
    return _pack(m.INIT_HEAD, Msg.INIT_PARAMS, fragment)


def push_head(push: m.Push) -> bytes:
    """Payload bytes of PUSH_FRAGMENT before the delta; `push.delta` is not looked at."""
    if push.attempt < 1 or push.c_steps < 1:
        raise LocalProtocolError(
            f"PUSH_FRAGMENT round_attempt and c_steps must be positive, got {push.attempt} and "
            f"{push.c_steps}"
        )
    return _pack(m.PUSH_HEAD, Msg.PUSH_FRAGMENT, *push[:-1])


def bcast_head(fragment: int, version: int) -> bytes:
    """Payload bytes of BCAST_FRAGMENT before the tensor."""
    return _pack(m.VERSIONED_HEAD, Msg.BCAST_FRAGMENT, fragment, version)


def change_head(fragment: int, base: int, version: int) -> bytes:
    """Payload bytes of BCAST_CHANGE before the delta."""
    return _pack(m.CHANGE_HEAD, Msg.BCAST_CHANGE, fragment, base, version)


def final_head(fragment: int, version: int) -> bytes:
    """Payload bytes of FINAL_FRAGMENT before the tensor."""
    return _pack(m.VERSIONED_HEAD, Msg.FINAL_FRAGMENT, fragment, version)


def bare_message(msg_type: int, head: bytes, body: Buffer) -> list[bytes | memoryview]:
    """[header and head, body] of one bare frame, for a gathering send; `body` is not copied.

    The syncer takes bulk messages so (wire 8.4), but nothing here sends them: other learners do.
    """
    view = _byte_view(body)
    return [frame_header(msg_type, len(head) + len(view)) + head, view]


def piece_bytes(total: int, streams: int) -> int:
    """Where an inner frame is cut, so that each of so many sockets gets a part of it (wire 19.14).

    Of whole messages, one on each socket, all arrive when the last one does: over 100 Mb/s, with
    four in flight, a sync took 1.59 s so and takes 1.43 s (bound: 1.34 s).
    """
    return min(CHUNK_SIZE, max(STRIPE_BYTES_MIN, -(-total // streams)))


def chunk_count(head_bytes: int, body_bytes: int, streams: int = 1) -> int:
    """CHUNK frames of a message whose payload is a head and a body of these sizes."""
    total = HEADER_BYTES + head_bytes + body_bytes
    return -(-total // piece_bytes(total, streams))


def chunk_message(
    inner_type: int, inner_head: bytes, body: Buffer, msg_id: int, streams: int = 1
) -> list[list[bytes | memoryview]]:
    """The CHUNK frames of one message, each a gather list of a header and a view of `body`.

    `body` is anything with a contiguous buffer; it must not change until the last list is sent.
    The inner frame (its 13-byte header included) is cut at multiples of CHUNK_SIZE (wire 8.1), or
    for more than one stream at those of `piece_bytes`.
    """
    view = _byte_view(body)
    lead = frame_header(inner_type, len(inner_head) + len(view)) + inner_head
    total = len(lead) + len(view)
    size = piece_bytes(total, streams)
    if total <= size:  # as of many small ones, for many peers
        header = CHUNK_HEADER.pack(MAGIC, Msg.CHUNK, CHUNK_HEAD.size + total, msg_id, total, 0)
        return [[header + lead, view]]
    frames: list[list[bytes | memoryview]] = []
    for offset in range(0, total, size):
        end = min(offset + size, total)
        header = CHUNK_HEADER.pack(
            MAGIC, Msg.CHUNK, CHUNK_HEAD.size + end - offset, msg_id, total, offset
        )
        piece = view[max(offset - len(lead), 0) : max(end - len(lead), 0)]
        frames.append([header + lead[offset:end], piece])
    return frames


def _byte_view(body: Buffer) -> memoryview:
    """`body` as unsigned bytes; a zero-size array keeps its shape and cannot be cast, so empty."""
    view = memoryview(body)
    return view.cast("B") if view.nbytes else memoryview(b"")
