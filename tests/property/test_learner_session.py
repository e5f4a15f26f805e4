"""The session under any interleaving: acceptance against a model, and both ends of the wire.

A whole script of server messages is cut into pieces of any size, spread over the streams, and the
streams are read in any order: what the learner sees may depend only on what was sent.
"""

import contextlib
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncer.errors import RemoteProtocolError, SyncerError
from syncer.layout import AVG, RDA, FragmentLayout, Layout
from syncer.learner.introduction import Introduction
from syncer.learner.session import Phase, Session
from syncer.learner.tensor_messages import TensorMessage
from syncer.protocol import (
    DTYPE_BF16,
    DTYPE_F32,
    DTYPE_Q4,
    HEADER_BYTES,
    Msg,
    RunState,
    bulk_dtype,
    tensor_bytes,
)
from syncer.wire import encode
from syncer.wire.extended import NoticeText, Welcome, encode_notice, encode_welcome
from syncer.wire.extension import Held
from syncer.wire.frames import FrameReader, Reassembly
from syncer.wire.hello import parse_hello
from syncer.wire.limits import Limits
from syncer.wire.messages import Bcast, FinalFragment, Manifest, Pull, parse_init
from tests.bulk_frames import encode_bcast, encode_final_fragment

LAYOUT = Layout((FragmentLayout(AVG, (2,)), FragmentLayout(RDA, (1, 2)), FragmentLayout(RDA, (9,))))
COUNT = len(LAYOUT.fragments)


def make(dtype: int = DTYPE_F32, num_streams: int = 2, *, introduced: bool = False) -> Session:
    return Session(LAYOUT, bytes(32), learner=0, dtype=dtype, num_streams=num_streams,
                   introduction=Introduction(bytes(32)) if introduced else None)


def tensor(fragment: int, content: int, dtype: int) -> bytes:
    size = tensor_bytes(LAYOUT.fragments[fragment].numel, dtype)
    return random.Random(f"{fragment} {content}").randbytes(size)


# --- acceptance --------------------------------------------------------------------------------

arrivals = st.lists(st.tuples(
    st.integers(0, COUNT - 1), st.integers(0, 4),
    st.sampled_from([0, 0, 0, 0, 0, 0, 1]),  # another content now and then
    st.sampled_from([Msg.BCAST_FRAGMENT, Msg.FINAL_FRAGMENT]),
    st.integers(0, 2), st.booleans(), st.booleans()), max_size=40)


@settings(max_examples=200)
@given(arrivals)
def test_acceptance_equals_the_three_rules(script):
    """Replays, old versions and conflicts in any order, over streams, reconnects and drains."""
    session = make()
    generation = 1
    connection = session.connect(generation)
    newest: dict = {}
    heard: set = set()
    drained, expected = [], []
    for fragment, version, content, kind, stream, reconnect, drain in script:
        if reconnect:
            generation += 1
            connection = session.connect(generation)
            heard = set()
        if drain:
            drained += [(b.fragment, b.version) for b in session.take_broadcasts()]
        body = memoryview(tensor(fragment, 10 * version + content, DTYPE_F32))
        data = (encode_bcast(Bcast(fragment, version, body))
                if kind == Msg.BCAST_FRAGMENT
                else encode_final_fragment(FinalFragment(fragment, version, body)))
        seen = newest.get((kind, fragment))
        if kind == Msg.BCAST_FRAGMENT and fragment not in heard:
            heard.add(fragment)  # the first word of a connection holds, unless it is a replay
            seen = seen if seen == (version, content) else None
        if seen is not None and seen[0] == version and seen[1] != content:
            with pytest.raises(RemoteProtocolError, match="other bytes"):
                connection.feed(stream, data)
            assert session.error is not None
            break
        accepted = connection.feed(stream, data)
        assert bool(accepted) == (seen is None or version > seen[0])
        if accepted:
            newest[kind, fragment] = version, content
            if kind == Msg.BCAST_FRAGMENT:  # the newest takes the place of one not taken yet
                kept, waiting = expected[:len(drained)], expected[len(drained):]
                expected = [*kept, *(each for each in waiting if each[0] != fragment),
                            (fragment, version)]
    queued = [(b.fragment, b.version) for b in session.take_broadcasts()]
    assert drained + queued == expected


