"""The tables of docs/protocol.md, made from the structs and limits that the parsers use.

Must not be imported by anything that runs a connection.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

from syncer import protocol
from syncer.layout import RDA, FragmentLayout, Layout
from syncer.protocol import CHUNK_HEAD, DTYPE_F32, Msg
from syncer.wire import extended, messages
from syncer.wire.hello import HELLO_HEAD
from syncer.wire.limits import Limits

TYPES = {"B": "u8", "H": "u16", "I": "u32", "Q": "u64", "d": "f64"}
UP, DOWN, BOTH = "learner → syncer", "syncer → learner", "both ways"
ON_CONTROL, ON_ANY = "control socket", "any socket, bare or in CHUNKs"
ON_EXTENDED = "extended control socket"


class Row(NamedTuple):
    """One message: where it goes, its fixed fields by struct and names, and what follows them."""

    direction: str
    carried: str
    struct: Struct | None = None
    fields: tuple[str, ...] = ()
    rest: str = ""


ROWS = {
    Msg.HELLO: Row(
        UP,
        "first frame of the control socket",
        HELLO_HEAD,
        ("version", "learner", "generation", "dtype", "fragments"),
        "layout and identity, see HELLO",
    ),
    Msg.INIT_PARAMS: Row(UP, ON_ANY, messages.INIT_HEAD, ("fragment",), "tensor in the bulk dtype"),
    Msg.PULL_REQ: Row(DOWN, ON_CONTROL, messages.PULL, messages.Pull._fields),
    Msg.PUSH_FRAGMENT: Row(
        UP, ON_ANY, messages.PUSH_HEAD, messages.Push._fields[:-1], "delta in the session dtype"
    ),
    Msg.BCAST_FRAGMENT: Row(
        DOWN,
        ON_ANY,
        messages.VERSIONED_HEAD,
        messages.Bcast._fields[:-1],
        "tensor in the bulk dtype",
    ),
    Msg.HEARTBEAT: Row(UP, ON_CONTROL, messages.HEARTBEAT, messages.Heartbeat._fields),
    Msg.SHUTDOWN: Row(DOWN, ON_CONTROL),
    Msg.DATA_HELLO: Row(
        UP,
        "first frame of a data socket",
        messages.DATA_HELLO,
        ("version", *messages.DataHello._fields[:-1]),
        "a MAC where 19.10 asks for it",
    ),
    Msg.CHUNK: Row(
        BOTH, "any socket", CHUNK_HEAD, ("msg_id", "total", "offset"), "1 byte to 4 MiB of a frame"
    ),
    Msg.ERROR: Row(DOWN, "control socket, or the one refused", rest="UTF-8 text"),
    Msg.FINAL_MANIFEST: Row(
        DOWN,
        ON_CONTROL,
        messages.MANIFEST_HEAD,
        ("revision", "step", "fragments"),
        "u64 version of each fragment",
    ),
    Msg.FINAL_ACK: Row(
        UP, ON_CONTROL, messages.FINAL_ACK, ("revision", *messages.FinalAck._fields)
    ),
    Msg.FINAL_FRAGMENT: Row(
        DOWN,
        ON_ANY,
        messages.VERSIONED_HEAD,
        messages.FinalFragment._fields[:-1],
        "tensor, always f32",
    ),
    Msg.BUDGET_DONE: Row(UP, ON_CONTROL, messages.BUDGET_DONE, messages.BudgetDone._fields),
    Msg.WELCOME: Row(
        DOWN,
        "first frame of an extended control socket",
        extended.WELCOME_HEAD,
        ("revision", *extended.Welcome._fields[:8]),
        "texts, renumbered and kept, see WELCOME",
    ),
    Msg.NOTICE: Row(DOWN, ON_EXTENDED, extended.NOTICE_HEAD, ("code",), "UTF-8 text"),
    Msg.REPORT: Row(UP, ON_EXTENDED, extended.REPORT_HEAD, ("revision",), "records of f64"),
    Msg.LAYOUT: Row(
        DOWN,
        "control socket of a reader",
        extended.LAYOUT_HEAD,
        ("revision", "dtype", "fragments"),
        "layout, fingerprint, contract, names",
    ),
    Msg.BCAST_CHANGE: Row(
        DOWN,
        ON_ANY,
        messages.CHANGE_HEAD,
        messages.BcastChange._fields[:-1],
        "delta in q4",
    ),
    Msg.PUSH_FATE: Row(DOWN, ON_EXTENDED, extended.FATE, extended.Fate._fields),
}


def messages_table() -> str:
    """Markdown table of all messages with their payload and its limit."""
    lines = [
        "| type | message | direction | carried | payload | limit, bytes |",
        "|---:|---|---|---|---|---|",
    ]
    for msg_type, row in ROWS.items():
        payload = ", ".join([*_fields(row), *([row.rest] if row.rest else [])]) or "empty"
        lines.append(
            f"| {msg_type.value} | {msg_type.name} | {row.direction} | {row.carried} | {payload} | "
            f"{_limit(msg_type, row)} |"
        )
    return "\n".join(lines) + "\n"


def _fields(row: Row) -> list[str]:
    """`name u32` for each fixed field, in wire order."""
    if row.struct is None:
        return []
    codes = row.struct.format.lstrip("<")
    return [f"{name} {TYPES[code]}" for name, code in zip(row.fields, codes, strict=True)]


def _limit(msg_type: Msg, row: Row) -> str:
    """Largest payload: a number, or what it grows with, found by comparing three layouts."""

    def limit(fragments: int, numel: int) -> int:
        layout = Layout((FragmentLayout(RDA, (numel,)),) * fragments)
        sides = [
            Limits.first_frame(),
            Limits.for_server(layout, DTYPE_F32, extended=True),
            Limits.for_client(layout, DTYPE_F32, extended=True, changes=True, fates=True),
            Limits.for_new_reader(),
        ]
        return max(side.frame_bytes_max.get(msg_type, -1) for side in sides)

    fixed = 0 if row.struct is None else row.struct.size
    small = limit(1, 1)
    if limit(2, 1) != small:
        each = limit(2, 1) - small
        return f"{small - each} + {each} × fragments"
    if limit(1, 257) != small:  # more than one block of q4
        return f"{fixed} + the largest fragment"
    return f"{small:,}".replace(",", " ")


def constants_table() -> str:
    """Markdown table of the numbers of the protocol."""
    rows = [
        ("frame magic", f"0x{protocol.MAGIC:08X}, on the wire `{protocol.MAGIC_BYTES.hex(' ')}`"),
        ("protocol version", protocol.PROTOCOL_VERSION),
        ("finalization revision", protocol.FINALIZATION_REVISION),
        ("session dtypes", ", ".join(f"{n} {name}" for n, name in protocol.DTYPES.items())),
        ("inner bytes per CHUNK", f"{protocol.CHUNK_SIZE:,}".replace(",", " ")),
        ("open chunked messages per group", protocol.PARTIAL_MESSAGES_MAX),
        ("their declared bytes", "2 GiB, or four of the largest message if that is more"),
        ("data streams", f"0 to {protocol.STREAMS_MAX}"),
        ("compat group", f"1 to {protocol.COMPAT_GROUP_BYTES_MAX} bytes of UTF-8"),
        (
            "q4 block",
            f"{protocol.Q4_BLOCK} values in {protocol.Q4_BLOCK_BYTES} bytes",
        ),
    ]
    lines = ["| constant | value |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {value} |" for name, value in rows)]) + "\n"
