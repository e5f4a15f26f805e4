"""Every message but HELLO as a value, and the parse functions that refuse what breaks the protocol.

A `RemoteProtocolError` raised here carries exactly the text of the ERROR frame that answers it.
Must not decode tensors (kernels do) or judge rounds and versions (core does).
"""

from __future__ import annotations

import unicodedata
from struct import Struct
from typing import NamedTuple, TypeAlias

from syncer.errors import RemoteProtocolError
from syncer.layout import Layout
from syncer.protocol import (
    DTYPE_F32,
    DTYPE_Q4,
    FINALIZATION_REVISION,
    HASH_BYTES,
    PROTOCOL_VERSION,
    Msg,
    bulk_dtype,
    tensor_bytes,
)

Bytes: TypeAlias = bytes | bytearray | memoryview

DATA_HELLO = Struct("<HIQH")
INIT_HEAD = Struct("<I")
PULL = Struct("<IQI")
PUSH_HEAD = Struct("<IIQIQQIQ")
VERSIONED_HEAD = Struct("<IQ")
"""fragment_id, version: BCAST_FRAGMENT and FINAL_FRAGMENT."""
CHANGE_HEAD = Struct("<IQQ")
"""fragment_id, base, version: BCAST_CHANGE."""
HEARTBEAT = Struct("<IQ")
MANIFEST_HEAD = Struct("<HQI")
FINAL_ACK = Struct("<HQ")
BUDGET_DONE = Struct("<Q")


class DataHello(NamedTuple):
    """First frame of a data socket: which connection it joins, and its 0-based stream index."""

    learner: int
    generation: int
    stream: int
    proof: bytes = b""
    """MAC over the rest, of a group that has introduced itself to a syncer with a key."""


class Init(NamedTuple):
    """Initial values of one fragment in the bulk dtype, from learner 0."""

    fragment: int
    tensor: memoryview


class Pull(NamedTuple):
    """Asks for the change of one fragment; (fragment, step, attempt) names the round attempt."""

    fragment: int
    step: int
    attempt: int


class Push(NamedTuple):
    """The answer to a `Pull`: delta in the session dtype, on top of version `base`."""

    learner: int
    fragment: int
    step: int
    attempt: int
    base: int
    local_step: int
    """Optimizer steps of this learner in all."""
    c_steps: int
    """Optimizer steps since it applied a broadcast of this fragment."""
    c_tokens: int
    """Raw tokens since then."""
    delta: memoryview


class Bcast(NamedTuple):
    """A fragment at a version, in the bulk dtype."""

    fragment: int
    version: int
    tensor: memoryview


class BcastChange(NamedTuple):
    """What makes the broadcast of a version from that of its base, in q4 (wire 20)."""

    fragment: int
    base: int
    """Version that it changes."""
    version: int
    delta: memoryview


class FinalFragment(NamedTuple):
    """A fragment of the final cut, always f32."""

    fragment: int
    version: int
    tensor: memoryview


class Heartbeat(NamedTuple):
    """How many optimizer steps a learner has made."""

    learner: int
    local_step: int


class Manifest(NamedTuple):
    """The final cut: its global step and the version of every fragment."""

    step: int
    versions: tuple[int, ...]


class FinalAck(NamedTuple):
    """A learner has applied the final cut of this step."""

    step: int


class BudgetDone(NamedTuple):
    """A learner has used its step budget (benchmark mode)."""

    steps: int


def _need(payload: Bytes, size: int, msg_type: Msg) -> None:
    if len(payload) < size:
        raise RemoteProtocolError(
            f"{msg_type.name} payload truncated: {len(payload)} bytes, expected at least {size}"
        )


def _exact(payload: Bytes, size: int, msg_type: Msg) -> None:
    if len(payload) != size:
        raise RemoteProtocolError(
            f"{msg_type.name} payload has {len(payload)} bytes, expected {size}"
        )


def _known_fragment(fragment: int, layout: Layout, msg_type: Msg) -> int:
    """Elements of the fragment; refuses an index that the layout does not have."""
    count = len(layout.fragments)
    if fragment >= count:
        raise RemoteProtocolError(
            f"{msg_type.name} names unknown fragment {fragment}, the layout has {count}"
        )
    return layout.fragments[fragment].numel


