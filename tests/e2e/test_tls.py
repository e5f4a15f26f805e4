"""TLS between real servers, learners and readers, with certificates made on the spot."""

from __future__ import annotations

import os
import random
import signal
import socket
import ssl
import struct
import threading
from contextlib import suppress

import numpy as np
import pytest

from syncer import tls
from syncer.config import Config
from syncer.errors import ConfigError
from syncer.exits import Exit
from syncer.learner import ConnectionFailed, Learner
from syncer.learner.dialing import Dialer
from syncer.reader import pull
from syncer.reader.pulling import PullFailed
from syncer.server import door
from syncer.server.conn import Channel, Owner
from syncer.server.selector import SelectorLoop
from syncer.wire import encode
from syncer.wire.messages import DataHello
from tests.certificates import Authority
from tests.e2e.scripted import ScriptedLearner, ServerProcess, ServerThread, layout_of

from .waiting import DEADLINE_S, step_until, until

STEPS = 4
ONES = np.ones(4, np.float32)


@pytest.fixture
def pair():
    """Two sockets that are connected; closed whatever a test makes of them."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    """Another authority, which nobody trusts."""
    return Authority(tmp_path_factory.mktemp("strangers"), "strangers")


@pytest.fixture(scope="module")
def server_file(authority):
    return authority.make("server")


@pytest.fixture(scope="module")
def learner_file(authority):
    return authority.make("learner-0")


def values(count: int = 6) -> dict[str, np.ndarray]:
    return {"w": np.arange(count, dtype=np.float32)}


def learner(port: int, file, count: int = 6, **options) -> Learner:
    defaults = dict(learner_id=0, dtype="f32", fragments=1, num_streams=2, connect_timeout_s=60,
                    tls=file)
    return Learner(values(count), f"127.0.0.1:{port}", **defaults | options)


def handshaken(port: int, authority, file, name: str = "localhost") -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(authority.file)
    if file is not None:
        context.load_cert_chain(file)
    return context.wrap_socket(socket.create_connection(("127.0.0.1", port), 60),
                               server_hostname=name)


# ------------------------------------------------------------------------------------- a run
@pytest.mark.parametrize("count", [6, 3_000_000])
def test_a_run_with_tls(tmp_path, authority, server_file, learner_file, count):
    """Small frames, and fragments of many chunks."""
    with ServerThread(tmp_path, total_steps=STEPS, **authority.flags(server_file)) as server:
        assert server.log.wait("syncer listening")["tls"] is True
        with learner(server.port, learner_file, count) as one:
            step_until(one, lambda status: status.finished)
            one.finish()
        assert server.wait() == Exit.DONE


def test_a_learner_that_makes_no_step_is_heard_of_all_the_same(tmp_path, authority, server_file,
                                                               learner_file):
    with ServerThread(tmp_path, learners=2, **authority.flags(server_file)) as server:
        with learner(server.port, learner_file) as one:
            until(lambda: one._client._group._pulse.beats > 1, "its heartbeat is repeated")
            assert one.step(1).connected
        server.server.stop()


def test_a_reader_with_tls(tmp_path, authority, server_file, learner_file):
    settings = authority.flags(server_file)
    with ServerThread(tmp_path, total_steps=10**6, **settings) as server:
        with learner(server.port, learner_file, 400_000) as one:
            step_until(one, lambda status: status.versions[0] > 0)
            cut = pull(f"localhost:{server.port}", tls=learner_file)
            assert len(cut.tensors[0]) == 4 * 400_000
            with pytest.raises(PullFailed, match="speaks TLS alone, and this connection is plain"):
                pull(f"127.0.0.1:{server.port}")
        server.server.stop()


def test_what_has_been_encrypted_goes_out_whatever_is_dropped(pair, authority, server_file,
                                                              learner_file):
    """A frame of which TLS has taken a part is one that has begun: its end is not cut off."""
    ours, theirs = pair
    files = tls.TlsFiles(str(server_file), str(server_file), str(authority.file))
    peer = tls.TlsSocket(theirs, tls.context_of(tls.TlsFiles.of(learner_file), server_side=False),
                         name="localhost")
    ours.setblocking(False)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    loop = SelectorLoop()
    channel = Channel(loop, tls.TlsSocket(ours, tls.context_of(files, server_side=True)), "peer",
                      Owner(), None, 60 * 10**9)
    came = bytearray()

    def read() -> None:
        peer.handshake(DEADLINE_S)
        while count := peer.recv_into(room):
            came.extend(room[:count])

    def turns(reached) -> None:
        def turn():
            loop.poll(loop.now_ns() + 10**6)
            return reached()
        until(turn, "the channel is there")

    room = memoryview(bytearray(1000))
    begun, last = 300_000 * b"a", 100 * b"b"
    thread = threading.Thread(target=peer.handshake, args=(DEADLINE_S,))
    thread.start()
    turns(lambda: channel.sock.ready and not thread.is_alive())
    thread.join()
    channel.send([begun])
    assert channel.blocked
    assert channel.sent == 0  # all of it may still be with TLS
    assert channel.sock.owed
    channel.cut_queue()
    channel.send([last])
    thread = threading.Thread(target=read)
    thread.start()
    turns(lambda: not channel.unsent)
    channel.close()
    thread.join()
    assert bytes(came) == begun + last
    peer.close()
    loop.close()


# ---------------------------------------------------------------------------- who is not let in
def test_a_plain_learner_is_told_of_tls(tmp_path, authority, server_file):
    with ServerThread(tmp_path, **authority.flags(server_file)) as server:
        with pytest.raises(ConnectionFailed, match="speaks TLS alone, and this connection is"):
            learner(server.port, None)
        with ScriptedLearner(server.port, 0, layout_of((4,))) as old:  # of protocol 4 alone
            assert "speaks TLS alone" in old.error()
        assert server.log.wait("connection refused")["reason"] == tls.PLAIN_DIALED
        server.server.stop()


def test_a_learner_with_tls_is_told_of_a_plain_server(tmp_path, learner_file):
    with ServerThread(tmp_path) as server:
        with pytest.raises(ConnectionFailed, match="the other end speaks plain TCP, and this "
                                                   "connection is TLS: start the server with"):
            learner(server.port, learner_file)
        assert "these are bytes of TLS, and this end speaks plain TCP" in server.log.wait(
            "connection refused")["reason"]
        with pytest.raises(PullFailed, match="the other end speaks plain TCP"):
            pull(f"127.0.0.1:{server.port}", tls=learner_file)
        server.server.stop()


def test_certificates_of_others_are_refused_on_both_sides(tmp_path, authority, stranger,
                                                          server_file, learner_file):
    foreign = stranger.make("learner-0")
    with ServerThread(tmp_path, **authority.flags(server_file)) as server:
        with pytest.raises(ConnectionFailed, match=r"the certificate of the other end is not "
                                                   r"accepted: self.signed certificate in"):
            learner(server.port, foreign)
        assert server.log.wait("TLS failed with who has connected")["peer"].startswith("127.0.0.1:")
        mixed = (foreign, foreign, learner_file)  # which trusts this server
        with pytest.raises(ConnectionFailed, match="the other end does not know who has signed"):
            learner(server.port, mixed)
        until(lambda: any("the certificate of the other end is not accepted: self" in line["reason"]
                          for line in server.log.find("TLS failed with who has connected")), "it")
        with (handshaken(server.port, authority, None) as nobody,  # without a certificate
              pytest.raises(ssl.SSLError, match=r"(?i)certificate.required")):
            nobody.recv(1)
        until(lambda: server.log.find("TLS failed with who has connected",
                                      reason="the other end has shown no certificate"), "its log")
        server.server.stop()


def test_a_server_of_another_name_and_an_expired_learner(tmp_path, authority, server_file,
                                                         learner_file):
    expired = authority.make("expired", days=-1)
    with ServerThread(tmp_path, host="127.0.0.2", **authority.flags(server_file)) as server:
        with pytest.raises(ConnectionFailed, match=r"IP address mismatch.*127\.0\.0\.2"):
            Learner(values(), f"127.0.0.2:{server.port}", learner_id=0, tls=learner_file)
        server.server.stop()
    with ServerThread(tmp_path, **authority.flags(server_file)) as server:
        with pytest.raises(ConnectionFailed, match="this end's certificate has expired"):
            learner(server.port, expired)
        server.server.stop()


def test_older_tls_is_refused(tmp_path, authority, server_file, learner_file):
    with ServerThread(tmp_path, **authority.flags(server_file)) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(authority.file)
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with (socket.create_connection(("127.0.0.1", server.port), 60) as plain,
              pytest.raises(ssl.SSLError, match=r"(?i)version")):
            context.wrap_socket(plain, server_hostname="localhost")
        until(lambda: server.log.find("TLS failed with who has connected",
                                      reason="the other end speaks no TLS 1.3"), "its log")
        server.server.stop()


# rule 17.8
def test_an_id_comes_with_its_certificate(tmp_path, authority, server_file, learner_file):
    other = authority.make("learner-1")
    settings = authority.flags(server_file)
    with ServerThread(tmp_path, learners=2, total_steps=1, tls_learner_names="learner-{id}",
                      **settings) as server:
        with pytest.raises(ConnectionFailed, match=r"learner 0 has one that is called learner-0 "
                                                   r".*is called .*learner-1"):
            learner(server.port, other)
        with learner(server.port, learner_file) as one:
            assert one.step(1).connected
        server.server.stop()
    with ServerThread(tmp_path, learners=2, total_steps=1, tls_learner_names="1=learner-0",
                      **settings) as server:
        with pytest.raises(ConnectionFailed, match="learner 0 has no certificate here"):
            learner(server.port, learner_file)
        with learner(server.port, learner_file, learner_id=1) as one:
            assert one.step(1).connected
        server.server.stop()


def test_data_sockets_come_with_the_certificate_of_their_learner(tmp_path, authority, server_file,
                                                                 learner_file):
    other = authority.make("other")
    with ServerThread(tmp_path, learners=2, **authority.flags(server_file)) as server:
        with learner(server.port, learner_file, num_streams=0) as one:
            generation = one._client._group.connection.generation
            with handshaken(server.port, authority, other) as sock:
                sock.sendall(encode.encode_data_hello(DataHello(0, generation, 0)))
                assert b"its other sockets came with another certificate" in all_of(sock)
        server.server.stop()


def all_of(sock) -> bytes:
    """Until the other end closes, in whatever way."""
    found = b""
    with suppress(OSError):
        while data := sock.recv(4096):
            found += data
    return found


# --------------------------------------------------------------------------------- over time
def test_renewed_certificates_are_read_on_sighup(tmp_path, authority, learner_file, stderr):
    path = authority.make("renewed", days=3)
    other = authority.make("renewed-2")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in authority.flags(path).items()]
    with ServerProcess(tmp_path, *flags, steps=10**6) as server:
        assert server.log.wait("a certificate expires soon")["days"] == 2
        with learner(server.port, learner_file) as one:
            step_until(one, lambda status: status.versions[0] > 0)
            until(lambda: "certificates expire soon: of 127.0.0.1" in stderr.getvalue(), "a line")
            before = one._client._group.connection.generation

            def shown() -> bytes:
                with handshaken(server.port, authority, learner_file) as sock:
                    return sock.getpeercert(binary_form=True)

            old = shown()
            path.write_text("no certificate")
            server.signal(signal.SIGHUP)
            assert "renewed.pem" in server.log.wait("could not be read again")["error"]
            assert shown() == old
            os.replace(other, path)
            server.signal(signal.SIGHUP)
            server.log.wait("the certificates were read again")
            assert shown() != old
            version = one.step(1).versions[0]
            step_until(one, lambda status: status.versions[0] > version + 1)
            assert one._client._group.connection.generation == before
        server.signal(signal.SIGTERM)
        assert server.wait() == 128 + signal.SIGTERM


def test_certificates_of_learners_that_expire_soon_are_told_of(tmp_path, authority, server_file):
    with ServerThread(tmp_path, **authority.flags(server_file)) as server:
        with learner(server.port, authority.make("soon", days=20)):
            line = server.log.wait("a certificate expires soon")
            assert (line["certificate"], line["days"]) == ("of learner 0", 19)
        server.server.stop()


# --------------------------------------------------------------------------------- strangers
def test_a_handshake_has_the_time_of_a_first_frame(tmp_path, authority, server_file, monkeypatch):
    monkeypatch.setattr(door, "FIRST_FRAME_NS", 5 * 10**7)
    with ServerThread(tmp_path, **authority.flags(server_file)) as server:
        with socket.create_connection(("127.0.0.1", server.port), 60) as half:
            with suppress(OSError):  # it may be over by then
                half.sendall(b"\x16\x03\x01")  # and no more
            assert all_of(half) == b""
        server.log.wait("connection without a complete first frame is closed")
        server.server.stop()


def test_what_comes_behind_a_handshake_is_no_part_of_it(pair, authority, server_file, learner_file):
    """The last word of a handshake and a large HELLO may come in one go."""
    ours, theirs = pair
    files = tls.TlsFiles(str(server_file), str(server_file), str(authority.file))
    server = tls.TlsSocket(ours, tls.context_of(files, server_side=True))
    ours.setblocking(False)
    into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = tls.context_of(tls.TlsFiles.of(learner_file), server_side=False).wrap_bio(
        into, out, server_hostname="localhost")
    room = memoryview(bytearray(1 << 20))
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    theirs.sendall(out.read())
    with pytest.raises(BlockingIOError):
        server.recv_into(room)
    into.write(theirs.recv(1 << 16))
    client.do_handshake()
    hello = 150_000 * b"h"
    client.write(hello)
    theirs.sendall(out.read())
    at = 0
    while at < len(hello):
        at += server.recv_into(room[at:len(hello)])
    assert bytes(room[:at]) == hello


def test_a_handshake_without_end_is_ended(pair, authority, server_file):
    """One message of the length that a certificate may have, and no more of it than that."""
    ours, theirs = pair
    files = tls.TlsFiles(str(server_file), str(server_file), str(authority.file))
    server = tls.TlsSocket(ours, tls.context_of(files, server_side=True))
    piece = b"\x16\x03\x01\x40\x00"
    message = b"\x01\x01\xff\x00" + bytes(0x4000 - 4)  # a ClientHello of 130,816 bytes
    theirs.sendall(piece + message)
    theirs.sendall(3 * (piece + bytes(0x4000)))
    ours.setblocking(False)
    with pytest.raises(tls.TlsError):
        server.recv_into(memoryview(bytearray(100)))
    assert server._came <= tls.HANDSHAKE_BYTES_MAX + tls.HANDSHAKE_AT_ONCE


def test_broken_records_end_their_connection_and_nothing_else(tmp_path, authority, server_file,
                                                              learner_file):
    """Seeded: rubbish after the first byte of TLS, cut and changed handshakes, changed records."""
    dice = random.Random(7)
    settings = authority.flags(server_file)
    with ServerThread(tmp_path, total_steps=10**6, **settings) as server:
        hello = client_hello(authority, learner_file)
        with learner(server.port, learner_file) as one:
            for turn in range(300):
                broken = bytearray(hello)
                if turn % 3 == 0:
                    broken = bytearray(b"\x16\x03\x01" + dice.randbytes(dice.randrange(600)))
                elif turn % 3 == 1:
                    for _ in range(dice.randrange(1, 8)):
                        broken[dice.randrange(1, len(broken))] = dice.randrange(256)
                else:
                    del broken[dice.randrange(1, len(broken)):]
                    broken += dice.randbytes(dice.randrange(200))
                with socket.create_connection(("127.0.0.1", server.port), 60) as sock:
                    with suppress(OSError):  # it may be over by then
                        sock.sendall(broken)
                        sock.shutdown(socket.SHUT_WR)
                    all_of(sock)
            for turn in range(50):  # damaged behind a good handshake
                with handshaken(server.port, authority, learner_file) as sock:
                    raw = socket.socket(fileno=os.dup(sock.fileno()))
                    with raw:
                        raw.sendall(b"\x17\x03\x03" + struct.pack(">H", 40 + turn)
                                    + dice.randbytes(40 + turn))
                        assert all_of(raw)[:1] in (b"\x15", b"\x17", b"")
            version = one.step(1).versions[0]
            step_until(one, lambda status: status.versions[0] > version)
        server.server.stop()
        server.wait()
        assert not server.log.find("internal error")
        assert not server.log.find("the system failed a connection")


def client_hello(authority, file) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(authority.file)
    context.load_cert_chain(file)
    out = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), out, server_hostname="localhost").do_handshake()
    return out.read()


# ------------------------------------------------------------------------------------- files
def test_files_that_cannot_be_used_are_one_sentence(tmp_path, authority, server_file, learner_file):
    rubbish = tmp_path / "rubbish.pem"
    rubbish.write_text("no PEM at all")
    missing = str(tmp_path / "missing.pem")
    for given, why in (
        (missing, "missing.pem cannot be read for TLS: No such file"),
        (rubbish, "rubbish.pem cannot be used for TLS: expected a certificate with its key in PEM"),
        ((server_file, learner_file, authority.file), "is not that of the certificate in"),
        ((server_file, server_file, rubbish), "rubbish.pem cannot be used for TLS: expected "
                                              "certificates in PEM"),
        ((server_file, server_file), "tls must be one PEM file, or three"),
    ):
        with pytest.raises(ConfigError, match=why):
            Dialer("127.0.0.1:1", tls=given)
    with ServerProcess(tmp_path, f"--tls-cert={missing}", f"--tls-key={missing}",
                       f"--tls-client-ca={missing}", wait=False) as server:
        assert server.wait() == Exit.UNUSABLE
        assert "missing.pem cannot be read for TLS" in server.log.text()
        assert len(server.log.text().splitlines()) == 1
    with pytest.raises(ConfigError, match="tls has no effect with unix:/s"):
        Dialer("unix:/s", tls=server_file)


def test_settings_of_tls_come_together():
    with pytest.raises(ConfigError, match="--tls-cert needs --tls-key and --tls-client-ca as"):
        Config(learners=1, total_steps=1, tls_cert="a")
    with pytest.raises(ConfigError, match="--tls-learner-names needs --tls-cert and --tls-key"):
        Config(learners=1, total_steps=1, tls_learner_names="{id}")
    open_to_all = dict(learners=1, total_steps=1, host="0.0.0.0")
    with pytest.raises(ConfigError, match="give a certificate with --tls-cert"):
        Config(**open_to_all)
    guarded = dict(tls_cert="a", tls_key="a", tls_client_ca="a")
    assert Config(**open_to_all, **guarded).bind_host == "0.0.0.0"
    assert Config(learners=1, total_steps=1, **guarded).bind_host == "0.0.0.0"


def test_pieces_make_full_records():
    gather = [b"a" * 20, b"b" * 40_000, b"c" * 3, b"", b"d" * 200_000]
    found = list(tls.pieces(gather, tls.AT_ONCE))
    assert b"".join(found) == b"".join(gather)[: tls.AT_ONCE]
    assert len(found[0]) == tls.RECORD
    assert list(tls.pieces([b"x"], 10)) == [b"x"]
    assert list(tls.pieces([], 10)) == []
