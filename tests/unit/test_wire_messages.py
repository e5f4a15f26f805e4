"""Refusals of every message after HELLO, with their texts, and limits from a layout."""

import struct

import pytest

from syncer.errors import LocalProtocolError, RemoteProtocolError
from syncer.gather import advance
from syncer.layout import AVG, RDA, FragmentLayout, Layout
from syncer.protocol import (
    DTYPE_BF16,
    DTYPE_F32,
    DTYPE_Q4,
    Msg,
    bulk_dtype,
    tensor_bytes,
)
from syncer.wire import encode, extended
from syncer.wire import messages as m
from syncer.wire.limits import Limits

LAYOUT = Layout((FragmentLayout(AVG, (1,)), FragmentLayout(RDA, (200, 57))))


def init(payload, learner=0, dtype=DTYPE_F32):
    return m.parse_init(payload, learner, LAYOUT, dtype)


def push(payload, learner=7, dtype=DTYPE_F32):
    return m.parse_push(payload, learner, LAYOUT, dtype)


def pushed(learner=7, fragment=0, attempt=1, c_steps=1, delta=bytes(4)) -> bytes:
    return struct.pack("<IIQIQQIQ", learner, fragment, 5, attempt, 4, 10, c_steps, 1) + delta


def bcast(payload, dtype=DTYPE_F32):
    return m.parse_bcast(payload, LAYOUT, dtype)


def change(payload):
    return m.parse_bcast_change(payload, LAYOUT)


def changes(base: int, version: int, delta: bytes) -> bytes:
    return struct.pack("<IQQ", 0, base, version) + delta


def final(payload):
    return m.parse_final_fragment(payload, LAYOUT)


def manifest(payload):
    return m.parse_manifest(payload, LAYOUT)


def versioned(fragment: int, tensor: bytes) -> bytes:
    return struct.pack("<IQ", fragment, 3) + tensor


def u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


