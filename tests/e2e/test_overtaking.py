"""A small frame never waits behind bulk: on either side it is in front of all that has not begun.

Real sockets, no rounds. And nobody sets the size of a socket's buffers, which would end the
system's own measuring of it.
"""

from __future__ import annotations

import re
import select
import socket
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import syncer
from syncer import tcp
from syncer.layout import AVG, FragmentLayout, Layout
from syncer.merge.buffers import BufferPool
from syncer.protocol import CHUNK_HEAD, CHUNK_SIZE, DTYPE_F32, HEADER_BYTES, Msg
from syncer.server.conn import Channel
from syncer.server.group import Group, Reports
from syncer.server.selector import SelectorLoop
from syncer.server.wire_version import WireVersion
from syncer.wire import encode
from syncer.wire.frames import FrameReader
from syncer.wire.hello import Hello
from syncer.wire.limits import Limits
from syncer.wire.messages import Heartbeat, Init, Pull

from .clients import make_session, values
from .waiting import until

NUMEL = 4 * CHUNK_SIZE // 4
LAYOUT = Layout(tuple(FragmentLayout(AVG, (NUMEL,)) for _ in range(5)))
TIMEOUT_NS = 60 * 10**9
PULL = encode.encode_pull(Pull(4, 1, 1))
BUF_LOCK = 72
"""SO_BUF_LOCK of Linux: which buffers of a socket have a size that somebody has set."""


class Heard(Reports):
    """Counts what comes in; what ends a group fails the test."""

    def __init__(self):
        self.kinds: list[int] = []

    def frame(self, group, kind, payload):
        self.kinds.append(kind)

    def ended(self, group, reason, refusal):
        raise AssertionError(reason)


class Side:
    """The server's side of a group over TCP: its loop, and the peer's sockets."""

    def __init__(self, data_sockets: int):
        self.loop, self.heard = SelectorLoop(), Heard()
        self.peers: list[socket.socket] = []
        hello = Hello(0, 1, DTYPE_F32, LAYOUT, bytes(32), bytes(32), num_streams=data_sockets)
        self.limits = Limits.for_server(LAYOUT, DTYPE_F32)
        self.group = Group(self._channel(), hello, self.heard)
        self.group.control.reader.reassembly = self.group.reassembly
        for index in range(data_sockets):
            channel = self._channel()
            channel.reader.reassembly = self.group.reassembly
            self.group.attach(index, channel)

    def _channel(self) -> Channel:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.peers.append(socket.create_connection(listener.getsockname()))
            ours, _ = listener.accept()
        ours.setblocking(False)
        return Channel(self.loop, ours, "peer", None, FrameReader(self.limits), TIMEOUT_NS)

    def broadcast(self, fragment: int, pool: BufferPool) -> None:
        source = SimpleNamespace(fragment=fragment, version=1, params=np.zeros(NUMEL, np.float32))
        self.group.outbox.broadcast(WireVersion(Msg.BCAST_FRAGMENT, source, DTYPE_F32, pool))
        self.group.pump()

    def close(self) -> None:
        for channel in self.group.channels:
            channel.close()
        for peer in self.peers:
            peer.close()
        self.loop.close()


@pytest.fixture
def side(request):
    made = Side(request.param)
    yield made
    made.close()


one_socket = pytest.mark.parametrize("side", [0], indirect=True)
two_data_sockets = pytest.mark.parametrize("side", [2], indirect=True)


@one_socket
def test_a_pull_waits_for_no_more_than_the_piece_that_has_begun(side):
    """64 MiB of broadcasts are queued, and the peer reads nothing until the pull is queued, too."""
    pool = BufferPool()
    for fragment in range(4):
        side.broadcast(fragment, pool)
    until(lambda: side.loop.poll(0) or side.group.blocked, "the kernel is full")
    group = side.group
    group.outbox.pull(4, PULL)
    group.pump()
    given = group.control.sent
    limits = Limits.for_client(LAYOUT, DTYPE_F32)
    reader, [peer] = FrameReader(limits), side.peers
    peer.setblocking(False)
    came, kinds = 0, []

    def read() -> bool:
        nonlocal came
        side.loop.poll(0)
        try:
            count = peer.recv_into(reader.buffer())
        except BlockingIOError:
            return False
        came += count
        kinds.extend(kind for kind, _ in reader.received(count))
        return Msg.PULL_REQ in kinds

    until(read, "the pull")
    piece = HEADER_BYTES + 24 + CHUNK_SIZE
    staged = 16384  # what one receive may bring behind it
    assert came <= given + piece + len(PULL) + staged
    assert kinds.count(Msg.BCAST_FRAGMENT) < 4


