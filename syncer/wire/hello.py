"""HELLO: the first frame of a control socket, read step by step with the refusals of each step.

Must not compare with a session (identity.py does) or know a socket. The MAC comes first
(rule 14.1), since whoever has no key should learn nothing from the other refusals; then the fields
in their order (rule 14.2). The layout stays bytes until somebody wants it: whoever is refused costs
no objects, and who belongs to a session has its layout.
"""

from __future__ import annotations

import hmac
from struct import Struct
from typing import NamedTuple

from syncer.errors import LocalProtocolError, RemoteProtocolError
from syncer.layout import Layout
from syncer.protocol import (
    COMPAT_GROUP_BYTES_MAX,
    COMPAT_MAGIC,
    DATA_MAC_DOMAIN,
    DTYPES,
    EXTENSION_MAGIC,
    HASH_BYTES,
    HELLO_MAC_DOMAIN,
    PROTOCOL_VERSION,
    STREAMS_MAX,
)
from syncer.wire.cursor import Cursor
from syncer.wire.extension import (
    Extension,
    InvalidExtension,
    Role,
    Sender,
    parse_extension,
    split_extension,
)
from syncer.wire.layout import LayoutBytes, scan_layout
from syncer.wire.limits import Limits
from syncer.wire.messages import DATA_HELLO, Bytes, DataHello

HELLO_HEAD = Struct("<HIQBI")
"""version, learner_id, generation, dtype, num_fragments."""
TRAILER_HEAD_BYTES = 8
"""Magic and length in front of the compat group."""


class Hello(NamedTuple):
    """What a learner says about itself; everything after `generation` belongs to the session."""

    learner: int
    generation: int
    dtype: int
    layout: Layout
    fingerprint: bytes
    contract: bytes
    profile_hash: bytes | None = None
    num_streams: int = 0
    compat_group: str | None = None
    extension: Extension | None = None
    """None of one that speaks protocol 4 alone."""


class Claim(NamedTuple):
    """A HELLO that is whole and within its limits; like `Hello`, but for its layout."""

    learner: int
    generation: int
    dtype: int
    layout: LayoutBytes
    fingerprint: bytes
    contract: bytes
    profile_hash: bytes | None
    num_streams: int
    compat_group: str | None
    extension: Extension | None = None

    def hello(self, layout: Layout) -> Hello:
        """With its layout as an object: one that was read from it, or that equals it."""
        return Hello(*self._replace(layout=layout))  # type: ignore[arg-type]


def hello_mac(key: bytes, body: Bytes) -> bytes:
    """HMAC-SHA256 over the domain and the HELLO body."""
    return _mac(key, HELLO_MAC_DOMAIN, body)


def data_mac(key: bytes, body: Bytes) -> bytes:
    """HMAC-SHA256 over the domain and the 16 bytes of a DATA_HELLO."""
    return _mac(key, DATA_MAC_DOMAIN, body)


def is_proved(hello: DataHello, key: bytes) -> bool:
    """Whether a DATA_HELLO has the MAC of a group that has introduced itself."""
    body = DATA_HELLO.pack(PROTOCOL_VERSION, *hello[:3])
    return hmac.compare_digest(data_mac(key, body), hello.proof)


def _mac(key: bytes, domain: bytes, body: Bytes) -> bytes:
    mac = hmac.new(key, domain, "sha256")
    mac.update(body)
    return mac.digest()


def read_hello(payload: Bytes, *, key: bytes | None, learners: int) -> Claim:
    """Checks a HELLO payload in the order of wire 4.2 to 4.9, from its MAC to its limits.

    `key` is the island key, None when none is configured; `learners` is the size of the roster.
    What takes long of a large one is done without the GIL. Raises RemoteProtocolError with exactly
    the text that the ERROR frame carries.
    """
    body = memoryview(payload)
    if key is not None:
        body = _authenticated_body(body, key)
    try:
        return _read_body(Cursor(body), learners)
    except InvalidExtension as error:
        raise RemoteProtocolError(f"invalid HELLO extension: {error}") from None
    except RemoteProtocolError as error:
        raise RemoteProtocolError(f"invalid HELLO: {error}") from None


def parse_hello(payload: Bytes, *, key: bytes | None, learners: int) -> Hello:
    """`read_hello`, with the layout as an object."""
    claim = read_hello(payload, key=key, learners=learners)
    return claim.hello(claim.layout.read())


def carries(payload: Bytes, layout: LayoutBytes) -> bool:
    """Whether a HELLO payload has this layout where its own should be; only that is looked at."""
    return layout.begins(memoryview(payload)[HELLO_HEAD.size :])


# rule 14.1
def _authenticated_body(payload: memoryview, key: bytes) -> memoryview:
    if len(payload) < HASH_BYTES:
        raise RemoteProtocolError(
            f"HELLO authentication failed: {len(payload)} bytes cannot hold a "
            f"{HASH_BYTES}-byte MAC; give the learner the island key"
        )
    body, mac = payload[:-HASH_BYTES], payload[-HASH_BYTES:]
    if not hmac.compare_digest(hello_mac(key, body), mac):
        raise RemoteProtocolError(
            "HELLO authentication failed: the MAC does not fit the island key of this syncer"
        )
    return body