connections = st.lists(st.tuples(
    st.booleans(),  # to another process of the server
    st.integers(0, 2**COUNT - 1),  # what it keeps, if it is held
    st.lists(st.tuples(st.integers(0, COUNT - 1), st.integers(0, 4), st.integers(0, 1),
                       st.booleans()), max_size=12)), max_size=8)


@settings(max_examples=200)
@given(connections)
def test_what_is_held_is_what_was_accepted_last_and_of_whom(script):
    """Over processes and connections that keep any part of it, taken by the trainer or not."""
    session = make(introduced=True)
    process = 1
    held: dict = {}  # fragment -> version, content, process
    for generation, (another, keeps, arriving) in enumerate(script, 1):
        process += another
        connection = session.connect(generation)
        said = parse_hello(connection.openings[0][HEADER_BYTES:], key=None, learners=1).extension
        assert said.held == tuple(
            Held(held[f][2], held[f][0]) if f in held else None for f in range(COUNT))
        kept = {f for f in held if keeps >> f & 1}
        connection.feed(0, welcome(process, kept))
        heard = set(kept)
        assert set(range(COUNT)) - session.unheard == kept
        for fragment, version, content, drain in arriving:
            body = memoryview(tensor(fragment, 10 * version + content, DTYPE_F32))
            seen = held.get(fragment)
            equal = seen is not None and seen[:2] == (version, content)
            if fragment in heard and seen[0] == version and not equal:
                with pytest.raises(RemoteProtocolError, match="other bytes"):
                    connection.feed(1, encode_bcast(Bcast(fragment, version, body)))
                return
            news = not equal and (fragment not in heard or version > seen[0])
            assert bool(connection.feed(1, encode_bcast(Bcast(fragment, version, body)))) == news
            if news or fragment not in heard:
                held[fragment] = version, content, process
            heard.add(fragment)
            if drain:
                session.take_broadcasts()
        session.take_broadcasts()
        session.advance(1)
        for fragment in range(COUNT):
            connection.feed(0, encode.encode_pull(Pull(fragment, 1, 1)))
        assert {pull.fragment for pull in session.due_pulls()} == heard, (
            "only what holds on this connection is an anchor")


def welcome(process: int, kept: set[int]) -> bytes:
    return encode_welcome(Welcome(process, process, 9, 20, 1, 1, 0.0, RunState.RUNNING, "s",
                                  kept=tuple(f in kept for f in range(COUNT))))


