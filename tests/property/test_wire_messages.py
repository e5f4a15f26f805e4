"""Every message survives its own encoding, and no payload makes a parser raise anything else."""

from hypothesis import given
from hypothesis import strategies as st

from syncer.errors import RemoteProtocolError
from syncer.layout import AVG, ISO, RDA, FragmentLayout, Layout
from syncer.protocol import DTYPE_F32, DTYPE_Q4, HEADER_BYTES, bulk_dtype, tensor_bytes
from syncer.wire import encode, extended
from syncer.wire import messages as m
from syncer.wire.frames import FrameReader, Reassembly
from syncer.wire.hello import Hello, parse_hello
from syncer.wire.identity import Identity, Pins, identity_refusal, mismatch
from syncer.wire.limits import Limits
from tests.bulk_frames import (
    encode_bcast,
    encode_change,
    encode_final_fragment,
    encode_init,
    encode_push,
)

U16, U32, U64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))
POSITIVE32, POSITIVE64 = st.integers(1, 2**32 - 1), st.integers(1, 2**64 - 1)
DTYPES = st.sampled_from([1, 2, 3])
HASHES = st.binary(min_size=32, max_size=32)
GROUPS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=16)


@st.composite
def fragments(draw, numel_max: int = 2**40) -> FragmentLayout:
    if draw(st.booleans()):
        side = st.integers(1, int(numel_max**0.5))
        shapes = tuple(draw(st.lists(st.tuples(side, side), min_size=1, max_size=4)))
        return FragmentLayout(ISO, tuple(rows * cols for rows, cols in shapes), shapes)
    numels = draw(st.lists(st.integers(1, numel_max), min_size=1, max_size=4))
    return FragmentLayout(draw(st.sampled_from([AVG, RDA])), tuple(numels))


def layouts(numel_max: int = 2**40):
    return st.lists(fragments(numel_max), min_size=1, max_size=4).map(lambda f: Layout(tuple(f)))


HELLOS = st.builds(
    Hello,
    learner=st.integers(0, 9),
    generation=POSITIVE64,
    dtype=DTYPES,
    layout=layouts(),
    fingerprint=HASHES,
    contract=HASHES,
    profile_hash=st.none() | HASHES,
    num_streams=st.integers(0, 256),
    compat_group=st.none() | GROUPS,
    extension=st.none(),
)
KEYS = st.none() | st.binary(min_size=1, max_size=40)


def outcome(parse, payload) -> tuple:
    """(message, None) or (None, text of the refusal); any other error fails the test."""
    try:
        return parse(payload), None
    except RemoteProtocolError as error:
        return None, str(error)


@given(HELLOS, KEYS)
def test_hello_round_trip(hello, key):
    payload = encode.encode_hello(hello, key)[HEADER_BYTES:]
    parsed = parse_hello(memoryview(payload), key=key, learners=10)
    assert parsed == hello
    identity = Identity.of_hello(hello)
    assert mismatch(identity, parsed) is None
    assert identity_refusal(identity, parsed, Pins(hello.profile_hash or bytes(32))) is None


def parsers(layout: Layout, dtype: int) -> list:
    return [
        m.parse_data_hello,
        m.parse_final_ack,
        m.parse_budget_done,
        m.parse_shutdown,
        m.parse_error,
        lambda p: m.parse_init(p, 0, layout, dtype),
        lambda p: m.parse_push(p, int.from_bytes(p[:4], "little"), layout, dtype),
        lambda p: m.parse_heartbeat(p, int.from_bytes(p[:4], "little")),
        lambda p: m.parse_pull(p, layout),
        lambda p: m.parse_bcast(p, layout, dtype),
        lambda p: m.parse_final_fragment(p, layout),
        lambda p: m.parse_manifest(p, layout),
        lambda p: m.parse_bcast_change(p, layout),
    ]


SMALL = [
    (
        st.builds(m.DataHello, U32, POSITIVE64, U16, st.just(b"")),
        encode.encode_data_hello,
        m.parse_data_hello,
    ),
    (
        st.builds(m.Heartbeat, st.just(7), U64),
        encode.encode_heartbeat,
        lambda p: m.parse_heartbeat(p, 7),
    ),
    (st.builds(m.FinalAck, U64), encode.encode_final_ack, m.parse_final_ack),
    (st.builds(m.BudgetDone, U64), encode.encode_budget_done, m.parse_budget_done),
    (
        st.builds(extended.Fate, st.integers(0, 6), U64, U32, st.integers(0, 255)),
        extended.encode_fate,
        lambda p: extended.parse_fate(p, 7),
    ),
]


