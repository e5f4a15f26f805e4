"""The frame reader: golden chunks, every framing and reassembly refusal, what it holds."""

import struct

import numpy as np
import pytest

from syncer.errors import LocalProtocolError, RemoteProtocolError
from syncer.layout import RDA, FragmentLayout, Layout
from syncer.protocol import DTYPE_BF16, DTYPE_F32, MAGIC, Msg
from syncer.wire import encode
from syncer.wire.frames import FrameReader, Reassembly
from syncer.wire.limits import Limits

L1 = Layout((FragmentLayout(RDA, (4,)),))
BIG = Layout((FragmentLayout(RDA, (1 << 20,)),))
SERVER = Limits.for_server(L1, DTYPE_F32)
CLIENT = Limits.for_client(L1, DTYPE_F32)
BEAT = encode.frame(Msg.HEARTBEAT, bytes(12))
PUSH_FRAME = bytes.fromhex(
    "dec070d1044000000000000000070000000000000005000000000000000100000004000000000000000a0000000000"
    "0000030000002c010000000000000000003f000080be00000000000000c0"
)


def chunk(msg_id: int, total: int, offset: int, piece: bytes) -> bytes:
    return encode.frame(Msg.CHUNK, struct.pack("<QQQ", msg_id, total, offset) + piece)


def events(reader: FrameReader, *pieces: bytes) -> list:
    return [(t, bytes(p)) for piece in pieces for t, p in reader.feed(piece)]


def refusal(limits, *pieces: bytes) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        events(FrameReader(limits), *pieces)
    return str(caught.value)


def test_golden_chunk_in_one_piece():
    head = "dec070d109650000000000000000000000000000004d000000000000000000000000000000"
    assert events(FrameReader(SERVER), bytes.fromhex(head) + PUSH_FRAME) == [
        (Msg.PUSH_FRAGMENT, PUSH_FRAME[13:])
    ]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_golden_chunk_cut_at_50(order):
    pieces = [
        bytes.fromhex("dec070d1094a0000000000000001000000000000004d000000000000000000000000000000")
        + PUSH_FRAME[:50],
        bytes.fromhex("dec070d109330000000000000001000000000000004d000000000000003200000000000000")
        + PUSH_FRAME[50:],
    ]
    got = events(FrameReader(SERVER), *(pieces[index] for index in order))
    assert got == [(Msg.PUSH_FRAGMENT, PUSH_FRAME[13:])]


def test_bad_magic():
    text = refusal(SERVER, b"GET / HTTP/1.1\r\n")
    assert text == "bad magic 0x20544547, expected 0xd170c0de"


def test_length_over_the_limit_is_refused_from_the_header_alone():
    header = struct.pack("<IBQ", MAGIC, Msg.HELLO, 2**40)
    text = refusal(Limits.first_frame(), header)
    assert text.startswith("invalid first frame: message type 1 (HELLO)")
    assert "exceeds limit 16777216" in text
    assert "exceeds limit 64" in refusal(SERVER, struct.pack("<IBQ", MAGIC, 4, 65))
    assert "exceeds limit" in refusal(SERVER, struct.pack("<IBQ", MAGIC, 4, 2**64 - 1))


@pytest.mark.parametrize("msg_type", [0, 1, 3, 5, 7, 8, 10, 11, 13, 15, 16, 255])
def test_types_a_syncer_does_not_take(msg_type):
    assert "unexpected message type" in refusal(SERVER, encode.frame(msg_type, b""))


@pytest.mark.parametrize("msg_type", [0, 1, 2, 4, 6, 8, 12, 14, 15, 16, 255])
def test_types_a_learner_does_not_take(msg_type):
    assert "unexpected message type" in refusal(CLIENT, encode.frame(msg_type, b""))


@pytest.mark.parametrize("msg_type", [t for t in range(256) if t not in (1, 8)])
def test_first_frame_is_hello_or_data_hello(msg_type):
    text = refusal(Limits.first_frame(), encode.frame(msg_type, b""))
    assert text.startswith("invalid first frame: unexpected message type")


