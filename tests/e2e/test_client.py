"""The client's sockets and threads against a scripted server: connect, outage, refusal, the end."""

import socket
import threading

import pytest

from syncer.learner import ConnectionFailed, dialing
from syncer.learner import client as client_module
from syncer.learner.client import Client
from syncer.learner.client_group import QUEUE_FRAMES_MAX
from syncer.protocol import Msg
from syncer.wire import encode
from syncer.wire.messages import Init

from .clients import (
    ends,
    make_session,
    values,
)
from .waiting import DEADLINE_S, until

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


def test_progress_goes_to_stderr_with_its_prefix(place, stderr):
    client = Client(make_session(), place.server.address)
    client.start()
    client.close()
    wanted = [f"[yeto-syncer-client] dialing {place.server.address}",
              f"[yeto-syncer-client] connected to {place.server.address} after 1 attempt"]
    until(lambda: stderr.getvalue().splitlines() == wanted, "both lines")


def test_every_socket_has_the_options_of_the_protocol(place):
    client, peer = place.connected()
    assert len(peer.sockets) == 3
    for each in client._group._sockets:
        found = [each.socket.getsockopt(socket.IPPROTO_TCP, option) for option in
                 (socket.TCP_NODELAY, socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL,
                  socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)]
        assert found == [1, 15, 15, 3, 60_000]
        assert each.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert each.socket.gettimeout() is None


def test_a_socket_that_is_connected_to_itself_counts_as_refused(monkeypatch):
    """Dialing a free port on loopback can do that; the client would read its own HELLO."""
    class Own(socket.socket):
        def connect(self, place):
            """It is, to itself."""

    own = Own()
    own.bind(("127.0.0.1", 0))
    place = own.getsockname()
    socket.socket.connect(own, place)
    monkeypatch.setattr(dialing.socket, "socket", lambda *_: own)
    with pytest.raises(ConnectionRefusedError):
        dialing.dial(place, 5.0)
    assert own.fileno() == -1


@pytest.fixture
def deaf_resolver(monkeypatch):
    """One that answers nothing until the test is over."""
    over, real = threading.Event(), socket.getaddrinfo

    def getaddrinfo(*place, flags=0, **more):
        if not flags & socket.AI_NUMERICHOST:
            assert over.wait(DEADLINE_S)
        return real(*place, flags=flags, **more)

    monkeypatch.setattr(dialing.socket, "getaddrinfo", getaddrinfo)
    yield
    over.set()
    for lookup in dialing._lookups.values():
        lookup.join()
    dialing._lookups.clear()


def test_a_name_that_is_not_resolved_ends_the_first_connect_at_its_limit(deaf_resolver):
    one = Client(make_session(), "localhost:1", connect_timeout_s=0.5)
    with pytest.raises(ConnectionFailed, match="the name localhost was not resolved within"):
        one.start()
    lookup = dialing._lookups["localhost", 1]
    with pytest.raises(TimeoutError, match="look at the resolver"):
        dialing.dial(("localhost", 1), 0.01)
    assert dialing._lookups["localhost", 1] is lookup, "the one that hangs is waited for"


def test_every_address_of_a_name_is_tried(place, monkeypatch):
    host, port = dialing.parse_address(place.server.address)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        refused = closed.getsockname()
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", where)
             for where in (refused, refused, (host, port))]
    monkeypatch.setattr(dialing, "resolve", lambda *_: found)
    with dialing.dial(("a name", port), 5.0) as sock:
        assert sock.getpeername() == (host, port)
    found.pop()
    with pytest.raises(ConnectionRefusedError):
        dialing.dial(("a name", port), 5.0)


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
    assert place.waits.seconds == [1.5]


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
    assert place.waits.seconds == [1.5, 3, 6, 12, 15, 15, 15, 15, 1.5]
    client.check()
    assert f"connected to {place.server.address} again after 8 attempts" in place.lines


def test_learners_of_a_lost_server_dial_again_spread_over_seconds(place):
    """64 of them, and full jitter: the first attempts are over more than 2 s, not at one moment."""
    client, peer = place.connected(jitter=client_module.jitter)
    for _ in range(63):
        peer.close()
        peer = place.server.accept()
    peer.close()
    place.server.accept()
    until(lambda: client.connected, "the client is connected again")
    assert len(place.waits.seconds) == 64
    assert max(place.waits.seconds) - min(place.waits.seconds) > 2
    assert 0 <= min(place.waits.seconds) <= max(place.waits.seconds) <= 3


@pytest.mark.parametrize(
    "broken", [BrokenPipeError(), ValueError("I/O on closed file"), OSError(5)])
def test_a_dead_stderr_does_not_end_a_client(place, broken):
    def say(line: str) -> None:
        raise broken

    client = Client(make_session(), place.server.address, pause=place.waits, say=say)
    place.clients.append(client)
    client.start()
    place.server.accept().close()
    place.server.accept()
    until(lambda: client.connected, "the client is connected again")
    client.check()


@pytest.mark.parametrize("text", [
    "invalid first frame: this syncer receives too many large first frames; try again later",
    "unknown learner 0 generation 7: no HELLO within 10 s",
    "duplicate connection generation 7 of learner 0"])
def test_what_the_server_cannot_do_now_is_an_outage_with_backoff(place, text):
    client, peer = place.connected()
    for _ in range(3):
        peer.error(text)
        peer.close()
        peer = place.server.accept()
    until(lambda: client.connected, "the client is connected again")
    client.check()
    assert place.waits.seconds == [1.5, 3, 6]
    assert sum(f"lost ({text})" in line for line in place.lines) == 3
    peer.close()  # an outage of its own
    place.server.accept()
    assert place.waits.seconds[3:] == [1.5]


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
    assert place.waits.seconds == [1.5] * limit


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
    found = []

    def newest_is_taken() -> bool:
        with client.lock:
            found.extend(bcast.version for bcast in session.take_broadcasts())
        return found[-1:] == [newest]

    until(newest_is_taken, "the newest arrives")
    for thread in threads:
        thread.join(DEADLINE_S)
    client.check()
    assert found == sorted(set(found))
