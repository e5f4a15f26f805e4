"""WELCOME, NOTICE, REPORT, LAYOUT, PUSH_FATE: what peers say that have introduced themselves.

Values, their parsers and their frames; must not decide when one is sent. A `RemoteProtocolError`
raised here carries exactly the text of the ERROR frame that answers it.
"""

from __future__ import annotations

import math
from struct import Struct
from typing import NamedTuple

from syncer.errors import LocalProtocolError, RemoteProtocolError
from syncer.layout import Layout
from syncer.protocol import (
    DTYPES,
    EXTENSION_REVISION,
    HASH_BYTES,
    NOTICE_TEXT_BYTES_MAX,
    WELCOME_BYTES_MAX,
    WELCOME_WITH_CHANGES,
    Msg,
    RunState,
)
from syncer.wire.cursor import RECORD_HEAD, Cursor, read_records
from syncer.wire.encode import encode_layout, frame
from syncer.wire.extension import layout_names, names_record
from syncer.wire.layout import LayoutBytes, scan_layout
from syncer.wire.messages import Bytes, foreign_text
from syncer.wire.names import Names

WELCOME_HEAD = Struct("<HQQQQIIdB")
NOTICE_HEAD = Struct("<H")
REPORT_HEAD = Struct("<H")
LAYOUT_HEAD = Struct("<HBI")
TEXT_LENGTH = Struct("<H")
RENUMBERED = Struct("<QI")
"""renumbered, number of fragments."""
F64 = Struct("<d")
FATE = Struct("<IQIB")


class Welcome(NamedTuple):
    """What a syncer says of itself and its run, first of all, to whom it has admitted."""

    epoch: int
    instance: int
    """Of this server process."""
    global_step: int
    total_steps: int
    """With all that was renumbered."""
    learners: int
    quorum: int
    """0: by capacity."""
    sync_interval: float
    """Local steps between two rounds of a fragment."""
    state: RunState
    version: str
    """Of the server's program, for people."""
    run: str = ""
    """Name of the run; empty: it has none."""
    renumbered: int = 0
    kept: tuple[bool, ...] = ()
    """Per fragment, whether what the learner holds of it is current; empty to a reader."""
    changes: int = 0
    """Dtype in which broadcasts may come as changes of those before; 0: they come whole."""


class NoticeText(NamedTuple):
    """What this learner or its run waits for, until when, and what can be done."""

    code: int
    text: str


class LearnerReport(NamedTuple):
    """How training goes on a learner, for people; None was not sent."""

    loss: float | None = None
    tokens_per_s: float | None = None
    lr: float | None = None
    goodput: float | None = None
    """Share of wall time in optimizer steps."""


class Fate(NamedTuple):
    """What became of the answer to a `Pull`, for a learner that has asked."""

    fragment: int
    step: int
    attempt: int
    fate: int
    """A `PushFate`, or one that a later revision has; only `MERGED` is a merge."""


class SessionLayout(NamedTuple):
    """What a reader must know to take broadcasts."""

    dtype: int
    """Of the session; broadcasts come in the dtype that the reader asked for."""
    layout: Layout
    fingerprint: bytes
    contract: bytes
    names: Names | None = None


# --- WELCOME -------------------------------------------------------------------------------------


def encode_welcome(welcome: Welcome) -> bytes:
    """WELCOME frame. Raises LocalProtocolError for texts that do not fit."""
    revision = WELCOME_WITH_CHANGES if welcome.changes else EXTENSION_REVISION
    head = WELCOME_HEAD.pack(revision, *welcome[:8])
    texts = [text.encode("utf-8", "replace") for text in (welcome.version, welcome.run)]
    payload = b"".join([head, *(TEXT_LENGTH.pack(len(text)) + text for text in texts),
                        RENUMBERED.pack(welcome.renumbered, len(welcome.kept)),
                        bytes(welcome.kept), bytes([welcome.changes] * bool(welcome.changes))])
    if len(payload) > WELCOME_BYTES_MAX + len(welcome.kept):
        raise LocalProtocolError(f"WELCOME of {len(payload)} bytes, at most {WELCOME_BYTES_MAX} "
                                 "and one for each fragment are allowed")
    return frame(Msg.WELCOME, payload)


def parse_welcome(payload: Bytes, fragments: int) -> Welcome:
    """WELCOME to somebody with this many fragments; 0 for a reader, which has none yet.

    What a later revision appends is not looked at.
    """
    cursor = Cursor(memoryview(payload), "WELCOME payload")

    def text() -> str:
        return foreign_text(cursor.take(cursor.number(TEXT_LENGTH.size)))

    revision, epoch, instance, step, total, learners, quorum, interval, state = (
        WELCOME_HEAD.unpack(cursor.take(WELCOME_HEAD.size)))
    if revision == 0 or instance == 0 or epoch == 0:
        raise RemoteProtocolError(f"WELCOME has revision {revision}, epoch {epoch} and instance "
                                  f"{instance}, expected numbers above 0")
    if state > max(RunState):
        raise RemoteProtocolError(f"WELCOME has state {state}, expected 0 to {max(RunState):d}")
    version, run = text(), text()
    renumbered, count = RENUMBERED.unpack(cursor.take(RENUMBERED.size))
    if count != fragments:
        raise RemoteProtocolError(f"WELCOME has {count} fragments, expected {fragments}")
    kept = cursor.take(count)
    changes = cursor.number(1) if revision >= WELCOME_WITH_CHANGES else 0
    if revision <= WELCOME_WITH_CHANGES and cursor.remaining:
        raise RemoteProtocolError(f"WELCOME payload has {len(payload)} bytes, expected {cursor.at}")
    return Welcome(epoch, instance, step, total, learners, quorum, interval, RunState(state),
                   version, run, renumbered, tuple(byte != 0 for byte in kept), changes)


