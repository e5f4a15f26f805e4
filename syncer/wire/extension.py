"""The block behind a HELLO by which a learner introduces itself: records of client, held, names,
role, run, changes and fates.

Only how the block is written and read; must not compare it with a session or a run. A peer that
knows nothing of it never sees one: a learner sends it first, and a syncer answers it alone.
"""

from __future__ import annotations

import unicodedata
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from syncer.errors import LocalProtocolError, RemoteProtocolError
from syncer.layout import Layout
from syncer.protocol import (
    DTYPE_BF16,
    DTYPE_F32,
    EXTENSION_BYTES_MAX,
    EXTENSION_MAGIC,
    EXTENSION_REVISION,
    HASH_BYTES,
    RUN_NAME_RULE,
)
from syncer.wire.contracts import is_run_name, run_contract
from syncer.wire.cursor import RECORD_HEAD, Cursor, read_records
from syncer.wire.layout import LayoutBytes
from syncer.wire.names import Names, encode_names, fingerprint, parse_names

HELD = Struct("<QQ")
"""instance, version."""
NOT_HELD = (0, 2**64 - 1)
CLIENT_BYTES_MAX = 256
SMALL_BYTES_MAX = 64 * 1024
"""Of everything but the names, beside 16 bytes for each fragment."""
CHANGES_MAX = 16
BLOCK_END_BYTES = 4 + len(EXTENSION_MAGIC)


class Tag(IntEnum):
    """The records of revision 1; others are skipped."""

    CLIENT = 1
    HELD = 2
    NAMES = 3
    ROLE = 4
    RUN = 5
    CHANGES = 6
    FATES = 7


class Role(IntEnum):
    """What somebody who says HELLO is here for."""

    LEARNER = 0
    READER = 1
    FOLLOWER = 2
    """A reader that goes on with every cut."""


class Held(NamedTuple):
    """The newest broadcast of a fragment that a learner has bit for bit."""

    instance: int
    """The server process that sent it."""
    version: int


class RunClaim(NamedTuple):
    """The run that a HELLO is meant for."""

    base: bytes
    """The contract of the session without a name, 32 bytes."""
    name: str


class Extension(NamedTuple):
    """A block; a record that is None was not sent."""

    client: str | None = None
    """Library, version and host, for people."""
    held: tuple[Held | None, ...] | None = None
    names: Names | None = None
    """Learner 0's; those of others are not read."""
    role: Role = Role.LEARNER
    run: RunClaim | None = None
    changes: tuple[int, ...] = ()
    """Dtypes of BCAST_CHANGE that are understood; those that nobody knows yet are kept."""
    fates: bool = False
    """Whether a PUSH_FATE is asked for of every push."""


class InvalidExtension(RemoteProtocolError):
    """A block that breaks its rules; the text is what is behind `invalid HELLO extension: `."""


class Sender(NamedTuple):
    """What the body of a HELLO says that its block must fit."""

    learner: int
    dtype: int
    layout: LayoutBytes
    fingerprint: bytes
    contract: bytes


def encode_extension(extension: Extension) -> bytes:
    """The block with its length and magic, to be put behind the body of a HELLO.

    Raises LocalProtocolError for one that every syncer would refuse.
    """
    parts = [EXTENSION_REVISION.to_bytes(2, "little")]

    def record(tag: Tag, data: bytes) -> None:
        parts.append(RECORD_HEAD.pack(tag, len(data)) + data)

    if extension.client is not None:
        text = extension.client.encode("utf-8", "replace")
        if len(text) > CLIENT_BYTES_MAX or not _is_printable(extension.client):
            raise LocalProtocolError(
                f"HELLO cannot be sent: client must be at most {CLIENT_BYTES_MAX} bytes without "
                "control characters")
        record(Tag.CLIENT, text)
    if extension.held is not None:
        record(Tag.HELD, b"".join(HELD.pack(*(held or NOT_HELD)) for held in extension.held))
    if extension.names is not None:
        record(Tag.NAMES, encode_names(extension.names))
    if extension.role is not Role.LEARNER:
        record(Tag.ROLE, bytes([extension.role]))
    if extension.run is not None:
        if not is_run_name(extension.run.name):
            raise LocalProtocolError(
                f"HELLO cannot be sent: run is {extension.run.name!r}, expected {RUN_NAME_RULE}")
        record(Tag.RUN, extension.run.base + extension.run.name.encode("ascii"))
    if extension.changes:
        record(Tag.CHANGES, bytes(extension.changes))
    if extension.fates:
        record(Tag.FATES, b"")
    block = b"".join(parts)
    if len(block) > EXTENSION_BYTES_MAX:
        raise LocalProtocolError(
            f"HELLO cannot be sent: its extension has {len(block)} bytes, at most "
            f"{EXTENSION_BYTES_MAX} are allowed; send it without names")
    return block + len(block).to_bytes(4, "little") + EXTENSION_MAGIC


def split_extension(rest: memoryview) -> tuple[memoryview, memoryview]:
    """(what is in front of the block, the block) of what follows the contract in a HELLO.

    For bytes that end in the magic and cannot be read without it. Raises InvalidExtension.
    """
    size = int.from_bytes(rest[-BLOCK_END_BYTES:-len(EXTENSION_MAGIC)], "little")
    front = len(rest) - BLOCK_END_BYTES - size
    if len(rest) < BLOCK_END_BYTES or not 2 <= size <= EXTENSION_BYTES_MAX or front < 2:
        raise InvalidExtension(f"its length is {size} where {len(rest)} bytes follow the contract, "
                               f"expected 2 to {EXTENSION_BYTES_MAX} with 2 bytes in front")
    return rest[:front], rest[front : front + size]


