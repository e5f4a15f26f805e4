"""Tensors that are decoded while they arrive: the same as all at once, however they come.

The real reassembly and group side are played by hand: pieces over several sockets in any order, cut
anywhere, and jobs that run late, in any order and as many at a time as they like.
"""

from __future__ import annotations

import hashlib
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncer import kernels
from syncer.core import events
from syncer.layout import AVG, FragmentLayout, Layout
from syncer.merge.buffers import BufferPool
from syncer.protocol import DTYPE_BF16, DTYPE_F32, DTYPE_Q4, Msg, bulk_dtype, tensor_bytes
from syncer.server import arrival, arrivals, ingest, workers
from syncer.server.decoded import DECODERS
from syncer.wire import encode
from syncer.wire.frames import FrameReader, Reassembly
from syncer.wire.hello import Hello
from syncer.wire.limits import Limits
from syncer.wire.messages import Push
from tests.property.test_wire_reader import chunk

SIZES = {"STEP_ELEMENTS": 256, "HASH_STEP_BYTES": 128, "HASH_ONE_BYTES": 256,
         "HASH_TWO_BYTES": 512, "WARM_BYTES": 192}
NUMELS = 700, 300, 1500


class Failing(arrival.Arrival):
    """Finds no memory while it is said to."""

    fails = False

    def decode_to(self, end):
        if Failing.fails:
            raise MemoryError
        super().decode_to(end)

    def finish(self):
        if Failing.fails:
            raise MemoryError
        super().finish()


class Late:
    """Workers whose jobs run when they are told to; some find no memory the first time."""

    def __init__(self, count):
        self.jobs, self.count = [], count

    def submit(self, job):
        self.jobs.append(job)

    def run(self, index, fails):
        job = self.jobs.pop(index % len(self.jobs))
        if fails:
            self.jobs.append(job)  # as `Shortage` does, whatever it has done so far
            with mock.patch.object(Failing, "fails", True):
                try:
                    job.run()
                except MemoryError:
                    return
            self.jobs.remove(job)
        job.done(job.run() if not fails else None, None)


class Side:
    """A group as `Ingest` sees it, with the readers of its sockets."""

    def __init__(self, dtype, streams=1, keep_wire=False, workers=4):
        layout = Layout(tuple(FragmentLayout(AVG, (numel,)) for numel in NUMELS))
        self.hello = Hello(0, 1, dtype, layout, bytes(32), bytes(32))
        self.generation, self.learner = 1, 0
        self.work, self.ended, self.control = ingest.Intake(), False, SimpleNamespace(paused=False)
        self.workers, self.seen, self.refusal = Late(workers), [], None
        self.ingest = ingest.Ingest(
            self.workers, BufferPool(), handle=self.seen.append, left=self.stop, report=self.stop,
            say_farewell=self.stop, keep_wire=keep_wire)
        self.listen(layout, streams)

    def listen(self, layout, streams):
        limits = Limits.for_server(layout, self.hello.dtype)
        group = Reassembly(limits, partial(self.ingest.arriving, self))
        self.readers = [FrameReader(limits, group) for _ in range(streams)]

    def stop(self, *what):
        raise AssertionError(what)

    def pause(self):
        """What is read here has been sent: the others wait."""

    def end(self, reason, refusal):
        if not self.ended:
            self.ended, self.refusal = True, refusal

    def receive(self, reader, data):
        while data:
            window = reader.buffer()
            count = min(len(window), len(data))
            window[:count] = data[:count]
            data = data[count:]
            reader.received(count)
            for kind, payload in reader:
                self.ingest.frame(self, kind, payload)


def wire_of(values, dtype):
    out = bytearray(tensor_bytes(len(values), dtype))
    if dtype == DTYPE_F32:
        out[:] = values.tobytes()
    else:
        (kernels.encode_bf16 if dtype == DTYPE_BF16 else kernels.encode_q4)(values, out)
    return bytes(out)