@given(st.data())
def test_small_messages_round_trip(data):
    messages, encoder, parser = data.draw(st.sampled_from(SMALL))
    message = data.draw(messages)
    assert parser(memoryview(encoder(message))[HEADER_BYTES:]) == message


@given(st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Zl", "Zp", "Cs")),
               max_size=300))
def test_error_text_round_trip(text):
    assert m.parse_error(encode.encode_error(text)[HEADER_BYTES:]) == text


@given(layouts(numel_max=600), DTYPES, st.data())
def test_messages_about_fragments_round_trip(layout, dtype, data):
    fragment = data.draw(st.integers(0, len(layout.fragments) - 1))
    numel = layout.fragments[fragment].numel

    def body(size: int) -> memoryview:
        return memoryview(bytes(data.draw(st.integers(0, 255)) for _ in range(3)) * size)[:size]

    bulk = body(tensor_bytes(numel, bulk_dtype(dtype)))
    delta = body(tensor_bytes(numel, dtype))
    exact = body(tensor_bytes(numel, DTYPE_F32))
    versions = tuple(data.draw(U64) for _ in layout.fragments)
    head = [data.draw(kind) for kind in (U64, POSITIVE32, U64, U64, POSITIVE32, U64)]
    server, client = parsers(layout, dtype)[5:8], parsers(layout, dtype)[8:]
    for message, encoder, parser in [
        (m.Init(fragment, bulk), encode_init, server[0]),
        (m.Push(7, fragment, *head, delta), encode_push, server[1]),
        (m.Pull(fragment, data.draw(U64), data.draw(U32)), encode.encode_pull, client[0]),
        (m.Bcast(fragment, versions[0], bulk), encode_bcast, client[1]),
        (m.FinalFragment(fragment, versions[0], exact), encode_final_fragment, client[2]),
        (m.Manifest(versions[0], versions), encode.encode_manifest, client[3]),
        (m.BcastChange(fragment, 3, 4 + versions[0] % 2**60, body(tensor_bytes(numel, DTYPE_Q4))),
         encode_change, client[4]),
    ]:
        wire = encoder(message)
        limits = (Limits.for_client(layout, dtype, changes=True) if parser in client
                  else Limits.for_server(layout, dtype))
        [(_, payload)] = FrameReader(limits).feed(wire)
        assert parser(payload) == message


@given(layouts(numel_max=600), DTYPES, st.data())
def test_two_ends_talk_over_streams(layout, dtype, data):
    """HELLO, INITs and PUSHes of a learner to a syncer, and broadcasts back, in chunks."""
    hello = Hello(0, 5, dtype, layout, b"f" * 32, b"c" * 32, num_streams=2)
    control = FrameReader(Limits.first_frame())
    [(_, payload)] = control.feed(encode.encode_hello(hello))
    accepted = parse_hello(payload, key=None, learners=1)
    limits = Limits.for_server(accepted.layout, accepted.dtype)
    group = Reassembly(limits)
    control.limits, control.reassembly = limits, group
    streams = [control, FrameReader(limits, group)]

    def body(size: int) -> bytes:
        return bytes([data.draw(st.integers(0, 255))]) * size

    sent, gathers = [], []
    for fragment, shape in enumerate(layout.fragments):
        init = m.Init(fragment, body(tensor_bytes(shape.numel, bulk_dtype(dtype))))
        delta = body(tensor_bytes(shape.numel, dtype))
        push = m.Push(0, fragment, 1, 1, 0, 1, 1, 10, delta)
        sent += [init, push]
        for msg_type, head, tensor in [
            (2, encode.init_head(fragment), init.tensor),
            (4, encode.push_head(push), delta),
        ]:
            gathers += encode.chunk_message(msg_type, head, tensor, len(gathers))
    got = []
    for gather in data.draw(st.permutations(gathers)):
        for msg_type, payload in streams[data.draw(st.integers(0, 1))].feed(b"".join(gather)):
            parser = {2: m.parse_init, 4: m.parse_push}[msg_type]
            got.append(parser(payload, accepted.learner, accepted.layout, accepted.dtype))
    assert sorted(got, key=repr_key) == sorted(sent, key=repr_key)

    client = FrameReader(Limits.for_client(layout, dtype))
    for fragment, shape in enumerate(layout.fragments):
        tensor = body(tensor_bytes(shape.numel, bulk_dtype(dtype)))
        head = encode.bcast_head(fragment, 3)
        wire = b"".join(b"".join(g) for g in encode.chunk_message(5, head, tensor, fragment))
        [(_, payload)] = client.feed(wire)
        assert m.parse_bcast(payload, layout, dtype) == m.Bcast(fragment, 3, tensor)


def repr_key(message) -> tuple:
    return type(message).__name__, message.fragment
