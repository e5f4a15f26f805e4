"""How bytes are shared out over the sockets of a learner's connection."""

from __future__ import annotations

import socket

import pytest

from syncer.layout import AVG, FragmentLayout, Layout
from syncer.protocol import DTYPE_F32
from syncer.server.conn import Channel, Owner
from syncer.server.group import Group, Reports
from syncer.server.selector import SelectorLoop
from syncer.wire.extension import Extension
from syncer.wire.hello import Hello
from tests.unit.test_server_outbox import image

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