def message(side, kind, fragment, values):
    """The frame, its tensor on the wire, and its values as they are to be."""
    dtype = side.hello.dtype if kind == Msg.PUSH_FRAGMENT else bulk_dtype(side.hello.dtype)
    wire = wire_of(values, dtype)
    head = encode.init_head(fragment) if kind == Msg.INIT_PARAMS else encode.push_head(
        Push(0, fragment, 1, 1, 0, 1, 1, 1, b""))
    decoded = np.empty(len(values), np.float32)
    bad = DECODERS[dtype](wire, decoded, kind == Msg.PUSH_FRAGMENT, 1)
    return encode.frame(kind, head + wire), wire, decoded, bad


def sent(side, random, broken):
    """What each socket is going to carry, and the messages that are to come out."""
    rng = np.random.default_rng(random.randrange(100))
    expected, queues = [], [[] for _ in side.readers]
    count = random.randint(1, 4)
    for msg_id in range(count):
        kind = random.choice([Msg.PUSH_FRAGMENT, Msg.INIT_PARAMS])
        fragment = random.randrange(len(NUMELS))
        values = rng.standard_normal(NUMELS[fragment]).astype(np.float32)
        if broken and msg_id == count - 1:
            values[rng.integers(0, len(values), 3)] = np.nan
        frame, wire, decoded, bad = message(side, kind, fragment, values)
        expected.append((kind, fragment, wire, decoded, bad))
        edges = sorted({0, len(frame), *(random.randrange(1, len(frame)) for _ in range(
            random.choice((0, 2, 8))))})
        pieces = list(pairwise(edges))
        if random.random() < 0.5:
            random.shuffle(pieces)
        for start, end in pieces:
            random.choice(queues).append(chunk(msg_id, len(frame), start, frame[start:end]))
    return [b"".join(queue) for queue in queues], expected


@settings(max_examples=200, deadline=None)
@given(st.randoms(use_true_random=True), st.sampled_from([DTYPE_F32, DTYPE_BF16, DTYPE_Q4]))
def test_a_tensor_is_the_same_however_it_arrives(random, dtype):
    with (mock.patch.multiple(arrivals, ROOM_BYTES=random.choice((300, 900)), **SIZES),
          mock.patch.object(arrival, "NEWS_BYTES", random.choice((1, 700))),
          mock.patch.object(ingest, "Arrival", Failing),
          mock.patch.object(workers, "INLINE_ELEMENTS_MAX", 200)):
        keep_wire = random.random() < 0.5
        side = Side(dtype, random.randint(1, 3), keep_wire, random.choice((2, 4)))
        waiting, expected = sent(side, random, broken=random.random() < 0.25)
        while any(waiting) or side.workers.jobs:
            ready = [i for i, left in enumerate(waiting) if left]
            if side.workers.jobs and (not ready or random.random() < 0.5):
                side.workers.run(random.randrange(4), random.random() < 0.1)
                continue
            stream, size = random.choice(ready), random.randint(1, 3000)
            with mock.patch.object(Failing, "fails", random.random() < 0.1):
                side.receive(side.readers[stream], waiting[stream][:size])
            waiting[stream] = waiting[stream][size:]
        check(side, expected, keep_wire)


def check(side, expected, keep_wire):
    """Every message once, whole, with the bits and the digest of one that came at once."""
    good = [found for found in expected if found[4] < 0]
    bad = [found for found in expected if found[4] >= 0]
    if bad:
        assert f"at element {bad[0][4]}" in side.refusal
    else:
        assert side.refusal is None
        assert len(side.seen) == len(good)
    assert not side.work.begun
    left = list(good)
    for event in side.seen:
        kind = Msg.INIT_PARAMS if isinstance(event, events.Init) else Msg.PUSH_FRAGMENT
        payload = event.payload
        (found,) = [found for found in left if found[:2] == (kind, event.fragment)
                    and found[3].tobytes() == payload.values().tobytes()][:1]
        left = [other for other in left if other is not found]
        assert payload.digest == (
            hashlib.sha256(found[2]).digest() if kind == Msg.INIT_PARAMS else None)
        if kind == Msg.PUSH_FRAGMENT and keep_wire:
            payload.park()
            payload.settle()
            assert payload.values().tobytes() == found[3].tobytes()