@pytest.mark.parametrize(
    ("limits", "msg_type", "most"),
    [
        (SERVER, Msg.INIT_PARAMS, 20),
        (SERVER, Msg.PUSH_FRAGMENT, 64),
        (SERVER, Msg.HEARTBEAT, 12),
        (SERVER, Msg.FINAL_ACK, 10),
        (SERVER, Msg.BUDGET_DONE, 8),
        (CLIENT, Msg.PULL_REQ, 16),
        (CLIENT, Msg.BCAST_FRAGMENT, 28),
        (CLIENT, Msg.FINAL_FRAGMENT, 28),
        (CLIENT, Msg.FINAL_MANIFEST, 22),
        (CLIENT, Msg.SHUTDOWN, 0),
        (CLIENT, Msg.ERROR, 65_536),
        (Limits.first_frame(), Msg.DATA_HELLO, 16 * 1024 * 1024),
    ],
)
def test_the_limit_itself_is_allowed_and_one_more_is_not(limits, msg_type, most):
    assert events(FrameReader(limits), encode.frame(msg_type, bytes(most))) == [
        (msg_type, bytes(most))
    ]
    assert "exceeds limit" in refusal(limits, encode.frame_header(msg_type, most + 1))


def test_chunk_frame_limit_is_4_mib_and_24_bytes():
    limits = Limits.for_server(BIG, DTYPE_F32)
    size = 4 * 1024 * 1024
    reader = FrameReader(limits)
    assert events(reader, chunk(0, size + 50, 0, bytes(size))) == []
    assert reader.reassembly.bytes_open == size + 50
    assert "exceeds limit" in refusal(limits, encode.frame_header(Msg.CHUNK, 24 + size + 1))


def test_chunk_head_may_not_be_short_or_the_piece_empty():
    text = refusal(SERVER, encode.frame(Msg.CHUNK, bytes(23)))
    assert text == "CHUNK payload truncated: 23 bytes, expected at least 24"
    assert "empty chunk" in refusal(SERVER, chunk(0, 77, 0, b""))


def test_chunk_total_over_the_largest_message():
    assert "exceeds" in refusal(SERVER, chunk(0, 13 + 64 + 1, 0, b"x"))
    assert events(FrameReader(SERVER), chunk(0, 13 + 64, 0, b"x")) == []


def test_short_total_is_refused_at_once_by_a_learner_and_on_completion_by_the_syncer():
    assert "shorter than a frame header" in refusal(CLIENT, chunk(0, 12, 0, b"x"))
    reader = FrameReader(SERVER)
    assert events(reader, chunk(0, 12, 0, b"x")) == []
    with pytest.raises(RemoteProtocolError, match="shorter than a frame header"):
        events(reader, chunk(0, 12, 1, b"x" * 11))


@pytest.mark.parametrize(
    ("offset", "size"), [(77, 1), (76, 2), (2**64 - 1, 1), (2**64 - 1, 2), (0, 78)]
)
def test_piece_may_not_pass_the_total(offset, size):
    assert "passes the 77 bytes" in refusal(SERVER, chunk(0, 77, offset, bytes(size)))


def test_at_most_64_open_messages():
    opened = [chunk(n, 77, 0, b"x") for n in range(64)]
    assert "more than 64 chunked messages" in refusal(SERVER, *opened, chunk(64, 77, 0, b"x"))
    # A completed one makes room.
    reader = FrameReader(SERVER)
    first = [chunk(n, 77, 0, PUSH_FRAME[:1]) for n in range(64)]
    rest = [chunk(3, 77, 1, PUSH_FRAME[1:]), chunk(64, 77, 0, b"x")]
    assert events(reader, *first, *rest) == [(Msg.PUSH_FRAGMENT, PUSH_FRAME[13:])]
    assert reader.reassembly.messages_open == 64
    assert reader.reassembly.bytes_open == 64 * 77


def test_declared_totals_have_a_byte_limit():
    layout = Layout((FragmentLayout(RDA, (1 << 28,)),))
    limits = Limits.for_server(layout, DTYPE_F32)
    largest = 13 + 48 + 4 * (1 << 28)
    assert limits.open_bytes_max == 4 * largest
    opened = [chunk(n, largest, 0, b"x") for n in range(4)]
    text = refusal(limits, *opened, chunk(4, 13, 0, b"x"))
    assert f"{4 * largest} already open exceed limit {4 * largest}" in text
    assert Limits.for_server(L1, DTYPE_F32).open_bytes_max == 2 * 1024**3


