"""Any split of any bytes gives the same events; a peer causes nothing but RemoteProtocolError."""

import struct
from itertools import pairwise
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from syncer.errors import RemoteProtocolError
from syncer.layout import RDA, FragmentLayout, Layout
from syncer.protocol import DTYPE_F32, HEADER_BYTES, Msg
from syncer.wire import encode
from syncer.wire.frames import FrameReader, Reassembly
from syncer.wire.limits import Limits

NUMEL = 20_000
LAYOUT = Layout((FragmentLayout(RDA, (NUMEL,)),))
SERVER = Limits.for_server(LAYOUT, DTYPE_F32)
CLIENT = Limits.for_client(LAYOUT, DTYPE_F32)
FIRST = Limits.first_frame()
SIDES = st.sampled_from([SERVER, CLIENT, FIRST])


def chunk(msg_id: int, total: int, offset: int, piece: bytes) -> bytes:
    return encode.frame(Msg.CHUNK, struct.pack("<QQQ", msg_id, total, offset) + piece)


def pattern(size: int) -> bytes:
    return (bytes(range(251)) * (size // 251 + 1))[:size]


def events(limits: Limits, pieces) -> tuple[list, str | None]:
    """What came out, and the error that ended it."""
    reader, got = FrameReader(limits), []
    try:
        for piece in pieces:
            for msg_type, payload in reader.feed(piece):
                got.append((msg_type, bytes(payload)))
    except RemoteProtocolError as error:
        return got, str(error)
    return got, None


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


@st.composite
def frames(draw, limits=SERVER) -> bytes:
    """A frame that may be right, wrong in one field, or no frame at all."""
    kind = draw(st.sampled_from(["small", "large", "chunk", "any", "header", "noise"]))
    allowed = sorted(limits.frame_bytes_max.items())
    msg_type, most = draw(st.sampled_from(allowed))
    if kind == "small":
        return encode.frame(msg_type, pattern(draw(st.integers(0, min(most, 64)))))
    if kind == "large":
        return encode.frame(msg_type, pattern(draw(st.integers(0, min(most, 100_000)))))
    if kind == "chunk":
        total = draw(st.integers(0, 120))
        offset = draw(st.integers(0, 120))
        return chunk(draw(st.integers(0, 3)), total, offset, draw(st.binary(max_size=60)))
    if kind == "any":
        return encode.frame(draw(st.integers(0, 255)), draw(st.binary(max_size=40)))
    if kind == "header":
        return encode.frame_header(draw(st.integers(0, 255)), draw(st.integers(0, 2**64 - 1)))
    return draw(st.binary(max_size=40))


STREAMS = st.lists(frames(), max_size=8).map(b"".join)


@given(SIDES, STREAMS, st.lists(st.integers(0, 2**20), max_size=12))
def test_any_split_gives_the_same_events(limits, data, places):
    assert events(limits, cut(data, places)) == events(limits, [data])


@given(STREAMS, st.lists(st.integers(0, 2**20), max_size=12))
def test_memory_stays_within_the_declared_limits(data, places):
    reader = FrameReader(SERVER)
    largest = max(SERVER.frame_bytes_max.values())
    try:
        for piece in cut(data, places):
            for _ in reader.feed(piece):
                pass
            group = reader.reassembly
            assert reader.bytes_held <= 16384 + largest
            assert group.messages_open <= 64
            assert group.bytes_open <= group.messages_open * SERVER.inner_bytes_max
            assert group.bytes_open <= SERVER.open_bytes_max
            # 16 bytes for each separate range, and a piece costs at least 38 bytes on the wire.
            assert group.range_bytes <= max(128 * group.messages_open, 2 * len(data))
    except RemoteProtocolError:
        pass


@st.composite
def plans(draw):
    """Messages of one sender, each cut anywhere, its pieces spread over streams in any order."""
    streams = draw(st.integers(1, 4))
    sent, wires = [], [[] for _ in range(streams)]
    pieces = []
    for msg_id in range(draw(st.integers(1, 6))):
        size = draw(st.integers(0, 300) | st.integers(20_000, 4 * NUMEL))
        payload = pattern(size + 4)
        inner = encode.frame(Msg.INIT_PARAMS, payload)
        sent.append(payload)
        edges = sorted({0, len(inner), *draw(st.lists(st.integers(1, len(inner) - 1), max_size=6))})
        for a, b in pairwise(edges):
            pieces.append(chunk(msg_id, len(inner), a, inner[a:b]))
    for piece in draw(st.permutations(pieces)):
        wires[draw(st.integers(0, streams - 1))].append(piece)
    return sent, [b"".join(wire) for wire in wires]


@settings(max_examples=50)
@given(plans(), st.data())
def test_chunks_over_streams_in_any_order_give_every_message_once(plan, data):
    sent, wires = plan
    group = Reassembly(SERVER)
    readers = [FrameReader(SERVER, group) for _ in wires]
    got = []
    while any(wires):
        stream = data.draw(st.sampled_from([n for n, wire in enumerate(wires) if wire]))
        count = data.draw(st.integers(1, 60_000))
        piece, wires[stream] = wires[stream][:count], wires[stream][count:]
        got += [bytes(payload) for _, payload in readers[stream].feed(piece)]
    assert sorted(got) == sorted(sent)
    assert group.messages_open == group.bytes_open == 0
    assert not any(reader.eof() for reader in readers)


@settings(max_examples=20)
@given(st.integers(0, 4 * NUMEL), st.integers(0, 2**64 - 1), st.integers(1, 4))
def test_what_chunk_message_sends_is_what_a_reader_gives(size, msg_id, streams):
    body = pattern(size)
    with mock.patch.object(encode, "STRIPE_BYTES_MIN", 1000):
        gathers = list(encode.chunk_message(Msg.INIT_PARAMS, encode.init_head(3), body, msg_id,
                                            streams))
        assert len(gathers) == encode.chunk_count(4, size, streams)
    got, error = events(SERVER, [b"".join(gather) for gather in gathers])
    assert (got, error) == ([(Msg.INIT_PARAMS, encode.init_head(3) + body)], None)
    assert sum(len(part) for gather in gathers for part in gather) == (
        len(gathers) * (HEADER_BYTES + 24) + HEADER_BYTES + 4 + size
    )