def half_a_push(side, numel=NUMELS[2]):
    """The first half of a PUSH of fragment 2 has come over the first socket."""
    frame, _, decoded, _ = message(side, Msg.PUSH_FRAGMENT, 2, np.ones(numel, np.float32))
    half = len(frame) // 2
    rest = chunk(0, len(frame), half, frame[half:])
    for data in chunk(0, len(frame), 0, frame[:half]), rest[:100], rest[100:200]:
        side.receive(side.readers[0], data)
    return decoded, rest[200:]


@pytest.mark.parametrize(("dtype", "count"), [(DTYPE_F32, 4), (DTYPE_BF16, 2), (DTYPE_BF16, 4)])
def test_what_has_come_of_a_push_is_decoded_before_the_rest(monkeypatch, dtype, count):
    """By a worker only where there are more than two, and what is not decoded in its place."""
    monkeypatch.setattr(workers, "INLINE_ELEMENTS_MAX", 200)
    monkeypatch.setattr(arrivals, "STEP_ELEMENTS", 256)
    monkeypatch.setattr(arrival, "NEWS_BYTES", 1)
    side = Side(dtype, workers=count)
    numel = 20 * NUMELS[2]  # half of it is more than what is staged together with a header
    side.hello = side.hello._replace(layout=Layout((FragmentLayout(AVG, (numel,)),) * 3))
    side.listen(side.hello.layout, 1)
    decoded, rest = half_a_push(side, numel)
    if dtype != DTYPE_F32 and count > 2:
        side.workers.run(0, fails=False)
    ((_, came),) = side.work.begun.values()
    width = tensor_bytes(1, dtype)
    parts = [(0, came.done), *((start, end) for end, start in came.parts.items())]
    assert 256 <= sum(end - start for start, end in parts) // width < numel
    assert all((came.decoded.buffer[start // width : end // width] == -1).all()
               for start, end in parts)
    assert side.ingest.arrivals.initial == side.seen == []
    side.receive(side.readers[0], rest)
    while side.workers.jobs:
        side.workers.run(0, fails=False)
    (event,) = side.seen
    assert event.payload.values().tobytes() == decoded.tobytes()
    assert side.ingest.pool.live == (0 if dtype == DTYPE_F32 else 1), "f32 values are in place"


def test_what_has_come_of_a_push_goes_with_the_run(monkeypatch):
    """Also of one that is whole, and whose values nobody has computed."""
    monkeypatch.setattr(workers, "INLINE_ELEMENTS_MAX", 200)
    monkeypatch.setattr(arrivals, "STEP_ELEMENTS", 256)
    monkeypatch.setattr(arrival, "NEWS_BYTES", 1)
    side = Side(DTYPE_BF16, streams=2)
    whole, _, _, _ = message(side, Msg.PUSH_FRAGMENT, 0, np.ones(NUMELS[0], np.float32))
    side.receive(side.readers[1], chunk(1, len(whole), 0, whole))
    half_a_push(side)
    assert (len(side.work.begun), len(side.work.pending), side.ingest.pool.live) == (1, 1, 2)
    side.workers.jobs.clear()  # they answer to nobody
    side.ingest.forget(side)
    assert side.seen == []
    assert side.ingest.pool.live == 0


def test_what_has_come_of_a_push_goes_with_its_group(monkeypatch):
    monkeypatch.setattr(workers, "INLINE_ELEMENTS_MAX", 200)
    monkeypatch.setattr(arrivals, "STEP_ELEMENTS", 256)
    monkeypatch.setattr(arrival, "NEWS_BYTES", 1)
    side = Side(DTYPE_BF16)
    gone = []
    side.ingest.left = lambda *what: gone.append(what)
    half_a_push(side)
    assert side.ingest.pool.live == 1
    side.ingest.ended(side, "closed by the peer", None)
    while side.workers.jobs:
        side.workers.run(0, fails=False)
    assert gone == [(side, "closed by the peer", None)]
    assert side.seen == []
    assert side.ingest.pool.live == 0
