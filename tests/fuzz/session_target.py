"""The fuzz target of what a server may say: to a learner, introduced or not, and to a reader.

The sans-IO sessions get the same bytes whole, one by one and in any pieces, and must say the same;
what no server sends ends them with a `SyncerError` of one line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from random import Random
from typing import Any

from syncer.errors import SyncerError
from syncer.layout import AVG, RDA, FragmentLayout, Layout
from syncer.learner.introduction import Introduction
from syncer.learner.session import Session
from syncer.learner.situation import awaited, standing
from syncer.protocol import DTYPE_F32, DTYPE_Q4, Q4_BLOCK_BYTES, RunState, tensor_bytes
from syncer.reader.cut_session import ReaderSession, ReceivedCut
from syncer.steps import version_at
from syncer.wire import encode
from syncer.wire.extended import (
    NoticeText,
    SessionLayout,
    Welcome,
    encode_notice,
    encode_session_layout,
    encode_welcome,
)
from syncer.wire.messages import Bcast, BcastChange, FinalFragment, Manifest, Pull
from tests.bulk_frames import encode_bcast, encode_change, encode_final_fragment
from tests.fuzz.target import Target, must
from tests.fuzz.wire_targets import ONE_BY_ONE_MAX, one_line

LAYOUT = Layout((FragmentLayout(AVG, (2,)), FragmentLayout(RDA, (3,))))
FRAGMENTS = len(LAYOUT.fragments)
LEARNER, INTRODUCED, READER = range(3)


def to_learner(introduced: bool, pieces: Iterable[bytes]) -> list[Any]:
    """What a learner makes of these bytes on its control socket."""
    session = Session(LAYOUT, bytes(32), learner=1, dtype=DTYPE_F32, num_streams=1,
                      introduction=Introduction(bytes(32)) if introduced else None)
    connection = session.connect(1)
    try:
        for piece in pieces:
            connection.feed(0, piece)
    except SyncerError as error:
        one_line(error)
    found: list[Any] = [session.error and one_line(session.error), session.phase, session.ended]
    found += [(bcast.fragment, bcast.version, bytes(bcast.tensor))
              for bcast in session.take_broadcasts()]
    session.advance(1)
    found += [session.due_pulls(), standing(session), awaited(session), session.unapplied()]
    return found


def to_reader(pieces: Iterable[bytes]) -> list[Any]:
    """What a reader makes of them."""
    session, found = ReaderSession(DTYPE_F32, follows=True), []
    try:
        for piece in pieces:
            view = memoryview(piece)
            while view:
                window = session.buffer()
                count = min(len(window), len(view))
                window[:count] = view[:count]
                view = view[count:]
                for each in session.received(count):
                    found.append((each.step, [bytes(t) for t in each.tensors])
                                 if isinstance(each, ReceivedCut) else repr(each))
    except SyncerError as error:
        return [one_line(error), *found]
    return [None, *found]


def check(data: bytes) -> bool:
    who, stream = data[0] % 3 if data else LEARNER, data[1:]
    listen: Callable[[Iterable[bytes]], list[Any]] = (
        to_reader if who == READER else lambda pieces: to_learner(who == INTRODUCED, pieces))
    whole = listen([stream])
    step = max(1, len(stream) // ONE_BY_ONE_MAX)
    must(listen([stream[n : n + step] for n in range(0, len(stream), step)]) == whole,
         "byte by byte is something else to whoever hears it")
    random = Random(len(stream))
    cuts = sorted({0, len(stream), *(random.randrange(len(stream) + 1) for _ in range(5))})
    must(listen([stream[a:b] for a, b in pairwise(cuts)]) == whole,
         "another cut is something else to whoever hears it")
    return whole[0] is None


def make(random: Random) -> bytes:
    """A server that greets, sends a cut or two, pulls, and perhaps ends the run."""
    who = random.randrange(3)
    parts = []
    if who != LEARNER:
        kept = (False,) * (0 if who == READER else FRAGMENTS)
        changes = DTYPE_Q4 if who == INTRODUCED and random.random() < 0.7 else 0
        parts.append(encode_welcome(Welcome(1, 7, 2, 40, 4, 2, 24.0, random.choice(list(RunState)),
                                            "syncer 1.0", kept=kept, changes=changes)))
        parts.append(encode_notice(NoticeText(1, "waiting for learner 1")))
    if who == READER:
        parts.append(encode_session_layout(SessionLayout(
            DTYPE_F32, LAYOUT, bytes(32), bytes(32))))
    step = random.choice((0, 1, 2, 7, 2**40))
    for _ in range(random.choice((1, 2))):
        parts += _cut(random, step, final=False)
        if who == READER:
            parts.append(_manifest(step))
        else:
            parts += _changes(random, step) if who == INTRODUCED else []
            parts.append(encode.encode_pull(Pull(random.randrange(FRAGMENTS), step + 1, 1)))
        step += random.choice((1, 2))
    if random.random() < 0.4:
        parts += [*_cut(random, step, final=True), _manifest(step)]
        if who == READER:  # a learner acknowledges before it may hear this
            parts.append(encode.encode_shutdown())
    return bytes([who]) + b"".join(parts)


def _manifest(step: int) -> bytes:
    return encode.encode_manifest(Manifest(step, tuple(
        version_at(step, fragment, FRAGMENTS) for fragment in range(FRAGMENTS))))


def _cut(random: Random, step: int, *, final: bool) -> list[bytes]:
    frames = []
    for fragment, shape in enumerate(LAYOUT.fragments):
        tensor = memoryview(random.randbytes(tensor_bytes(shape.numel, DTYPE_F32)))
        version = version_at(step, fragment, FRAGMENTS)
        frames.append(encode_final_fragment(FinalFragment(fragment, version, tensor)) if final
                      else encode_bcast(Bcast(fragment, version, tensor)))
    random.shuffle(frames)
    return frames


def _changes(random: Random, step: int) -> list[bytes]:
    """Of what the cut of this step has brought, one of another and so on, in any order."""
    fragment = random.randrange(FRAGMENTS)
    base = version_at(step, fragment, FRAGMENTS)
    frames = [encode_change(BcastChange(fragment, base + n, base + n + 1, memoryview(
        random.randbytes(Q4_BLOCK_BYTES)))) for n in range(random.randrange(4))]
    random.shuffle(frames)
    return frames


TARGET = Target(make, check)
