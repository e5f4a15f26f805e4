"""The short way of a small push says what the long way says, or nothing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncer import kernels
from syncer.core import events
from syncer.errors import RemoteProtocolError
from syncer.layout import AVG, FragmentLayout, Layout
from syncer.merge.buffers import BufferPool
from syncer.protocol import DTYPE_BF16, DTYPE_F32, DTYPE_Q4, tensor_bytes
from syncer.server import workers
from syncer.server.decoded import DECODERS
from syncer.server.small_push import small_push
from syncer.wire.hello import Hello
from syncer.wire.messages import PUSH_HEAD, parse_push

LAYOUT = Layout((FragmentLayout(AVG, (3, 4)), FragmentLayout(AVG, (300,))))
GENERATION = 9


class Sender:
    """What is read of a group."""

    generation = GENERATION

    def __init__(self, dtype):
        self.hello = Hello(2, GENERATION, dtype, LAYOUT, bytes(32), bytes(32))


def wire_of(dtype, fragment, value):
    values = np.full(LAYOUT.fragments[fragment].numel, value, np.float32)
    out = bytearray(tensor_bytes(len(values), dtype))
    if dtype == DTYPE_F32:
        return values.tobytes()
    (kernels.encode_bf16 if dtype == DTYPE_BF16 else kernels.encode_q4)(values, out)
    return bytes(out)


def long_way(sender, payload, dtype):
    """The same by what every other push goes through; None where that refuses it."""
    try:
        push = parse_push(payload, sender.hello.learner, LAYOUT, dtype)
    except RemoteProtocolError:
        return None
    values = np.empty(LAYOUT.fragments[push.fragment].numel, np.float32)
    if DECODERS[dtype](push.delta, values, True, 1) >= 0:
        return None
    return events.Push(push.learner, GENERATION, *push[1:-1], values.tobytes())


@given(st.sampled_from([DTYPE_F32, DTYPE_BF16, DTYPE_Q4]), st.booleans(), st.tuples(
    st.sampled_from([2, 2, 2, 3]), st.sampled_from([0, 1, 1, 2]), st.integers(0, 2**64 - 1),
    st.integers(0, 2), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2),
    st.integers(0, 2**64 - 1)), st.sampled_from([1.5, 0.0, float("nan")]), st.integers(-60, 1))
def test_the_short_way_says_what_the_long_way_says(dtype, keep_wire, head, value, cut):
    tensor = wire_of(dtype, min(head[1], 1), value)
    payload = PUSH_HEAD.pack(*head) + tensor
    payload = payload[:cut] if cut < 0 else payload + bytes(cut)
    sender = Sender(dtype)
    found = small_push(sender, memoryview(payload), BufferPool(), keep_wire)
    if found is not None:
        assert found.payload.tensor == (tensor if keep_wire else None)
        found = found._replace(payload=found.payload.values().tobytes())
    assert found == long_way(sender, payload, dtype)


def test_what_is_not_small_goes_the_long_way(monkeypatch):
    payload = memoryview(PUSH_HEAD.pack(2, 1, 1, 1, 0, 1, 1, 1) + wire_of(DTYPE_F32, 1, 1.0))
    assert small_push(Sender(DTYPE_F32), payload, BufferPool(), False) is not None
    monkeypatch.setattr(workers, "INLINE_ELEMENTS_MAX", 299)
    assert small_push(Sender(DTYPE_F32), payload, BufferPool(), False) is None


class Empty:
    def take(self, numel):
        raise MemoryError


@pytest.mark.parametrize("dtype", [DTYPE_F32, DTYPE_BF16])
def test_what_finds_no_memory_goes_the_long_way(dtype):
    payload = memoryview(PUSH_HEAD.pack(2, 0, 1, 1, 0, 1, 1, 1) + wire_of(dtype, 0, 1.0))
    assert small_push(Sender(dtype), payload, Empty(), False) is None