@settings(max_examples=200)
@given(st.integers(0, 2**32))
def test_an_introduced_learner_survives_any_bytes_with_a_sentence(seed):
    """What a server that has gone mad sends is an error of the protocol, at any place."""
    rng = random.Random(seed)
    session = make(introduced=True)
    good = welcome(1, set()) + encode_notice(NoticeText(1, "waits")) + encode_bcast(
        Bcast(0, 3, memoryview(tensor(0, 3, DTYPE_F32))))
    data = bytearray(good)
    for _ in range(rng.randrange(4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    connection = session.connect(1)
    with contextlib.suppress(SyncerError):
        for start in range(0, len(data), 17):
            connection.feed(0, bytes(data[start:start + 17]))
    assert connection.ready or not session.broadcasts


# --- any split, any order of streams -----------------------------------------------------------


def cut(rng: random.Random, frame: bytes, msg_id: int) -> list[bytes]:
    """The frame as CHUNKs cut anywhere, in any order."""
    inside = {rng.randrange(len(frame) + 1) for _ in range(rng.randrange(4))}
    edges = sorted(inside | {0, len(frame)})
    pieces = [encode.frame(Msg.CHUNK, b"".join(
        n.to_bytes(8, "little") for n in (msg_id, len(frame), start)) + frame[start:stop])
        for start, stop in itertools.pairwise(edges)]
    rng.shuffle(pieces)
    return pieces


def interleaved(rng: random.Random, streams: list[bytes]):
    """(stream, bytes) in any order and size, each stream in its own order."""
    at = [0] * len(streams)
    while any(position < len(data) for position, data in zip(at, streams, strict=True)):
        stream = rng.randrange(len(streams))
        size = min(rng.choice([1, 3, 17, 60, 400]), len(streams[stream]) - at[stream])
        if size:
            yield stream, streams[stream][at[stream]:at[stream] + size]
            at[stream] += size


@settings(max_examples=150)
@given(st.integers(0, 2**32), st.sampled_from([DTYPE_F32, DTYPE_BF16, DTYPE_Q4]),
       st.integers(0, 4))
def test_a_servers_script_in_any_split_and_order(seed, dtype, num_streams):
    rng = random.Random(seed)
    session = make(dtype, num_streams)
    streams = [bytearray() for _ in range(1 + num_streams)]
    pulls, msg_id = [], 0

    def spread(frame: bytes) -> None:
        nonlocal msg_id
        if rng.random() < 0.2:
            rng.choice(streams).extend(frame)
            return
        for piece in cut(rng, frame, msg_id):
            rng.choice(streams).extend(piece)
        msg_id += 1

    top = [0] * COUNT
    for step in range(1, rng.randrange(2, 12)):
        fragment = rng.randrange(COUNT)
        top[fragment] = step
        body = memoryview(tensor(fragment, step, bulk_dtype(dtype)))
        spread(encode_bcast(Bcast(fragment, step, body)))
        pulls.append(Pull(rng.randrange(COUNT), step, 1))
        streams[0].extend(encode.encode_pull(pulls[-1]))
    for fragment in range(COUNT):
        body = memoryview(tensor(fragment, 99, DTYPE_F32))
        spread(encode_final_fragment(FinalFragment(fragment, top[fragment], body)))
    if with_manifest := rng.random() < 0.5:
        streams[0].extend(encode.encode_manifest(Manifest(20, tuple(top))))

    connection = session.connect(rng.getrandbits(64) or 1)
    taken = []
    for stream, data in interleaved(rng, [bytes(s) for s in streams]):
        connection.feed(stream, data)
        if rng.random() < 0.1:
            taken += session.take_broadcasts()
    taken += session.take_broadcasts()

    assert session.pulls == [pull for index, pull in enumerate(pulls) if all(
        later.fragment != pull.fragment for later in pulls[index + 1:])]
    last = [0] * COUNT
    for fragment, version, body in taken:
        assert version > last[fragment]
        assert bytes(body) == tensor(fragment, version, bulk_dtype(dtype))
        last[fragment] = version
    assert [entry[0] if entry else 0 for entry in session.accepted] == top
    if with_manifest:
        assert session.phase is Phase.FINALIZING
        assert [bytes(t) for t in session.final.tensors()] == [
            tensor(f, 99, DTYPE_F32) for f in range(COUNT)]
    else:
        assert last == top
        assert session.final.tensors() is None


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.integers(0, 4))
def test_what_a_learner_sends_arrives_in_any_split_and_order(seed, num_streams):
    rng = random.Random(seed)
    session = make(DTYPE_BF16, num_streams)
    connection = session.connect(1)
    streams = [bytearray() for _ in range(connection.streams)]
    sent = []
    for _ in range(rng.randrange(1, 9)):
        fragment = rng.randrange(COUNT)
        body = tensor(fragment, rng.randrange(100), DTYPE_BF16)
        message: TensorMessage = session.tensors.init(fragment, body)
        sent.append((fragment, body))
        for stream, buffers in connection.stripe(message):
            streams[stream].extend(b"".join(buffers))

    limits = Limits.for_server(LAYOUT, DTYPE_BF16)
    reassembly = Reassembly(limits)
    readers = [FrameReader(limits, reassembly) for _ in streams]
    found = []
    for stream, data in interleaved(rng, [bytes(s) for s in streams]):
        for msg_type, payload in readers[stream].feed(data):
            assert msg_type == Msg.INIT_PARAMS
            init = parse_init(payload, 0, LAYOUT, DTYPE_BF16)
            found.append((init.fragment, bytes(init.tensor)))
    assert sorted(found) == sorted(sent)
    assert reassembly.bytes_open == 0