def _tensor(payload: Bytes, head: Struct, expected: int, fragment: int,
            msg_type: Msg) -> memoryview:
    """View of everything behind the head, which must be `expected` bytes."""
    tensor = memoryview(payload)[head.size :]
    if len(tensor) != expected:
        noun = "delta" if msg_type in (Msg.PUSH_FRAGMENT, Msg.BCAST_CHANGE) else "tensor"
        raise RemoteProtocolError(
            f"{msg_type.name} fragment {fragment} has {len(tensor)} {noun} bytes, "
            f"expected {expected}"
        )
    return tensor


def parse_data_hello(payload: Bytes) -> DataHello:
    """DATA_HELLO; every refusal starts `invalid DATA_HELLO: `."""
    try:
        if len(payload) >= 2:
            version = int.from_bytes(payload[:2], "little")
            if version != PROTOCOL_VERSION:
                raise RemoteProtocolError(
                    f"protocol version mismatch: peer speaks {version}, "
                    f"this syncer speaks {PROTOCOL_VERSION}"
                )
        _need(payload, DATA_HELLO.size, Msg.DATA_HELLO)
        _, learner, generation, stream = DATA_HELLO.unpack_from(payload)
        if generation == 0:
            raise RemoteProtocolError("generation must be nonzero")
        if len(payload) != DATA_HELLO.size + HASH_BYTES:
            _exact(payload, DATA_HELLO.size, Msg.DATA_HELLO)
    except RemoteProtocolError as error:
        raise RemoteProtocolError(f"invalid DATA_HELLO: {error}") from None
    return DataHello(learner, generation, stream, bytes(payload[DATA_HELLO.size :]))


def no_proof_expected() -> RemoteProtocolError:
    """What a DATA_HELLO with a proof is to a group that has not introduced itself."""
    return RemoteProtocolError(
        f"invalid DATA_HELLO: DATA_HELLO payload has {DATA_HELLO.size + HASH_BYTES} bytes, "
        f"expected {DATA_HELLO.size}")


def parse_init(payload: Bytes, learner: int, layout: Layout, dtype: int) -> Init:
    """INIT_PARAMS of the group of `learner`; `tensor` is a view of exactly the fragment's bytes."""
    if learner != 0:
        raise RemoteProtocolError(
            f"only learner 0 may send INIT_PARAMS, this connection is learner {learner}"
        )
    _need(payload, INIT_HEAD.size, Msg.INIT_PARAMS)
    (fragment,) = INIT_HEAD.unpack_from(payload)
    numel = _known_fragment(fragment, layout, Msg.INIT_PARAMS)
    expected = tensor_bytes(numel, bulk_dtype(dtype))
    tensor = _tensor(payload, INIT_HEAD, expected, fragment, Msg.INIT_PARAMS)
    return Init(fragment, tensor)


def parse_push(payload: Bytes, learner: int, layout: Layout, dtype: int) -> Push:
    """PUSH_FRAGMENT of the group of `learner`; `delta` is a view of exactly the right length.

    Checked in this order: learner id, attempt, c_steps, fragment, length (wire 9.4).
    """
    _need(payload, PUSH_HEAD.size, Msg.PUSH_FRAGMENT)
    sender, fragment, step, attempt, base, local_step, c_steps, c_tokens = (
        PUSH_HEAD.unpack_from(payload))
    if sender != learner:
        raise RemoteProtocolError(
            f"PUSH_FRAGMENT learner {sender} does not match connected group of learner {learner}"
        )
    if attempt == 0:
        raise RemoteProtocolError("PUSH_FRAGMENT round_attempt must be positive, got 0")
    if c_steps == 0:
        raise RemoteProtocolError("PUSH_FRAGMENT c_steps must be positive, got 0")
    numel = _known_fragment(fragment, layout, Msg.PUSH_FRAGMENT)
    expected = tensor_bytes(numel, dtype)
    delta = _tensor(payload, PUSH_HEAD, expected, fragment, Msg.PUSH_FRAGMENT)
    return Push(sender, fragment, step, attempt, base, local_step, c_steps, c_tokens, delta)


def parse_heartbeat(payload: Bytes, learner: int) -> Heartbeat:
    """HEARTBEAT of the group of `learner`."""
    _exact(payload, HEARTBEAT.size, Msg.HEARTBEAT)
    heartbeat = Heartbeat(*HEARTBEAT.unpack_from(payload))
    if heartbeat.learner != learner:
        raise RemoteProtocolError(
            f"HEARTBEAT learner {heartbeat.learner} does not match connected group "
            f"of learner {learner}"
        )
    return heartbeat


