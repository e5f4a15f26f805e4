"""The client's sockets and threads against a scripted server: connect, outage, refusal, the end."""

import contextlib
import os
import select
import socket
import threading
import warnings

import numpy as np
import pytest

from syncer.errors import LocalProtocolError, RemoteProtocolError
from syncer.layout import RDA, FragmentLayout, Layout
from syncer.learner import ConnectionFailed
from syncer.learner import client as client_module
from syncer.learner.client import Client
from syncer.learner.client_group import QUEUE_FRAMES_MAX
from syncer.learner.session import Phase, Session
from syncer.protocol import CHUNK_SIZE, DTYPE_F32, Msg
from syncer.wire import encode
from syncer.wire.hello import parse_hello
from syncer.wire.messages import Init

from .scripted_server import ScriptedServer
from .waiting import DEADLINE_S, until

NUMEL = 40_000
LAYOUT = Layout((FragmentLayout(RDA, (NUMEL,)), FragmentLayout(RDA, (3,))))


def make_session(**options) -> Session:
    defaults = {"learner": 0, "dtype": DTYPE_F32, "num_streams": 2}
    return Session(LAYOUT, bytes(32), **defaults | options)


def values(fragment: int, fill: float) -> np.ndarray:
    return np.full(LAYOUT.fragments[fragment].numel, fill, "<f4")


class Waits:
    """Stands in for waiting between attempts: records the seconds, and may act on a wait."""

    def __init__(self):
        self.seconds: list[float] = []
        self.act = lambda: None
        self.now = 0.0

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        self.now += seconds
        self.act()


class Fixture:
    """A client and its server, with recorded waits and progress lines."""

    def __init__(self, server: ScriptedServer):
        self.server, self.waits, self.lines = server, Waits(), []
        self.clients: list[Client] = []

    def client(self, session: Session | None = None, **options) -> Client:
        client = Client(session or make_session(), self.server.address, pause=self.waits,
                        clock=lambda: self.waits.now, say=self.lines.append, **options)
        self.clients.append(client)
        return client

    def connected(self, session: Session | None = None, **options):
        """(started client, the server's end of it)"""
        client = self.client(session, **options)
        client.start()
        return client, self.server.accept()


@pytest.fixture
def place(monkeypatch):
    monkeypatch.setattr(client_module, "DRAIN_S", 0.0)
    with ScriptedServer() as server:
        fixture = Fixture(server)
        yield fixture
        for client in fixture.clients:
            client.close()
    until(lambda: not client_threads(), "all client threads end")


def client_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("syncer-")]


def ends(sockets) -> bool:
    """Reads the sockets to their end; fails at the deadline."""
    for each in sockets:
        with contextlib.suppress(ConnectionError):
            while each.recv(65_536):
                pass
    return True


# --- first connect -----------------------------------------------------------------------------


def test_first_connect_gives_up_after_the_whole_time(place):
    place.server.stop_listening()
    client = place.client(connect_timeout_s=100.0)
    with pytest.raises(ConnectionFailed, match="not reachable within 100 s"):
        client.start()
    assert set(place.waits.seconds) == {2.0}
    assert 98 <= place.waits.now <= 100
    assert [line.split(" (")[0] for line in place.lines] == [
        f"dialing {place.server.address}",
        *(f"{place.server.address} not reachable yet after {s} s" for s in (30, 60, 90))]


def test_first_connect_waits_for_a_server_that_starts_late(place):
    place.server.stop_listening()
    place.waits.act = lambda: len(place.waits.seconds) == 20 and place.server.listen_again()
    client, _ = place.connected()
    assert client.connected
    assert place.waits.seconds == [2.0] * 20
    assert place.lines[-1] == f"connected to {place.server.address} after 21 attempts"


def test_progress_goes_to_stderr_with_its_prefix(place, capfd):
    client = Client(make_session(), place.server.address)
    client.start()
    client.close()
    assert capfd.readouterr().err.splitlines() == [
        f"[yeto-syncer-client] dialing {place.server.address}",
        f"[yeto-syncer-client] connected to {place.server.address} after 1 attempt"]


def test_every_socket_has_the_options_of_the_protocol(place):
    client, peer = place.connected()
    assert len(peer.sockets) == 3
    for each in client._group._sockets:
        found = [each.socket.getsockopt(socket.IPPROTO_TCP, option) for option in
                 (socket.TCP_NODELAY, socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL,
                  socket.TCP_KEEPCNT)]
        assert found == [1, 60, 15, 4]
        assert each.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert each.socket.gettimeout() is None


