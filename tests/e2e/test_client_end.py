"""How a client ends: errors, closing, counters, forks."""

import contextlib
import os
import select
import socket
import threading
import warnings

import numpy as np
import pytest

from syncer.errors import LocalProtocolError, RemoteProtocolError
from syncer.learner import ConnectionFailed
from syncer.learner import client as client_module
from syncer.learner.client import Client
from syncer.learner.client_group import QUEUE_FRAMES_MAX
from syncer.learner.session import Phase
from syncer.protocol import CHUNK_SIZE, Msg
from syncer.wire import encode
from syncer.wire.hello import parse_hello
from syncer.wire.messages import Init

from .clients import (
    client_threads,
    ends,
    make_session,
    values,
)
from .waiting import DEADLINE_S, until

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
    session.check()  # closing is no failure
    with pytest.raises(LocalProtocolError, match="was closed"):
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
    with pytest.raises(ConnectionFailed, match="no thread can be made"):
        client.start()
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
        until(lambda newest=version: session.pulls and [
            bcast.version for bcast in session.broadcasts] == [newest],
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
