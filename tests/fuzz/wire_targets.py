"""Fuzz targets of the wire: frames in any pieces, HELLO and its block, the other messages.

Whatever is accepted must mean the same once it is written again; whatever is refused is refused by
a `RemoteProtocolError` of one line, and the same for any cut of the bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from itertools import pairwise
from random import Random
from typing import Any

from syncer.errors import LocalProtocolError, RemoteProtocolError
from syncer.layout import AVG, ISO, RDA, FragmentLayout, Layout
from syncer.protocol import DTYPE_F32, DTYPE_Q4, HEADER_BYTES, Msg, RunState
from syncer.wire import encode, extended
from syncer.wire import messages as m
from syncer.wire.contracts import run_contract
from syncer.wire.extension import (
    Extension,
    Held,
    Role,
    RunClaim,
    Sender,
    encode_extension,
    parse_extension,
)
from syncer.wire.frames import FrameReader
from syncer.wire.hello import Hello, parse_hello
from syncer.wire.layout import scan_layout
from syncer.wire.limits import Limits
from syncer.wire.names import FragmentNames, fingerprint
from tests.bulk_frames import encode_bcast, encode_final_fragment, encode_init, encode_push
from tests.fuzz.mutate import EDGES
from tests.fuzz.target import Target, must

SMALL = Layout((FragmentLayout(RDA, (3, 2)), FragmentLayout(AVG, (50,)),
                FragmentLayout(ISO, (6,), ((2, 3),))))
LARGE = Layout((FragmentLayout(AVG, (5000,)),))
"""Its messages are larger than what a reader receives at once."""
SIDES = (Limits.for_server(SMALL, DTYPE_F32), Limits.for_client(SMALL, DTYPE_F32, extended=True,
                                                               changes=True),
         Limits.first_frame(), Limits.for_server(LARGE, DTYPE_Q4, extended=True),
         Limits.for_client(LARGE, DTYPE_F32), Limits.for_reader_group(), Limits.for_new_reader())
LEARNERS, KEY = 4, b"fuzz"
ONE_BY_ONE_MAX = 300
"""Longer inputs are cut into so many pieces instead."""


def one_line(error: Exception) -> str:
    text = str(error)
    must(text and "\n" not in text, f"a refusal is one line: {text!r}")
    return text


def edge(random: Random, bits: int) -> int:
    number = random.choice(EDGES) if random.random() < 0.5 else random.getrandbits(bits)
    return number % 2**bits


def chunk(msg_id: int, total: int, offset: int, piece: bytes) -> bytes:
    return encode.frame(Msg.CHUNK, struct.pack("<QQQ", msg_id, total, offset) + piece)


# -------------------------------------------------------------------------------------- frames
def make_frames(random: Random) -> bytes:
    """Which side reads, how the bytes are cut, and a few frames of that side."""
    side = random.randrange(len(SIDES))
    limits = SIDES[side]
    parts = [bytes([side, random.randrange(256)])]
    for _ in range(random.randrange(5)):
        msg_type, most = random.choice(sorted(limits.frame_bytes_max.items()))
        size = random.randrange(min(most, random.choice((1, 40, 200, 30_000))) + 1)
        if msg_type == Msg.CHUNK:
            parts += _pieces(random, limits)
        else:
            parts.append(encode.frame(msg_type, random.randbytes(min(size, 64)).ljust(size, b"x")))
    return b"".join(parts)


def _pieces(random: Random, limits: Limits) -> list[bytes]:
    inner_type = random.choice([t for t in limits.frame_bytes_max if t != Msg.CHUNK])
    size = random.randrange(min(limits.inner_bytes_max, random.choice((20, 100, 40_000))))
    whole = encode.frame(inner_type, random.randbytes(min(size, 64)).ljust(size, b"y"))
    edges = sorted({0, len(whole), *(random.randrange(len(whole)) for _ in range(3))})
    msg_id = random.randrange(3)
    pieces = [chunk(msg_id, len(whole), a, whole[a:b])
              for a, b in pairwise(edges)]
    random.shuffle(pieces)
    return pieces


def received(limits: Limits, pieces: Iterable[bytes]) -> tuple[list[tuple[int, bytes]], str | None]:
    """What a reader gives of these pieces, and the refusal that ended it."""
    reader, got = FrameReader(limits), []
    largest = max(limits.frame_bytes_max.values())
    try:
        for piece in pieces:
            for msg_type, payload in reader.feed(piece):
                got.append((msg_type, bytes(payload)))
            must(reader.bytes_held <= 16384 + largest, "a reader holds more than one frame")
            group = reader.reassembly
            if group is not None:
                must(group.messages_open <= 64 and group.bytes_open <= limits.open_bytes_max,
                     "reassembly holds more than its limits")
    except RemoteProtocolError as error:
        text = one_line(error)
        try:
            next(reader)
        except RemoteProtocolError as again:
            must(str(again) == text, "another refusal the second time")
        else:
            must(False, "a refused stream goes on")
        return got, text
    return got, None


def check_frames(data: bytes) -> bool:
    limits, stream = SIDES[data[0] % len(SIDES) if data else 0], data[2:]
    whole = received(limits, [stream])
    step = max(1, len(stream) // ONE_BY_ONE_MAX)
    must(received(limits, [stream[n : n + step] for n in range(0, len(stream), step)]) == whole,
         "byte by byte gives something else")
    random = Random(data[1] if len(data) > 1 else 0)
    cuts = sorted({0, len(stream), *(random.randrange(len(stream) + 1) for _ in range(6))})
    must(received(limits, [stream[a:b] for a, b in pairwise(cuts)]) == whole,
         "another cut gives something else")
    return whole[1] is None


# --------------------------------------------------------------------------------------- HELLO
def some_layout(random: Random) -> Layout:
    fragments = []
    for _ in range(random.choice((1, 1, 2, 3))):
        if random.random() < 0.3:
            shapes = tuple((random.randrange(1, 9), random.randrange(1, 9))
                           for _ in range(random.choice((1, 1, 2))))
            fragments.append(FragmentLayout(ISO, tuple(a * b for a, b in shapes), shapes))
        else:
            numels = tuple(random.choice((1, 7, 2**20, 2**31))
                           for _ in range(random.choice((1, 2))))
            fragments.append(FragmentLayout(random.choice((AVG, RDA)), numels))
    return Layout(tuple(fragments))


def some_names(random: Random, layout: Layout) -> tuple[FragmentNames, ...]:
    return tuple(FragmentNames(tuple(
        (f"w{f}.{t}", fragment.shapes[t] if fragment.shapes else (1,) * random.randrange(3)
         + (numel,)) for t, numel in enumerate(fragment.numels)), random.random() < 0.3)
        for f, fragment in enumerate(layout.fragments))


def some_hello(random: Random) -> Hello:
    layout = some_layout(random)
    learner, contract, block = random.randrange(LEARNERS), random.randbytes(32), None
    mark = random.randbytes(32)
    if random.random() < 0.6:
        role = random.choice((Role.LEARNER, Role.LEARNER, Role.READER, Role.FOLLOWER))
        names = some_names(random, layout) if random.random() < 0.5 else None
        if names is not None and learner == 0 and role is Role.LEARNER:
            mark = fingerprint(layout, names)
        run = RunClaim(random.randbytes(32), "blue") if random.random() < 0.5 else None
        if run is not None:
            contract = run_contract(*run)
        held = tuple(random.choice((None, Held(random.getrandbits(64) or 1, edge(random, 63))))
                     for _ in layout.fragments) if random.random() < 0.5 else None
        client = random.choice((None, "syncer 1.0 on a", "ü"))
        block = Extension(client, held, names if learner == 0 else None, role, run)
    dtype = random.choice((1, 2, 3)) if block is None or block.role is Role.LEARNER else 1
    streams = 0 if block is not None and block.role is not Role.LEARNER else random.randrange(5)
    return Hello(learner, random.getrandbits(64) or 1, dtype, layout, mark, contract,
                 random.choice((None, random.randbytes(32))), streams,
                 random.choice((None, None, "h100", "ü")), block)


def make_hello(random: Random) -> bytes:
    """Whether there is a key, and a payload."""
    keyed = random.random() < 0.1
    payload = encode.encode_hello(some_hello(random), KEY if keyed else None)[HEADER_BYTES:]
    return bytes([keyed]) + payload


def check_hello(data: bytes) -> bool:
    key = KEY if data[:1] == b"\x01" else None
    payload = data[1:]
    try:
        hello = parse_hello(memoryview(payload), key=key, learners=LEARNERS)
    except RemoteProtocolError as error:
        text = one_line(error)
        must(text.startswith(("HELLO authentication failed", "invalid HELLO: ",
                              "invalid HELLO extension: ")), f"another beginning: {text}")
        return False
    again = encode.encode_hello(hello, key)[HEADER_BYTES:]
    if hello.extension is None:
        must(again == payload, "a HELLO does not give its own bytes again")
    must(parse_hello(memoryview(again), key=key, learners=LEARNERS) == hello,
         "a HELLO does not mean the same once written again")
    try:
        Limits.for_server(hello.layout, hello.dtype)
    except LocalProtocolError as error:
        one_line(error)
    return True


# --------------------------------------------------------------------------------------- block
def make_block(random: Random) -> bytes:
    """Who sends it (see `sender_of`), and the records of a block."""
    hello = some_hello(random)
    while hello.extension is None:
        hello = some_hello(random)
    layout = encode.encode_layout(hello.layout)
    block = encode_extension(hello.extension)[:-8]
    return b"".join([bytes([hello.learner, hello.dtype, len(hello.layout.fragments)]),
                     hello.fingerprint, hello.contract, struct.pack("<H", len(layout)), layout,
                     block])


def check_block(data: bytes) -> bool:
    if len(data) < 69:
        return False
    size = int.from_bytes(data[67:69], "little")
    try:
        layout = scan_layout(memoryview(data[69 : 69 + size]), 0, data[2])
    except RemoteProtocolError as error:
        one_line(error)
        return False
    sender = Sender(data[0], data[1], layout, data[3:35], data[35:67])
    try:
        block = parse_extension(memoryview(data)[69 + size :], sender)
    except RemoteProtocolError as error:
        one_line(error)
        return False
    again = memoryview(encode_extension(block))[:-8]
    must(parse_extension(again, sender) == block, "a block does not mean the same written again")
    return True


# ------------------------------------------------------------------------------------ messages
def _first(payload: Any) -> int:
    return int.from_bytes(payload[:4], "little")


PARSERS: tuple[tuple[Callable[[Any], Any], Callable[[Any], bytes], bool], ...] = (
    (m.parse_data_hello, lambda hello: encode.encode_data_hello(hello) + hello.proof, True),
    (m.parse_final_ack, encode.encode_final_ack, True),
    (m.parse_budget_done, encode.encode_budget_done, True),
    (lambda p: m.parse_init(p, 0, SMALL, DTYPE_F32), encode_init, True),
    (lambda p: m.parse_push(p, _first(p), SMALL, DTYPE_F32), encode_push, True),
    (lambda p: m.parse_heartbeat(p, _first(p)), encode.encode_heartbeat, True),
    (lambda p: m.parse_pull(p, SMALL), encode.encode_pull, True),
    (lambda p: m.parse_bcast(p, SMALL, DTYPE_F32), encode_bcast, True),
    (lambda p: m.parse_final_fragment(p, SMALL), encode_final_fragment, True),
    (lambda p: m.parse_manifest(p, SMALL), encode.encode_manifest, True),
    (m.parse_error, encode.encode_error, False),
    (lambda p: extended.parse_welcome(p, 3), extended.encode_welcome, False),
    (extended.parse_notice, extended.encode_notice, False),
    (extended.parse_report, extended.encode_report, False),
    (extended.parse_session_layout, extended.encode_session_layout, False),
)
"""A parser, its encoder, and whether the bytes must come again."""


def make_message(random: Random) -> bytes:
    """Which parser, and a payload that it reads."""
    which = random.randrange(len(PARSERS))
    fragment = random.randrange(3)
    tensor = random.randbytes(4 * SMALL.fragments[fragment].numel)
    step, small = edge(random, 64), edge(random, 32) or 1
    value: Any = (
        m.DataHello(small, step or 1, 3, random.choice((b"", bytes(32)))), m.FinalAck(step),
        m.BudgetDone(step), m.Init(fragment, tensor),
        m.Push(small, fragment, step, small, step, step, small, step, tensor),
        m.Heartbeat(small, step), m.Pull(fragment, step, small), m.Bcast(fragment, step, tensor),
        m.FinalFragment(fragment, step, tensor), m.Manifest(step, (step, 1, 2)), "try again later",
        extended.Welcome(small, step or 1, step, step, 4, 2, 24.0, RunState.RUNNING, "syncer 1.0",
                         random.choice(("", "blue")), 0, (True, False, True)),
        extended.NoticeText(1, "waiting for learner 1"),
        extended.LearnerReport(2.5, None, random.choice((None, 0.1)), 0.9),
        None)[which]
    if value is None:
        layout = some_layout(random)
        names = some_names(random, layout) if random.random() < 0.5 else None
        value = extended.SessionLayout(1, layout, bytes(32), bytes(32), names)
    return bytes([which]) + PARSERS[which][1](value)[HEADER_BYTES:]


def check_message(data: bytes) -> bool:
    if not data:
        return False
    parse, write, exact = PARSERS[data[0] % len(PARSERS)]
    payload = data[1:]
    try:
        value = parse(memoryview(payload))
    except RemoteProtocolError as error:
        one_line(error)
        return False
    try:
        again = write(value)[HEADER_BYTES:]
    except LocalProtocolError as error:  # a text that is longer in what replaces its bytes
        one_line(error)
        return True
    if exact:
        must(again == payload, "a message does not give its own bytes again")
    else:  # repr, since a WELCOME may hold a NaN
        must(repr(parse(memoryview(again))) == repr(value),
             "a message does not mean the same once written again")
    return True


TARGETS = {
    "frames": Target(make_frames, check_frames),
    "hello": Target(make_hello, check_hello),
    "block": Target(make_block, check_block),
    "messages": Target(make_message, check_message),
}