@two_data_sockets
def test_a_pull_goes_out_at_once_beside_full_data_sockets(side):
    pool = BufferPool()
    for fragment in range(4):
        side.broadcast(fragment, pool)
    socks = [channel.sock for channel in side.group.data.values()]
    until(lambda: side.loop.poll(0) or not select.select([], socks, [], 0)[1], "both are full")
    side.group.outbox.pull(4, PULL)
    side.group.pump()
    side.peers[0].settimeout(60)
    assert side.peers[0].recv(len(PULL) + 1) == PULL


@two_data_sockets
def test_a_heartbeat_is_heard_in_the_turn_in_which_it_comes(side):
    """Both data sockets have more to read than a turn takes."""
    whole = encode.frame(Msg.INIT_PARAMS, bytes(4 + 4 * NUMEL))
    pieces = [b"".join([encode.frame_header(Msg.CHUNK, 24 + CHUNK_SIZE),
                        CHUNK_HEAD.pack(msg_id, len(whole), 0), whole[:CHUNK_SIZE]])
              for msg_id in (1, 2)]
    for peer, piece in zip(side.peers[1:], pieces, strict=True):
        peer.setblocking(False)
        assert peer.send(piece) > 0
    side.peers[0].sendall(encode.encode_heartbeat(Heartbeat(0, 1)))
    until(lambda: side.loop.poll(0) or side.group.control.received, "the turn")
    assert side.heard.kinds == [Msg.HEARTBEAT]


@pytest.mark.parametrize("streams", [0, 1])
def test_a_heartbeat_of_a_learner_overtakes_its_queued_tensors(place, streams):
    """On one socket as on two: the server reads nothing until all is queued."""
    session = make_session(num_streams=streams)
    client, peer = place.connected(session)
    sent = 0
    while client.has_room(session.tensors.init_bytes(0)):
        client.send(session.tensors.init(0, values(0, 1)))
        sent += 1
    client.send_control(session.heartbeat())
    order = []
    while Heartbeat not in order:
        order.append(type(peer.receive(heartbeats=True)))
    assert order.count(Init) < sent / 2
    for _ in range(sent - order.count(Init)):
        assert isinstance(peer.receive(), Init)
    until(lambda: client._group.idle, "all has left")


def test_a_data_socket_takes_what_waits_for_a_slower_one(place):
    """The peer reads from neither, and all is queued for the first."""
    client, _ = place.connected(make_session(num_streams=2))
    piece = bytes(4 * CHUNK_SIZE)
    with client.lock:
        client._group.enqueue((1, [piece]) for _ in range(4))
    until(lambda: client._group._sockets[2].bytes_sent or client._group._sockets[2].queue,
          "the second has one of them")
    assert len(client._group._sockets[1].queue) >= 1


def test_a_learner_hears_a_pull_beside_a_broadcast_that_is_half_there(place):
    session = make_session(num_streams=1)
    _, peer = place.connected(session)
    [pieces] = encode.chunk_message(Msg.BCAST_FRAGMENT, encode.bcast_head(0, 1),
                                    memoryview(values(0, 1)).cast("B"), 1)
    data = b"".join(pieces)
    peer.send(data[: len(data) // 2], 1)
    peer.pull(1, 1)
    until(lambda: session.pulls, "the pull")
    assert not session.broadcasts
    peer.send(data[len(data) // 2 :], 1)
    until(lambda: session.broadcasts, "the broadcast")


# ------------------------------------------------------------------------------------- buffers
def test_no_source_names_the_size_of_a_socket_buffer():
    root = Path(syncer.__file__).parent
    named = [path.relative_to(root).as_posix() for path in sorted(root.rglob("*"))
             if path.suffix in (".py", ".pyx", ".pxd")
             and re.search("SO_(SND|RCV)BUF|setsockopt.*BUF", path.read_text(encoding="utf-8"))]
    assert named == []


def locked(sock: socket.socket) -> int:
    try:
        return sock.getsockopt(socket.SOL_SOCKET, BUF_LOCK)
    except OSError:
        pytest.skip("this system does not tell whose size a buffer has")


def test_the_system_may_measure_the_buffers_of_every_socket_of_a_learner(place):
    client, _ = place.connected(make_session(num_streams=2))
    assert [locked(each.socket) for each in client._group._sockets] == [0, 0, 0]


@pytest.mark.skipif(not hasattr(socket, "TCP_NOTSENT_LOWAT"), reason="the system has no such limit")
def test_little_waits_in_the_kernel_to_be_sent(place):
    client, _ = place.connected(make_session(num_streams=2))
    assert {each.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)
            for each in client._group._sockets} == {tcp.NOT_SENT[1]}


def test_a_size_that_is_set_would_be_noticed():
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        assert locked(sock) != 0