REFUSALS = [
    (m.parse_data_hello, b"", "invalid DATA_HELLO: DATA_HELLO payload truncated: 0 bytes"),
    (m.parse_data_hello, b"\5\0", "invalid DATA_HELLO: protocol version mismatch: peer speaks 5"),
    (m.parse_data_hello, b"\4\0" + bytes(13), "invalid DATA_HELLO: DATA_HELLO payload truncated"),
    (
        m.parse_data_hello,
        b"\4\0" + bytes(14),
        "invalid DATA_HELLO: generation must be nonzero",
    ),
    (
        m.parse_data_hello,
        b"\4\0" + bytes(4) + b"\1" * 8 + bytes(3),
        "invalid DATA_HELLO: DATA_HELLO payload has 17 bytes, expected 16",
    ),
    (lambda p: init(p, learner=3), b"", "only learner 0 may send INIT_PARAMS"),
    (init, bytes(3), "INIT_PARAMS payload truncated: 3 bytes, expected at least 4"),
    (init, u32(2), "INIT_PARAMS names unknown fragment 2, the layout has 2"),
    (init, u32(0) + bytes(3), "INIT_PARAMS fragment 0 has 3 tensor bytes, expected 4"),
    (init, u32(0), "INIT_PARAMS fragment 0 has 0 tensor bytes, expected 4"),
    (init, u32(1) + bytes(4), "INIT_PARAMS fragment 1 has 4 tensor bytes, expected 1028"),
    (push, pushed()[:47], "PUSH_FRAGMENT payload truncated: 47 bytes, expected at least 48"),
    (
        push,
        pushed(learner=8, attempt=0),
        "PUSH_FRAGMENT learner 8 does not match connected group of learner 7",
    ),
    (push, pushed(attempt=0, c_steps=0), "round_attempt must be positive"),
    (push, pushed(c_steps=0, fragment=9), "c_steps must be positive"),
    (push, pushed(fragment=9, delta=b""), "PUSH_FRAGMENT names unknown fragment 9"),
    (push, pushed(delta=bytes(3)), "PUSH_FRAGMENT fragment 0 has 3 delta bytes, expected 4"),
    (
        lambda p: m.parse_heartbeat(p, 7),
        bytes(11),
        "HEARTBEAT payload has 11 bytes, expected 12",
    ),
    (
        lambda p: m.parse_heartbeat(p, 7),
        bytes(12),
        "HEARTBEAT learner 0 does not match connected group of learner 7",
    ),
    (m.parse_final_ack, bytes(9), "FINAL_ACK payload has 9 bytes, expected 10"),
    (m.parse_final_ack, b"\2" + bytes(9), "unsupported finalization revision 2, expected 1"),
    (m.parse_budget_done, bytes(7), "BUDGET_DONE payload has 7 bytes, expected 8"),
    (lambda p: m.parse_pull(p, LAYOUT), bytes(15), "PULL_REQ payload has 15 bytes, expected 16"),
    (
        lambda p: m.parse_pull(p, LAYOUT),
        u32(2) + bytes(12),
        "PULL_REQ names unknown fragment 2",
    ),
    (bcast, bytes(11), "BCAST_FRAGMENT payload truncated: 11 bytes, expected at least 12"),
    (bcast, versioned(2, b""), "BCAST_FRAGMENT names unknown fragment 2"),
    (bcast, versioned(0, bytes(5)), "BCAST_FRAGMENT fragment 0 has 5 tensor bytes, expected 4"),
    (change, bytes(19), "BCAST_CHANGE payload truncated: 19 bytes, expected at least 20"),
    (change, u32(2) + bytes(16), "BCAST_CHANGE names unknown fragment 2"),
    (change, changes(8, 9, bytes(131)), "fragment 0 has 131 delta bytes, expected 132"),
    (change, changes(9, 9, bytes(132)), "makes version 9 of version 9, expected an older one"),
    (final, bytes(11), "FINAL_FRAGMENT payload truncated"),
    (final, versioned(2, b""), "FINAL_FRAGMENT names unknown fragment 2"),
    (final, versioned(0, bytes(2)), "FINAL_FRAGMENT fragment 0 has 2 tensor bytes, expected 4"),
    (manifest, bytes(13), "FINAL_MANIFEST payload truncated"),
    (manifest, b"\2" + bytes(29), "unsupported finalization revision 2"),
    (manifest, b"\1" + bytes(13), "FINAL_MANIFEST has 0 fragments, expected 2"),
    (
        manifest,
        b"\1\0" + bytes(8) + u32(2) + bytes(15),
        "FINAL_MANIFEST payload has 29 bytes, expected 30",
    ),
    (m.parse_shutdown, b"x", "SHUTDOWN payload has 1 bytes, expected 0"),
]


@pytest.mark.parametrize(
    ("parse", "payload", "text"), REFUSALS, ids=[f"{n}-{r[2][:24]}" for n, r in enumerate(REFUSALS)]
)
def test_refusal(parse, payload, text):
    with pytest.raises(RemoteProtocolError) as caught:
        parse(memoryview(payload))
    assert text in str(caught.value)


def test_a_wrong_delta_length_ends_with_the_expected_one():
    for delta in (b"", bytes(3), bytes(8)):
        with pytest.raises(RemoteProtocolError, match=r"expected 4$"):
            push(pushed(delta=delta))


def test_dtype_decides_the_lengths():
    assert [bulk_dtype(d) for d in (DTYPE_F32, DTYPE_BF16, DTYPE_Q4)] == [1, 2, 2]
    assert [tensor_bytes(n, DTYPE_Q4) for n in (1, 256, 257)] == [132, 132, 264]
    assert len(init(u32(1) + bytes(514), dtype=DTYPE_Q4).tensor) == 514
    assert len(bcast(versioned(1, bytes(514)), dtype=DTYPE_Q4).tensor) == 514
    assert len(push(pushed(fragment=1, delta=bytes(264)), dtype=DTYPE_Q4).delta) == 264
    assert len(final(versioned(1, bytes(1028))).tensor) == 1028


def test_error_text_that_is_not_utf8_is_shown_not_raised():
    assert m.parse_error(b"bad \xff byte") == "bad \ufffd byte"


def test_error_text_is_cut_at_a_character_within_the_cap():
    payload = encode.encode_error("兼" * 30_000)[13:]
    assert len(payload) == 65_535
    assert payload.decode("utf-8") == "兼" * 21_845