def parse_extension(block: memoryview, sender: Sender) -> Extension:
    """A block that fits its HELLO. Raises InvalidExtension."""
    revision = int.from_bytes(block[:2], "little")
    if revision == 0:
        raise InvalidExtension("revision 0, expected 1 or later")
    records = _records(block[2:])
    small = len(block)
    if Tag.NAMES in records:
        small -= RECORD_HEAD.size + len(records[Tag.NAMES])
    limit = SMALL_BYTES_MAX + HELD.size * sender.layout.fragments
    if small > limit:
        raise InvalidExtension(f"{small} bytes without the names, expected at most {limit}")
    role = _role(records.get(Tag.ROLE), sender)
    return Extension(_client(records.get(Tag.CLIENT)), _held(records.get(Tag.HELD), sender),
                     _names(records.get(Tag.NAMES), role, sender), role,
                     _run(records.get(Tag.RUN), role, sender), _changes(records.get(Tag.CHANGES)),
                     _fates(records.get(Tag.FATES)))


def _records(data: memoryview) -> dict[int, memoryview]:
    try:
        return read_records(Cursor(data))
    except RemoteProtocolError as error:
        raise InvalidExtension(str(error)) from None


def _client(data: memoryview | None) -> str | None:
    if data is None:
        return None
    try:
        text = str(data, "utf-8")
    except UnicodeDecodeError:
        raise InvalidExtension("client is not UTF-8") from None
    if len(data) > CLIENT_BYTES_MAX or not _is_printable(text):
        raise InvalidExtension(f"client has {len(data)} bytes or a control character, expected at "
                               f"most {CLIENT_BYTES_MAX} without")
    return text


def _is_printable(text: str) -> bool:
    return not any(unicodedata.category(character) in ("Cc", "Zl", "Zp") for character in text)


def _held(data: memoryview | None, sender: Sender) -> tuple[Held | None, ...] | None:
    if data is None:
        return None
    expected = HELD.size * sender.layout.fragments
    if len(data) != expected:
        raise InvalidExtension(f"held has {len(data)} bytes, expected {expected} for "
                               f"{sender.layout.fragments} fragments")
    return tuple(None if pair == NOT_HELD else Held(*pair) for pair in HELD.iter_unpack(data))


def _names(data: memoryview | None, role: Role, sender: Sender) -> Names | None:
    if data is None or role is not Role.LEARNER or sender.learner != 0:
        return None
    layout = sender.layout.read()
    try:
        names = parse_names(data, layout)
    except RemoteProtocolError as error:
        raise InvalidExtension(str(error)) from None
    if fingerprint(layout, names) != sender.fingerprint:
        raise InvalidExtension("the names do not have the fingerprint of this HELLO")
    return names


def _role(data: memoryview | None, sender: Sender) -> Role:
    if data is None:
        return Role.LEARNER
    if len(data) != 1 or data[0] > max(Role):
        raise InvalidExtension(f"role is {bytes(data[:8]).hex()}, expected one byte of 0 to "
                               f"{max(Role):d}")
    role = Role(data[0])
    if role is not Role.LEARNER and sender.dtype not in (DTYPE_F32, DTYPE_BF16):
        raise InvalidExtension("a reader takes f32 (1) or bf16 (2) only")
    return role


def _run(data: memoryview | None, role: Role, sender: Sender) -> RunClaim | None:
    if data is None:
        return None
    base = bytes(data[:HASH_BYTES])
    name = bytes(data[HASH_BYTES:]).decode("ascii", "replace")
    if len(base) != HASH_BYTES or not is_run_name(name):
        raise InvalidExtension(f"run has {len(data)} bytes, expected {HASH_BYTES} of its base and "
                               f"a name of {RUN_NAME_RULE}")
    if role is Role.LEARNER and run_contract(base, name) != sender.contract:
        raise InvalidExtension(f"the contract of this HELLO is not that of the run {name} over its "
                               "base")
    return RunClaim(base, name)


def _changes(data: memoryview | None) -> tuple[int, ...]:
    if data is None:
        return ()
    if not 1 <= len(data) <= CHANGES_MAX:
        raise InvalidExtension(f"changes has {len(data)} bytes, expected 1 to {CHANGES_MAX}, one "
                               "for each dtype")
    return tuple(data)


def _fates(data: memoryview | None) -> bool:
    if data is not None and len(data):
        raise InvalidExtension(f"fates has {len(data)} bytes, expected none")
    return data is not None


def layout_names(data: memoryview, layout: Layout) -> Names | None:
    """Of a LAYOUT: its names record with tag and length, or nothing."""
    if not data:
        return None
    records = _records(data)
    if set(records) != {Tag.NAMES}:
        raise InvalidExtension(f"records {sorted(records)}, expected names ({Tag.NAMES:d}) alone")
    return parse_names(records[Tag.NAMES], layout)


def names_record(names: Names) -> bytes:
    """The names record with tag and length."""
    data = encode_names(names)
    return RECORD_HEAD.pack(Tag.NAMES, len(data)) + data