def test_known_message_with_another_total():
    text = refusal(SERVER, chunk(5, 77, 0, b"x"), chunk(5, 76, 1, b"x"))
    assert text == "chunked message 5 has total 76, its first piece said 77"


@pytest.mark.parametrize(
    ("start", "end"), [(10, 20), (5, 11), (19, 30), (12, 15), (0, 77), (9, 21), (50, 60), (49, 51)]
)
def test_overlap_also_of_repeated_pieces(start, end):
    taken = [chunk(1, 77, 10, bytes(10)), chunk(1, 77, 50, bytes(10))]
    text = refusal(SERVER, *taken, chunk(1, 77, start, bytes(end - start)))
    assert text == f"chunk overlap: bytes {start}..{end} of message 1 were already received"


def test_overlap_with_a_piece_that_is_still_arriving_on_another_socket():
    group = Reassembly(SERVER)
    one, two = FrameReader(SERVER, group), FrameReader(SERVER, group)
    assert events(one, chunk(1, 77, 0, bytes(50))[:-1]) == []
    with pytest.raises(RemoteProtocolError, match="chunk overlap"):
        events(two, chunk(1, 77, 49, bytes(10)))


def test_a_message_completes_on_the_socket_of_its_last_byte():
    group = Reassembly(SERVER)
    one, two = FrameReader(SERVER, group), FrameReader(SERVER, group)
    first, second = chunk(1, 77, 0, PUSH_FRAME[:50]), chunk(1, 77, 50, PUSH_FRAME[50:])
    assert events(one, first[:-1]) == []
    assert events(two, second) == []
    assert events(one, first[-1:]) == [(Msg.PUSH_FRAGMENT, PUSH_FRAME[13:])]
    assert group.messages_open == group.bytes_open == 0


def test_inner_frame_is_checked():
    assert "bad magic" in refusal(SERVER, chunk(0, 77, 0, b"X" + PUSH_FRAME[1:]))
    wrong = encode.frame_header(Msg.PUSH_FRAGMENT, 63) + bytes(64)
    assert "inner length 63, its total says 64" in refusal(SERVER, chunk(0, 77, 0, wrong))
    nested = encode.frame(Msg.CHUNK, bytes(30))
    text = refusal(SERVER, chunk(0, len(nested), 0, nested))
    assert "unexpected message type 9 (CHUNK) inside a chunked message" in text
    other = encode.frame(Msg.BCAST_FRAGMENT, bytes(12))
    assert "unexpected message type 5" in refusal(SERVER, chunk(0, len(other), 0, other))


def test_control_types_inside_a_chunk_are_tolerated():
    assert events(FrameReader(SERVER), chunk(0, len(BEAT), 0, BEAT)) == [(Msg.HEARTBEAT, bytes(12))]


def test_msg_id_may_be_used_again_after_completion():
    reader = FrameReader(SERVER)
    whole = chunk(2**64 - 1, 77, 0, PUSH_FRAME)
    assert len(events(reader, whole, whole)) == 2


def test_chunk_without_permission():
    assert "unexpected message type 9" in refusal(
        Limits.first_frame(), chunk(0, len(BEAT), 0, BEAT)
    )


def test_memory_that_cannot_be_had_is_one_sentence():
    layout = Layout((FragmentLayout(RDA, (1 << 58,)),))
    limits = Limits.for_server(layout, DTYPE_F32)
    text = refusal(limits, encode.frame_header(Msg.PUSH_FRAGMENT, 48 + (1 << 60)) + b"x")
    assert text == (f"cannot allocate {48 + (1 << 60)} bytes for a message of the peer: try again "
                    "later")
    text = refusal(limits, chunk(0, 13 + 48 + (1 << 60), 0, b"x"))
    assert "cannot allocate" in text


def test_separate_ranges_of_one_message_are_bounded():
    limits = Limits.for_server(BIG, DTYPE_F32)
    total = 13 + 48 + 4 * (1 << 20)
    most = 16384 + total // 65536
    reader = FrameReader(limits)
    for n in range(most):
        assert events(reader, chunk(0, total, 2 * n, b"x")) == []
    assert reader.reassembly.range_bytes <= 2 * 16 * most
    with pytest.raises(RemoteProtocolError, match=f"more than {most} separate ranges"):
        events(reader, chunk(0, total, 2 * most, b"x"))