@pytest.mark.parametrize(
    "encoder",
    [
        lambda: encode.encode_pull(m.Pull(-1, 0, 1)),
        lambda: encode.encode_pull(m.Pull(0, 2**64, 1)),
        lambda: encode.encode_heartbeat(m.Heartbeat(2**32, 0)),
        lambda: encode.encode_manifest(m.Manifest(1, (2**64,))),
        lambda: encode.encode_budget_done(m.BudgetDone(-1)),
        lambda: encode.encode_data_hello(m.DataHello(0, 1, 65_536)),
        lambda: encode.push_head(m.Push(7, 0, 5, 0, 4, 10, 3, 1, memoryview(b""))),
        lambda: encode.push_head(m.Push(7, 0, 5, 1, 4, 10, 0, 1, memoryview(b""))),
        lambda: encode.init_head(2**32),
        lambda: encode.bcast_head(0, -1),
    ],
)
def test_encoders_refuse_what_does_not_fit(encoder):
    with pytest.raises(LocalProtocolError):
        encoder()


@pytest.mark.parametrize(
    ("dtype", "init_max", "push_max", "bcast_max"),
    [
        (DTYPE_F32, 4 + 1028, 48 + 1028, 12 + 1028),
        (DTYPE_BF16, 4 + 514, 48 + 514, 12 + 514),
        (DTYPE_Q4, 4 + 514, 48 + 264, 12 + 514),
    ],
)
def test_limits_follow_the_largest_fragment(dtype, init_max, push_max, bcast_max):
    server, client = Limits.for_server(LAYOUT, dtype), Limits.for_client(LAYOUT, dtype)
    assert server.frame_bytes_max[Msg.INIT_PARAMS] == init_max
    assert server.frame_bytes_max[Msg.PUSH_FRAGMENT] == push_max
    assert server.inner_bytes_max == 13 + max(init_max, push_max)
    assert client.frame_bytes_max[Msg.BCAST_FRAGMENT] == bcast_max
    assert client.frame_bytes_max[Msg.FINAL_FRAGMENT] == 12 + 1028
    assert client.frame_bytes_max[Msg.FINAL_MANIFEST] == 14 + 8 * 2
    assert client.inner_bytes_max == 13 + 12 + 1028
    assert Msg.BCAST_CHANGE not in client.frame_bytes_max
    taking = Limits.for_client(LAYOUT, dtype, extended=True, changes=True)
    assert taking.frame_bytes_max[Msg.BCAST_CHANGE] == 20 + 264
    assert Msg.PUSH_FATE not in taking.frame_bytes_max
    asking = Limits.for_client(LAYOUT, dtype, extended=True, fates=True)
    assert asking.frame_bytes_max[Msg.PUSH_FATE] == extended.FATE.size


def test_a_layout_that_cannot_be_addressed_has_no_limits():
    layout = Layout((FragmentLayout(AVG, (2**61,)),))
    for make in (Limits.for_server, Limits.for_client):
        with pytest.raises(LocalProtocolError, match="can be addressed"):
            make(layout, DTYPE_BF16)


def test_gather_lists_do_not_copy_the_body():
    body = bytearray(9 * 1024 * 1024)
    gathers = list(encode.chunk_message(Msg.BCAST_FRAGMENT, encode.bcast_head(0, 1), body, 3))
    assert [len(piece) for _, piece in gathers] == [
        4 * 1024 * 1024 - 25,
        4 * 1024 * 1024,
        1024 * 1024 + 25,
    ]
    assert all(piece.obj is body for _, piece in gathers)
    assert encode.bare_message(Msg.BCAST_FRAGMENT, b"head", body)[1].obj is body


@pytest.mark.parametrize("count", range(13))
def test_a_gather_list_advances_byte_by_byte(count):
    whole = [b"abc", memoryview(b""), memoryview(b"defgh"), b"", memoryview(b"ijkl"), b""]
    rest = list(whole)
    advance(rest, count)
    assert b"".join(rest) == b"".join(whole)[count:]
    assert not rest or len(rest[0])