def parse_final_ack(payload: Bytes) -> FinalAck:
    """FINAL_ACK of the known revision."""
    _exact(payload, FINAL_ACK.size, Msg.FINAL_ACK)
    revision, step = FINAL_ACK.unpack_from(payload)
    _known_revision(revision)
    return FinalAck(step)


def parse_budget_done(payload: Bytes) -> BudgetDone:
    """BUDGET_DONE."""
    _exact(payload, BUDGET_DONE.size, Msg.BUDGET_DONE)
    return BudgetDone(*BUDGET_DONE.unpack_from(payload))


def parse_pull(payload: Bytes, layout: Layout) -> Pull:
    """PULL_REQ for a fragment of this layout."""
    _exact(payload, PULL.size, Msg.PULL_REQ)
    pull = Pull(*PULL.unpack_from(payload))
    _known_fragment(pull.fragment, layout, Msg.PULL_REQ)
    return pull


def parse_bcast(payload: Bytes, layout: Layout, dtype: int) -> Bcast:
    """BCAST_FRAGMENT; `tensor` is a view in the bulk dtype of the session."""
    return Bcast(*_parse_versioned(payload, layout, bulk_dtype(dtype), Msg.BCAST_FRAGMENT))


def parse_bcast_change(payload: Bytes, layout: Layout) -> BcastChange:
    """BCAST_CHANGE; `delta` is a view of q4 blocks."""
    _need(payload, CHANGE_HEAD.size, Msg.BCAST_CHANGE)
    fragment, base, version = CHANGE_HEAD.unpack_from(payload)
    expected = tensor_bytes(_known_fragment(fragment, layout, Msg.BCAST_CHANGE), DTYPE_Q4)
    if base >= version:
        raise RemoteProtocolError(f"BCAST_CHANGE fragment {fragment} makes version {version} of "
                                  f"version {base}, expected an older one")
    return BcastChange(fragment, base, version, _tensor(payload, CHANGE_HEAD, expected, fragment,
                                                        Msg.BCAST_CHANGE))


def parse_final_fragment(payload: Bytes, layout: Layout) -> FinalFragment:
    """FINAL_FRAGMENT; `tensor` is a view of f32 values."""
    return FinalFragment(*_parse_versioned(payload, layout, DTYPE_F32, Msg.FINAL_FRAGMENT))


def _parse_versioned(payload: Bytes, layout: Layout, dtype: int,
                     msg_type: Msg) -> tuple[int, int, memoryview]:
    _need(payload, VERSIONED_HEAD.size, msg_type)
    fragment, version = VERSIONED_HEAD.unpack_from(payload)
    expected = tensor_bytes(_known_fragment(fragment, layout, msg_type), dtype)
    return fragment, version, _tensor(payload, VERSIONED_HEAD, expected, fragment, msg_type)


def parse_manifest(payload: Bytes, layout: Layout) -> Manifest:
    """FINAL_MANIFEST with one version per fragment of this layout."""
    _need(payload, MANIFEST_HEAD.size, Msg.FINAL_MANIFEST)
    revision, step, count = MANIFEST_HEAD.unpack_from(payload)
    _known_revision(revision)
    if count != len(layout.fragments):
        raise RemoteProtocolError(
            f"FINAL_MANIFEST has {count} fragments, expected {len(layout.fragments)}"
        )
    _exact(payload, MANIFEST_HEAD.size + 8 * count, Msg.FINAL_MANIFEST)
    return Manifest(step, Struct(f"<{count}Q").unpack_from(payload, MANIFEST_HEAD.size))


def parse_shutdown(payload: Bytes) -> None:
    """SHUTDOWN, which carries nothing."""
    _exact(payload, 0, Msg.SHUTDOWN)


def foreign_text(data: Bytes) -> str:
    """What a peer says to people, in one line: bytes that are not UTF-8, and characters that would
    end the line or steer a terminal, are shown as replacement characters."""
    text = bytes(data).decode("utf-8", "replace")
    return "".join("\ufffd" if unicodedata.category(each) in ("Cc", "Zl", "Zp") else each
                   for each in text)


def parse_error(payload: Bytes) -> str:
    """Text of an ERROR."""
    return foreign_text(payload)


def _known_revision(revision: int) -> None:
    if revision != FINALIZATION_REVISION:
        raise RemoteProtocolError(
            f"unsupported finalization revision {revision}, expected {FINALIZATION_REVISION}"
        )