def test_a_socket_that_is_connected_to_itself_counts_as_refused(monkeypatch):
    """Dialing a free port on loopback can do that; the client would read its own HELLO."""
    own = socket.socket()
    own.bind(("127.0.0.1", 0))
    own.connect(own.getsockname())
    monkeypatch.setattr(client_module.socket, "create_connection", lambda *_: own)
    with pytest.raises(ConnectionRefusedError):
        client_module.dial(own.getsockname(), 5.0)
    assert own.fileno() == -1


# --- outages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_any_dead_socket_ends_the_group_and_a_fresh_generation_follows(place, dead):
    client, peer = place.connected()
    peer.sockets[dead].shutdown(socket.SHUT_RDWR)
    assert ends(each for i, each in enumerate(peer.sockets) if i != dead)
    again = place.server.accept()
    assert again.hello.generation not in (0, peer.hello.generation)
    assert again.hello._replace(generation=0) == peer.hello._replace(generation=0)
    until(lambda: client.connected, "the client is connected again")
    client.check()
    assert place.waits.seconds == [1.0]


def test_backoff_grows_and_starts_anew_with_every_outage(place):
    client, peer = place.connected()
    place.server.stop_listening()
    listening = threading.Event()

    def act():
        if len(place.waits.seconds) == 8:
            place.server.listen_again()
            listening.set()

    place.waits.act = act
    peer.close()
    assert listening.wait(DEADLINE_S)
    place.server.accept().close()
    place.server.accept()
    until(lambda: client.connected, "the client is connected again")
    assert place.waits.seconds == [1, 2, 4, 8, 16, 30, 30, 30, 1]
    client.check()
    assert f"connected to {place.server.address} again after 8 attempts" in place.lines


@pytest.mark.parametrize("limit", [0, 2])
def test_reconnects_are_counted_over_the_whole_life(place, limit):
    client, peer = place.connected(max_reconnects=limit)
    for _ in range(limit):
        client.check()
        peer.close()
        peer = place.server.accept()
    peer.close()
    until(lambda: client.session.error, "the last drop is fatal")
    with pytest.raises(ConnectionFailed, match=f"no reconnect is left of {limit}"):
        client.check()
    assert place.waits.seconds == [1.0] * limit


