"""Memory of large messages: used again after the last view is gone, within the stated bound."""

import numpy as np
import pytest

from syncer.layout import RDA, FragmentLayout, Layout
from syncer.protocol import DTYPE_F32, Msg
from syncer.wire import encode
from syncer.wire.frames import FrameReader
from syncer.wire.limits import Limits
from syncer.wire.payload import SPARE_BYTES_MAX, free_spares, spare_bytes

MIB = 1024 * 1024
LIMITS = Limits.for_server(Layout((FragmentLayout(RDA, (128 * MIB,)),)), DTYPE_F32)


def block(size: int) -> int:
    """What a message of `size` payload bytes occupies."""
    return -(-size // (2 * MIB)) * 2 * MIB


def receive(reader: FrameReader, size: int) -> memoryview:
    """A bare INIT frame that is received without its bytes being written (they do not matter)."""
    [*_] = reader.feed(encode.frame_header(Msg.INIT_PARAMS, size))
    while True:
        for msg_type, payload in reader.received(len(reader.buffer())):
            assert msg_type == Msg.INIT_PARAMS
            return payload


def address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


@pytest.fixture
def reader():
    """A reader, after every spare of earlier messages has been pushed out."""
    reader = FrameReader(LIMITS)
    receive(reader, SPARE_BYTES_MAX)
    assert spare_bytes() == SPARE_BYTES_MAX
    return reader


def test_memory_is_used_again_once_the_last_view_is_gone(reader):
    first = receive(reader, 5 * MIB)
    place, part = address(first), first[100:200]
    del first
    held = receive(reader, 5 * MIB)
    assert address(held) != place, "a view of the first message is still held"
    del part
    before = spare_bytes()
    again = receive(reader, 5 * MIB - 7)
    assert address(again) == place
    assert spare_bytes() == before - block(5 * MIB)


def test_spares_are_bounded_and_the_oldest_go_first(reader):
    messages = [receive(reader, 60 * MIB + n * 2 * MIB) for n in range(6)]
    places = [address(message) for message in messages]
    for message in messages:
        message.release()
    messages.clear()
    assert spare_bytes() == sum(block(60 * MIB + n * 2 * MIB) for n in (3, 4, 5))
    newest = receive(reader, 70 * MIB)
    assert address(newest) == places[5]


def test_a_block_over_the_bound_is_not_kept(reader):
    receive(reader, SPARE_BYTES_MAX + 1)
    assert spare_bytes() == SPARE_BYTES_MAX, "the spares of before are still there"


def test_at_most_64_spares(reader):
    messages = [receive(reader, 2 * MIB) for _ in range(70)]
    messages.clear()
    assert spare_bytes() == 64 * 2 * MIB


def test_small_messages_and_messages_of_strangers_do_not_use_the_spares(reader):
    receive(reader, MIB)
    stranger = FrameReader(Limits.first_frame())
    [*_] = stranger.feed(encode.frame_header(Msg.HELLO, 16 * MIB))
    [(msg_type, payload)] = stranger.received(len(stranger.buffer()))
    assert (msg_type, len(payload)) == (Msg.HELLO, 16 * MIB)
    del payload
    assert spare_bytes() == SPARE_BYTES_MAX


def test_spares_go_when_memory_is_short(reader):
    held = receive(reader, 5 * MIB)
    free_spares()
    assert spare_bytes() == 0
    held.release()
    del held
    assert spare_bytes() == block(5 * MIB)