# --- NOTICE --------------------------------------------------------------------------------------


def encode_notice(notice: NoticeText) -> bytes:
    """NOTICE frame; a text over the limit is cut at a character."""
    text = notice.text.encode("utf-8", "replace")
    if len(text) > NOTICE_TEXT_BYTES_MAX:
        text = text[:NOTICE_TEXT_BYTES_MAX].decode("utf-8", "ignore").encode("utf-8")
    return frame(Msg.NOTICE, NOTICE_HEAD.pack(notice.code) + text)


def parse_notice(payload: Bytes) -> NoticeText:
    """NOTICE; a code that is not known is kept."""
    if len(payload) < NOTICE_HEAD.size:
        raise RemoteProtocolError(f"NOTICE payload truncated: {len(payload)} bytes, expected at "
                                  f"least {NOTICE_HEAD.size}")
    (code,) = NOTICE_HEAD.unpack_from(payload)
    return NoticeText(code, foreign_text(payload[NOTICE_HEAD.size :]))


# --- REPORT --------------------------------------------------------------------------------------


def encode_report(report: LearnerReport) -> bytes:
    """REPORT frame with the figures that are there."""
    records = [RECORD_HEAD.pack(tag, F64.size) + F64.pack(value)
               for tag, value in enumerate(report, 1) if value is not None]
    return frame(Msg.REPORT, REPORT_HEAD.pack(EXTENSION_REVISION) + b"".join(records))


def parse_report(payload: Bytes) -> LearnerReport:
    """REPORT; a figure that is not finite is as one that was not sent. Every refusal starts
    `invalid REPORT: `."""
    try:
        cursor = Cursor(memoryview(payload))
        if cursor.number(REPORT_HEAD.size) == 0:
            raise RemoteProtocolError("revision 0, expected 1 or later")
        records = read_records(cursor)
        return LearnerReport(*(_figure(tag, records.get(tag))
                               for tag in range(1, 1 + len(LearnerReport._fields))))
    except RemoteProtocolError as error:
        raise RemoteProtocolError(f"invalid REPORT: {error}") from None


def _figure(tag: int, data: memoryview | None) -> float | None:
    if data is None:
        return None
    if len(data) != F64.size:
        raise RemoteProtocolError(f"record {tag} has {len(data)} bytes, expected {F64.size}")
    (value,) = F64.unpack(data)
    return value if math.isfinite(value) else None


# --- LAYOUT --------------------------------------------------------------------------------------


def encode_session_layout(session: SessionLayout) -> bytes:
    """LAYOUT frame."""
    payload = b"".join([
        LAYOUT_HEAD.pack(EXTENSION_REVISION, session.dtype, len(session.layout.fragments)),
        encode_layout(session.layout), session.fingerprint, session.contract,
        b"" if session.names is None else names_record(session.names)])
    return frame(Msg.LAYOUT, payload)


def parse_session_layout(payload: Bytes) -> SessionLayout:
    """LAYOUT, with its names when they are there. Raises RemoteProtocolError."""
    data = memoryview(payload)
    if len(data) < LAYOUT_HEAD.size:
        raise RemoteProtocolError(f"LAYOUT payload truncated: {len(data)} bytes, expected at least "
                                  f"{LAYOUT_HEAD.size}")
    revision, dtype, fragments = LAYOUT_HEAD.unpack_from(data)
    if revision == 0 or dtype not in DTYPES or fragments == 0:
        raise RemoteProtocolError(
            f"LAYOUT has revision {revision}, dtype {dtype} and {fragments} fragments, expected a "
            "revision and fragments above 0 and a dtype of 1 to 3")
    scanned: LayoutBytes = scan_layout(data, LAYOUT_HEAD.size, fragments)
    at = LAYOUT_HEAD.size + len(scanned)
    behind = at + 2 * HASH_BYTES
    if len(data) < behind:
        raise RemoteProtocolError(f"LAYOUT payload truncated: {len(data)} bytes, expected at least "
                                  f"{behind}")
    layout = scanned.read()
    return SessionLayout(dtype, layout, bytes(data[at : at + HASH_BYTES]),
                         bytes(data[at + HASH_BYTES : behind]),
                         layout_names(data[behind:], layout))


# --- PUSH_FATE -----------------------------------------------------------------------------------


def encode_fate(fate: Fate) -> bytes:
    """PUSH_FATE frame."""
    return frame(Msg.PUSH_FATE, FATE.pack(*fate))


def parse_fate(payload: Bytes, fragments: int) -> Fate:
    """PUSH_FATE to somebody with this many fragments; a fate that is not known is kept."""
    if len(payload) != FATE.size:
        raise RemoteProtocolError(
            f"PUSH_FATE payload has {len(payload)} bytes, expected {FATE.size}")
    fate = Fate(*FATE.unpack(payload))
    if fate.fragment >= fragments:
        raise RemoteProtocolError(f"PUSH_FATE names unknown fragment {fate.fragment}, the layout "
                                  f"has {fragments}")
    return fate