def test_a_torn_broadcast_is_dropped_and_its_repetition_accepted_once(place):
    session = make_session()
    client, peer = place.connected(session)
    tensor = memoryview(values(0, 1.5)).cast("B")
    [pieces] = encode.chunk_message(Msg.BCAST_FRAGMENT, encode.bcast_head(0, 3), tensor, 0)
    whole = b"".join(pieces)
    peer.sockets[1].sendall(whole[:len(whole) // 2])
    peer.pull(0, 4)
    until(lambda: session.pulls, "the pull arrives")
    peer.close()
    peer = place.server.accept()
    until(lambda: client.connected, "the client is connected again")
    assert session.pulls == []
    assert not session.broadcasts
    for _ in range(2):
        peer.bcast(0, 3, tensor)
    peer.bcast(1, 3, values(1, 2.5))
    peer.manifest(3, [3, 3])
    until(lambda: len(session.broadcasts) == 2 and session.final.manifest, "everything arrives")
    assert bytes(session.broadcasts[0].tensor) == bytes(tensor)
    client.check()


def test_what_was_queued_is_dropped_with_the_group(place):
    """A message never spans two generations, and a sender learns that it did not leave."""
    session = make_session(num_streams=1)
    client, peer = place.connected(session)
    receipts = []
    while client.has_room(session.tensors.init_bytes(0)):
        receipts.append(client.send(session.tensors.init(0, values(0, len(receipts)))))
    assert len(receipts) > QUEUE_FRAMES_MAX
    assert not receipts[-1].settled
    peer.close()
    until(lambda: receipts[-1].settled, "the receipt is settled")
    assert receipts[-1].dropped
    assert not receipts[-1].sent
    peer = place.server.accept()
    until(lambda: client.connected, "the client is connected again")
    assert client.send(session.tensors.init(1, values(1, 7))).dropped is False
    init = peer.receive(Init)
    assert (init.fragment, bytes(init.tensor)) == (1, values(1, 7).tobytes())


def test_sends_during_an_outage_are_dropped_silently(place):
    session = make_session()
    client, peer = place.connected(session)
    reached, go_on = threading.Event(), threading.Event()
    place.waits.act = lambda: (reached.set(), go_on.wait(DEADLINE_S))
    peer.pull(0, 1)
    until(lambda: session.pulls, "the pull arrives")
    peer.close()
    assert reached.wait(DEADLINE_S)
    assert not client.connected
    assert session.pulls == []
    assert not client.has_room(4)
    assert client.send(session.tensors.init(1, values(1, 7))).dropped
    assert client.send_control(session.heartbeat()).dropped
    client.check()
    go_on.set()
    assert place.server.accept().hello.learner == 0


@pytest.mark.parametrize("streams", [1, 4])
def test_racing_readers_never_queue_versions_in_the_wrong_order(place, streams):
    """Versions of one fragment on several sockets at once; each reader takes what is new to it."""
    session = make_session(num_streams=streams)
    client, peer = place.connected(session)
    newest = 400

    def send(stream: int) -> None:
        for version in range(1 + stream % streams, newest + 1, streams):
            tensor = memoryview(values(1, version)).cast("B")
            head = encode.bcast_head(1, version)
            [pieces] = encode.chunk_message(Msg.BCAST_FRAGMENT, head, tensor, version)
            peer.send(b"".join(pieces), stream)

    threads = [threading.Thread(target=send, args=(i + 1,)) for i in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    until(lambda: session.accepted[1] and session.accepted[1][0] == newest, "the newest arrives")
    client.check()
    with client.lock:
        found = [bcast.version for bcast in session.take_broadcasts()]
    assert found == sorted(set(found))
    assert found[-1] == newest
    assert streams > 1 or len(found) == newest


# --- what ends a client ------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "metric"), [
    ("session mismatch: expected session_contract_hash=...", "layout_hash_mismatch"),
    ("HELLO syncer semantic profile differs", "syncer_profile_mismatch"),
    ("PUSH_FRAGMENT names unknown fragment 7", None)])
def test_an_error_frame_is_fatal_and_never_retried(place, text, metric):
    session = make_session()
    client, peer = place.connected(session)
    peer.error(text)
    peer.finish_sending()
    until(lambda: session.error, "the error arrives")
    with pytest.raises(ConnectionFailed) as raised:
        client.check()
    assert raised.value.metric == metric
    assert text in str(raised.value)
    assert client.send_control(session.heartbeat()).dropped
    until(lambda: not client_threads(), "the threads end")
    assert place.waits.seconds == []


def test_an_error_frame_counts_even_if_a_data_socket_ends_first(place, monkeypatch):
    monkeypatch.setattr(client_module, "DRAIN_S", DEADLINE_S)
    client, peer = place.connected()
    peer.sockets[1].close()
    assert ends([peer.control])  # the client has given up sending; it still reads
    peer.error("session mismatch")
    for each in peer.sockets:
        each.close()
    until(lambda: client.session.error, "the error arrives")
    with pytest.raises(ConnectionFailed, match="layout_hash_mismatch"):
        client.check()
    assert place.waits.seconds == []


def test_a_wrong_key_is_refused_and_not_retried(place):
    client = place.client(make_session(key=b"wrong", num_streams=0))
    client.start()
    control, (msg_type, payload), _ = place.server.accept_socket()
    assert msg_type == Msg.HELLO
    with pytest.raises(RemoteProtocolError) as refused:
        parse_hello(payload, key=b"right", learners=8)
    control.sendall(encode.encode_error(str(refused.value)))
    control.shutdown(socket.SHUT_WR)
    until(lambda: client.session.error, "the error arrives")
    with pytest.raises(ConnectionFailed, match="island_auth_failed") as raised:
        client.check()
    assert raised.value.metric == "island_auth_failed"
    assert place.waits.seconds == []
    control.close()


@pytest.mark.parametrize(("stream", "data", "text"), [
    (0, b"HTTP/1.1 400 Bad Request\r\n\r\n", "bad magic"),
    (1, encode.frame_header(Msg.BCAST_FRAGMENT, 2**40), "exceeds limit"),
    (2, b"".join(encode.frame(Msg.CHUNK, b"".join(
        n.to_bytes(8, "little") for n in (i, 25, 0)) + b"x") for i in range(65)),
     "64 chunked messages are open"),
    (0, encode.encode_shutdown(), "SHUTDOWN while training"),
])
def test_a_broken_server_is_fatal(place, stream, data, text):
    client, peer = place.connected()
    peer.sockets[stream].sendall(data)
    until(lambda: client.session.error, "the violation is seen")
    with pytest.raises(RemoteProtocolError, match=text):
        client.check()
    assert ends(peer.sockets)
    assert place.waits.seconds == []


def test_shutdown_after_the_ack_ends_without_error_or_reconnect(place):
    session = make_session()
    client, peer = place.connected(session)
    for f in range(2):
        peer.final(f, 5, values(f, 1.0))
    peer.manifest(5, [5, 5])
    until(lambda: session.final.tensors() is not None, "the cut arrives")
    with client.lock:
        ack = session.acknowledge()
    receipt = client.send_control(ack)
    assert peer.receive_ack().step == 5
    until(lambda: receipt.sent, "the receipt is settled")
    peer.shutdown()
    until(lambda: session.phase is Phase.SHUT_DOWN, "SHUTDOWN arrives")
    peer.close()
    until(lambda: not client_threads(), "the threads end")
    client.check()
    assert client.send_control(ack).dropped
    assert place.waits.seconds == []


# --- closing -----------------------------------------------------------------------------------


def test_close_ends_a_writer_that_is_stuck(place):
    session = make_session(num_streams=1)
    client, _peer = place.connected(session)
    while client.has_room(session.tensors.init_bytes(0)):
        client.send(session.tensors.init(0, values(0, 1)))
    client.close()
    until(lambda: not client_threads(), "the threads end")
    client.close()
    assert client.send_control(session.heartbeat()).dropped
    client.check()


def test_close_ends_the_wait_of_an_outage(place):
    session = make_session()
    client = Client(session, place.server.address, say=place.lines.append)
    place.clients.append(client)
    client.start()
    place.server.accept().close()
    until(lambda: any("dialing in" in line for line in place.lines), "the outage is reported")
    client.close()
    until(lambda: not client_threads(), "the threads end")
    client.close()


def test_close_reads_on_so_that_the_last_frame_is_not_lost(place, monkeypatch):
    """Closing a socket with unread input resets it; what we sent last must reach the server."""
    monkeypatch.setattr(client_module, "DRAIN_S", DEADLINE_S)
    session = make_session(num_streams=0)
    client, peer = place.connected(session)
    sent = [client.send(session.tensors.init(0, values(0, i))) for i in range(20)]
    peer_reads = threading.Event()

    def serve():
        while (init := peer.receive(Init)) is not None:
            peer.bcast(0, int(np.frombuffer(init.tensor, "<f4")[0]), init.tensor)
            found.append(init)
        peer.close()
        peer_reads.set()

    found: list[Init] = []
    server_thread = threading.Thread(target=serve)
    server_thread.start()
    client.wait_for(lambda: all(receipt.settled for receipt in sent), DEADLINE_S)
    client.close()
    assert peer_reads.wait(DEADLINE_S)
    server_thread.join()
    assert len(found) == 20


def test_a_group_whose_threads_cannot_start_is_closed(place, monkeypatch):
    start = threading.Thread.start

    def limited(thread):
        if thread.name == "syncer-write-1":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    client = place.client()
    with pytest.raises(RuntimeError):
        client.start()
    client.close()
    until(lambda: not client_threads(), "the threads end")
    assert ends(place.server.accept().sockets)


def test_a_client_that_was_never_started_closes(place):
    place.client().close()


# --- counters, room, fork ----------------------------------------------------------------------


def test_bytes_are_counted_over_all_connections(place):
    session = make_session()
    client, peer = place.connected(session)
    heartbeat = len(session.heartbeat())
    for version in (1, 2):
        peer.bcast(1, version, values(1, 0.5))
        peer.pull(1, 1)
        until(lambda count=version: session.pulls and len(session.broadcasts) == count,
              "both arrive")
        client.send_control(session.heartbeat())
        peer.receive(heartbeats=True)
        peer.close()
        peer = place.server.accept()
    until(lambda: client.connected, "the client is connected again")
    assert client.bytes_sent == 2 * heartbeat
    assert client.bytes_received == 2 * ((13 + 16) + (13 + 24 + 13 + 12 + 12))


def test_a_message_larger_than_the_queue_goes_into_empty_queues(place):
    session = make_session(num_streams=1)
    client, _peer = place.connected(session)
    huge = (QUEUE_FRAMES_MAX + 44) * CHUNK_SIZE
    assert client.has_room(huge)
    while client.has_room(session.tensors.init_bytes(0)):
        client.send(session.tensors.init(0, values(0, 1)))
    assert not client.has_room(huge)


def test_a_forked_child_cannot_use_the_client_and_holds_no_socket(place):
    client, peer = place.connected()
    descriptors = [each.socket.fileno() for each in client._group._sockets]
    results, hold = os.pipe(), os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn about any fork beside threads
        child = os.fork()
    if child == 0:
        answer = b"?"
        with contextlib.suppress(BaseException):
            held = []
            for each in descriptors:
                with contextlib.suppress(OSError):
                    held.append(os.fstat(each))
            try:
                client.check()
            except LocalProtocolError:
                answer = b"held" if held else b"good"
            client.close()
        os.write(results[1], answer)
        os.close(hold[1])
        os.read(hold[0], 1)
        os._exit(0)
    os.close(results[1])
    assert select.select([results[0]], [], [], DEADLINE_S)[0]
    assert os.read(results[0], 8) == b"good"
    client.check()
    peer.pull(1, 1)
    until(lambda: client.session.pulls, "the parent still receives")
    client.close()
    assert ends(peer.sockets)  # although the child still lives
    os.close(hold[1])
    os.waitpid(child, 0)
    os.close(hold[0])
    os.close(results[0])