# rule 14.2
def _read_body(cursor: Cursor, learners: int) -> Claim:
    version = cursor.number(2)
    if version != PROTOCOL_VERSION:
        raise RemoteProtocolError(
            f"protocol version mismatch: learner speaks {version}, "
            f"this syncer speaks {PROTOCOL_VERSION}"
        )
    learner = cursor.number(4)
    # Who may be a reader has any id; whether it is one stands in the block.
    if bytes(cursor.data[-len(EXTENSION_MAGIC) :]) != EXTENSION_MAGIC:
        _check_range(learner, learners)
    generation = cursor.number(8)
    if generation == 0:
        raise RemoteProtocolError("generation must be nonzero")
    dtype = cursor.number(1)
    if dtype not in DTYPES:
        raise RemoteProtocolError(f"unknown dtype {dtype}, expected 1 (f32), 2 (bf16) or 3 (q4)")
    layout = _read_layout(cursor)
    fingerprint, contract = bytes(cursor.take(HASH_BYTES)), bytes(cursor.take(HASH_BYTES))
    sender = Sender(learner, dtype, layout, fingerprint, contract)
    (profile_hash, num_streams, compat_group), extension = _read_rest(cursor, sender)
    if extension is None or extension.role is Role.LEARNER:
        _check_range(learner, learners)
    elif num_streams:
        raise InvalidExtension(f"a reader has no data sockets, found {num_streams} streams")
    try:
        Limits.for_server(layout, dtype)
    except LocalProtocolError as error:
        raise RemoteProtocolError(str(error)) from None
    return Claim(
        learner,
        generation,
        dtype,
        layout,
        fingerprint,
        contract,
        profile_hash,
        num_streams,
        compat_group,
        extension,
    )


def _check_range(learner: int, learners: int) -> None:
    if learner >= learners:
        raise RemoteProtocolError(
            f"learner_id {learner} is outside configured range 0..{learners - 1}"
        )


def _read_layout(cursor: Cursor) -> LayoutBytes:
    fragments = cursor.number(4)
    if fragments == 0:
        raise RemoteProtocolError("layout must contain at least one fragment")
    layout = scan_layout(cursor.data, cursor.at, fragments)
    cursor.at += len(layout)
    return layout


def _read_rest(cursor: Cursor, sender: Sender) -> tuple[_Tail, Extension | None]:
    """What follows the contract: as protocol 4 has it (wire 4.8), or with a block (wire 19.2)."""
    rest = cursor.data[cursor.at :]
    try:
        return _parse_tail(rest), None
    except RemoteProtocolError:
        if bytes(rest[-len(EXTENSION_MAGIC) :]) != EXTENSION_MAGIC:
            raise
    front, block = split_extension(rest)
    return _parse_tail(front), parse_extension(block, sender)


class _Tail(NamedTuple):
    profile_hash: bytes | None
    num_streams: int
    compat_group: str | None


def _parse_tail(rest: memoryview) -> _Tail:
    """[profile hash], num_streams, [compat group]; the length tells which are there (wire 4.8)."""
    cursor = Cursor(rest)
    trailer = _trailer_bytes(rest)
    extra = len(rest) - trailer
    if extra not in (2, 2 + HASH_BYTES):
        raise RemoteProtocolError(
            f"invalid HELLO profile extension length: {extra} bytes after the contract, "
            f"expected 2 or {2 + HASH_BYTES}"
        )
    profile_hash = bytes(cursor.take(HASH_BYTES)) if extra > 2 else None
    num_streams = cursor.number(2)
    compat_group = None
    if trailer:
        cursor.take(TRAILER_HEAD_BYTES)
        try:
            compat_group = str(cursor.take(trailer - TRAILER_HEAD_BYTES), "utf-8")
        except UnicodeDecodeError:
            raise RemoteProtocolError("compat group is not UTF-8") from None
    if num_streams > STREAMS_MAX:
        raise RemoteProtocolError(f"num_streams {num_streams} exceeds limit {STREAMS_MAX}")
    return _Tail(profile_hash, num_streams, compat_group)


def _trailer_bytes(rest: memoryview) -> int:
    """Length of the compat trailer, magic included; 0 if there is none."""
    for base in (2, 2 + HASH_BYTES):
        head = bytes(rest[base : base + TRAILER_HEAD_BYTES])
        if len(head) == TRAILER_HEAD_BYTES and head.startswith(COMPAT_MAGIC):
            size = int.from_bytes(head[4:], "little")
            trailer = TRAILER_HEAD_BYTES + size
            if 1 <= size <= COMPAT_GROUP_BYTES_MAX and len(rest) == base + trailer:
                return trailer
    return 0
