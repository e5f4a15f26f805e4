"""How bytes are shared out over the sockets of a learner's connection."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import numpy as np
import pytest

from syncer.layout import AVG, FragmentLayout, Layout
from syncer.protocol import DTYPE_BF16, DTYPE_F32, Msg
from syncer.server.conn import Channel, Owner
from syncer.server.group import Group, Reports
from syncer.server.outbox import Outbox
from syncer.server.selector import SelectorLoop
from syncer.server.wire_version import WireVersion
from syncer.wire.extension import Extension
from syncer.wire.hello import Hello
from tests.golden.merge_reference import bf16_encode
from tests.unit.test_server_outbox import POOL, image

KIB = 1024
NUMEL = 60 * KIB
"""A message of 240 KiB, which one socket carries."""


class Endless(socket.socket):
    """Its peer takes everything, at once."""

    taken = 0

    def sendmsg(self, buffers):
        count = sum(map(len, buffers))
        self.taken += count
        return count


@pytest.fixture
def group():
    loop, sockets = SelectorLoop(), []

    def channel() -> Channel:
        sockets.append(Endless())
        sockets[-1].setblocking(False)
        return Channel(loop, sockets[-1], "peer", Owner(), None, 10**12)

    layout = Layout((FragmentLayout(AVG, (NUMEL,)),) * 4)
    hello = Hello(0, 1, DTYPE_F32, layout, bytes(32), bytes(32), num_streams=2,
                  extension=Extension())
    made = Group(channel(), hello, Reports())
    for index in range(2):
        made.attach(index, channel())
    yield made
    made.outbox.drop()
    for one in made.channels:
        one.close()
    loop.close()


@pytest.fixture
def sender():
    """A channel with one end of a pair, and the other end, which nobody reads."""
    loop, (ours, theirs) = SelectorLoop(), socket.socketpair()
    ours.setblocking(False)
    channel = Channel(loop, ours, "peer", Owner(), None, 10**12)
    yield channel, theirs, loop
    channel.close()
    theirs.close()
    loop.close()


def encoded(numel: int):
    """A version in bf16 whose values differ, its pieces as an outbox hands them out, and what is to
    arrive of the first one."""
    params = np.arange(numel, dtype=np.float32)
    source = SimpleNamespace(fragment=0, version=1, params=params)
    shared = WireVersion(Msg.BCAST_FRAGMENT, source, DTYPE_BF16, POOL)
    outbox = Outbox(1)
    outbox.broadcast(shared)
    bulk, buffers = outbox.next_piece()
    body = bf16_encode(params).tobytes()[:len(buffers[1])]
    return shared, bulk, list(buffers), bytes(buffers[0]) + body


def test_a_piece_is_encoded_as_far_as_the_kernel_takes_it(sender):
    channel, peer, loop = sender
    shared, bulk, buffers, expected = encoded(4 * 1024 * KIB)
    channel.send(buffers, bulk)
    assert channel.blocked, "the kernel takes less than a piece"
    assert 0 < shared.encoded < len(expected) - len(buffers[0])
    received = bytearray()
    while len(received) < len(expected):
        received += peer.recv(64 * KIB)
        loop.poll(loop.now_ns())
    assert received == expected


def test_what_has_begun_is_encoded_to_its_end_when_the_rest_is_forgotten(sender):
    """The peer needs the end of the frame, and what says good-bye comes behind it."""
    channel, peer, loop = sender
    _, bulk, buffers, expected = encoded(4 * 1024 * KIB)
    channel.send(buffers, bulk)
    channel.cut_queue()
    channel.send([b"good-bye"])
    received = bytearray()
    while len(received) < len(expected) + 8:
        received += peer.recv(64 * KIB)
        loop.poll(loop.now_ns())
    assert received == expected + b"good-bye"


def test_what_may_go_is_shared_out_before_any_of_it_goes(group):
    """One socket still has leave of before; it must not use that while another is given more."""
    def sent() -> int:
        return sum(channel.sock.taken for channel in group.data.values())

    group.grant(200 * KIB)
    group.outbox.broadcast(image(0, 1, NUMEL))
    group.pump()
    assert sent() == 100 * KIB, "of one message, on one socket"
    for fragment in (1, 2, 3):
        group.outbox.broadcast(image(fragment, fragment + 1, NUMEL))
    group.grant(400 * KIB)
    assert sent() == 500 * KIB