def test_limits_set_in_the_loop_hold_for_the_next_frame():
    reader = FrameReader(Limits.first_frame())
    got = []
    for msg_type, _ in reader.feed(encode.frame(Msg.HELLO, b"x") + BEAT + chunk(0, 77, 0, b"x")):
        got.append(msg_type)
        reader.limits = SERVER
    assert got == [Msg.HELLO, Msg.HEARTBEAT]
    assert reader.reassembly.bytes_open == 77


def test_frames_before_a_broken_one_are_given_first_and_the_error_stays():
    reader = FrameReader(SERVER)
    frames = reader.feed(BEAT + b"X" * 13)
    assert next(frames)[0] == Msg.HEARTBEAT
    for ask in (frames.__next__, reader.__next__, reader.buffer, reader.__next__):
        with pytest.raises(RemoteProtocolError, match="bad magic"):
            ask()


def test_eof_tells_whether_a_frame_is_cut():
    reader = FrameReader(SERVER)
    assert not reader.eof()
    for cut in (1, 12, 13, 20, len(BEAT) - 1):
        reader = FrameReader(SERVER)
        assert events(reader, BEAT[:cut]) == []
        assert reader.eof()
        assert len(events(reader, BEAT[cut:])) == 1
        assert not reader.eof()


def test_payloads_outlive_the_reader_and_cannot_be_written():
    limits = Limits.for_server(BIG, DTYPE_F32)
    init = encode.frame(Msg.INIT_PARAMS, bytes(range(256)) * 1024)
    reader = FrameReader(limits)
    frames = list(reader.feed(init + BEAT + chunk(0, len(init), 0, init) + init))
    del reader
    assert [bytes(p) for t, p in frames if t == Msg.INIT_PARAMS] == [init[13:]] * 3
    assert all(payload.readonly for _, payload in frames)


def test_large_payload_is_received_in_place():
    reader = FrameReader(Limits.for_server(BIG, DTYPE_F32))
    size = 4 + 4 * (1 << 20)
    assert events(reader, encode.frame_header(Msg.INIT_PARAMS, size) + b"\x07") == []
    window = reader.buffer()
    assert len(window) == size - 1
    assert reader.bytes_held < size + 65536
    window[:] = b"\x09" * (size - 1)
    [(msg_type, payload)] = reader.received(size - 1)
    assert (msg_type, payload.nbytes) == (Msg.INIT_PARAMS, size)
    assert bytes(payload[:3]) == b"\x07\x09\x09"
    window[0] = 5
    assert payload[1] == 5, "the frame is the very memory that was received into"


def test_received_is_checked_against_the_buffer():
    reader = FrameReader(SERVER)
    room = len(reader.buffer())
    for count in (-1, room + 1):
        with pytest.raises(LocalProtocolError, match="were received into a buffer of"):
            reader.received(count)


def test_frames_must_be_taken_before_more_are_received():
    reader = FrameReader(SERVER)
    room = len(reader.buffer())
    reader.buffer()[:] = (BEAT * (room // len(BEAT) + 1))[:room]
    reader.received(room)
    with pytest.raises(LocalProtocolError, match="must be taken"):
        reader.buffer()
    assert len(list(reader)) == room // len(BEAT)
    assert len(reader.buffer()) == room - room % len(BEAT)


@pytest.mark.parametrize("size", [100, 100_000])
def test_tensors_are_aligned_to_4_bytes_bare_and_chunked(size):
    inner = encode.frame(Msg.BCAST_FRAGMENT, bytes(12 + size))
    for wire in (inner, chunk(0, len(inner), 0, inner)):
        [(_, payload)] = FrameReader(Limits.for_client(BIG, DTYPE_BF16)).feed(wire)
        assert np.frombuffer(payload[12:], np.uint8).ctypes.data % 4 == 0


def test_a_group_without_a_shared_reassembly_gets_its_own():
    assert FrameReader(Limits.first_frame()).reassembly is None
    assert FrameReader(SERVER).reassembly is not None
