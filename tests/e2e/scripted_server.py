"""The server's end of the protocol for tests of the learner: real sockets, no rounds.

A test says what the server sends and reads what a learner sent. Every wait has a generous deadline
and fails with a sentence. Who introduces himself is welcomed as `welcome` says, or refused as by a
published server of protocol 4, which takes the block behind a HELLO for a broken end of it.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import select
import socket
import threading
import time

from syncer.protocol import EXTENSION_MAGIC, Msg
from syncer.wire import encode
from syncer.wire.extended import (
    Fate,
    LearnerReport,
    NoticeText,
    RunState,
    Welcome,
    encode_fate,
    encode_notice,
    encode_welcome,
    parse_report,
)
from syncer.wire.frames import FrameReader, Reassembly
from syncer.wire.hello import Hello, parse_hello
from syncer.wire.limits import Limits
from syncer.wire.messages import (
    FinalAck,
    Heartbeat,
    Init,
    Manifest,
    Pull,
    Push,
    parse_data_hello,
    parse_final_ack,
    parse_heartbeat,
    parse_init,
    parse_push,
)

DEADLINE_S = 60.0


class Peer:
    """One connection generation of a learner, as the server sees it."""

    def __init__(self, control: socket.socket, hello: Hello, reader: FrameReader):
        self.hello = hello
        self.extended = hello.extension is not None
        self.limits = Limits.for_server(hello.layout, hello.dtype, extended=self.extended)
        self.reassembly = Reassembly(self.limits)
        self.sockets: list[socket.socket] = []
        self._readers: dict[socket.socket, FrameReader] = {}
        self.waiting = []
        self._msg_id = 0
        self._next = 0
        self.attach(control, reader)

    def attach(self, connected: socket.socket, reader: FrameReader) -> None:
        """Adds a socket whose first frame was read; what came behind it is taken now."""
        reader.limits, reader.reassembly = self.limits, self.reassembly
        self._readers[connected] = reader
        self.sockets.append(connected)
        self._take(reader)

    @property
    def control(self) -> socket.socket:
        return self.sockets[0]

    # --- what the learner sent -------------------------------------------------------------------

    def receive(self, wanted: type = object, *, heartbeats: bool = False):
        """The next message of a type; None at the end of the connection."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            for index, message in enumerate(self.waiting):
                if isinstance(message, wanted) and (
                        heartbeats or not isinstance(message, Heartbeat)):
                    return self.waiting.pop(index)
            if not self._readers:
                return None
            ready, _, _ = select.select(list(self._readers), [], [],
                                        max(deadline - time.monotonic(), 0))
            assert ready, f"no {wanted.__name__} within {DEADLINE_S} s"
            for each in ready:
                self._receive_some(each)

    def _receive_some(self, each: socket.socket) -> None:
        reader = self._readers[each]
        try:
            count = each.recv_into(reader.buffer())
        except ConnectionError:
            count = 0
        if count == 0:
            del self._readers[each]
            return
        self._take(reader.received(count))

    def _take(self, frames) -> None:
        self.waiting += [self._parse(*frame) for frame in frames]

    def _parse(self, msg_type: int, payload):
        hello = self.hello
        if msg_type == Msg.INIT_PARAMS:
            return parse_init(payload, hello.learner, hello.layout, hello.dtype)
        if msg_type == Msg.PUSH_FRAGMENT:
            return parse_push(payload, hello.learner, hello.layout, hello.dtype)
        if msg_type == Msg.HEARTBEAT:
            return parse_heartbeat(payload, hello.learner)
        if msg_type == Msg.REPORT:
            return parse_report(payload)
        assert msg_type == Msg.FINAL_ACK, msg_type
        return parse_final_ack(payload)

    def receive_inits(self) -> list[bytes]:
        """The tensor bytes of one INIT per fragment, in fragment order."""
        inits = [self.receive(Init) for _ in self.hello.layout.fragments]
        return [bytes(init.tensor) for init in sorted(inits, key=lambda init: init.fragment)]

    def receive_push(self) -> Push:
        return self.receive(Push)

    def receive_report(self) -> LearnerReport:
        return self.receive(LearnerReport)

    def receive_ack(self) -> FinalAck:
        return self.receive(FinalAck)

    # --- what the server sends -------------------------------------------------------------------

    def send(self, frame: bytes, stream: int = 0) -> None:
        self.sockets[stream].sendall(frame)

    def pull(self, fragment: int, step: int, attempt: int = 1) -> None:
        self.send(encode.encode_pull(Pull(fragment, step, attempt)))

    def fate(self, fragment: int, step: int, fate: int, attempt: int = 1) -> None:
        self.send(encode_fate(Fate(fragment, step, attempt, fate)))

    def bcast(self, fragment: int, version: int, tensor) -> None:
        self._stripe(Msg.BCAST_FRAGMENT, encode.bcast_head(fragment, version), tensor)

    def final(self, fragment: int, version: int, tensor) -> None:
        self._stripe(Msg.FINAL_FRAGMENT, encode.final_head(fragment, version), tensor)

    def manifest(self, step: int, versions) -> None:
        self.send(encode.encode_manifest(Manifest(step, tuple(versions))))

    def shutdown(self) -> None:
        self.send(encode.encode_shutdown())

    def notice(self, code: int, text: str) -> None:
        self.send(encode_notice(NoticeText(code, text)))

    def error(self, text: str) -> None:
        self.send(encode.encode_error(text))

    def _stripe(self, msg_type: int, head: bytes, tensor) -> None:
        for pieces in encode.chunk_message(msg_type, head, tensor, self._msg_id):
            data = self.sockets[1:] or self.sockets
            data[self._next % len(data)].sendall(b"".join(pieces))
            self._next += 1
        self._msg_id += 1

    def finish_sending(self) -> None:
        """The graceful end of a refused connection: what was sent arrives, then EOF."""
        for each in self.sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for each in self.sockets:
            each.close()
        self._readers = {}


PUBLISHED_REFUSAL = ("invalid HELLO: invalid HELLO profile extension length: 131 bytes after the "
                     "contract, expected 2 or 34")


class ScriptedServer:
    """Listens on a free loopback port; `accept` gives one fully attached learner after another.

    A thread reads what each socket says first and answers introductions, which a learner waits for.
    published: it refuses them, as servers do that were made before there were any.
    """

    def __init__(self, *, key: bytes | None = None, learners: int = 8, published: bool = False):
        self.refusal = PUBLISHED_REFUSAL if published else None
        """What who introduces himself is told instead of a WELCOME."""
        self.refused = 0
        """Introductions that were refused."""
        self.welcome: Welcome | None = Welcome(
            1, 77, 0, 100, learners, 1, 0.0, RunState.WAITING, "syncer of tests")
        """What who introduces himself is told; without `kept`, nothing is. None: he waits."""
        self._key = key
        self._learners = learners
        self._peers: list[Peer] = []
        self._arrived: queue.Queue = queue.Queue()
        """(socket, its first frame, its reader), or what went wrong with one."""
        self._coming: socket.socket | None = None
        """Who has been let in and has not said all of its first frame."""
        self._doorkeepers: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open_door()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def accept(self) -> Peer:
        """The next learner, once all its data sockets are attached; its HELLO is in `hello`."""
        control, (msg_type, payload), reader = self.accept_socket()
        assert msg_type == Msg.HELLO
        hello = self._hello(payload)
        peer = Peer(control, hello, reader)
        self._peers.append(peer)
        indices = []
        while len(indices) < hello.num_streams:
            data, (msg_type, payload), reader = self.accept_socket()
            assert msg_type == Msg.DATA_HELLO
            data_hello = parse_data_hello(payload)
            assert (data_hello.learner, data_hello.generation) == (hello.learner, hello.generation)
            assert bool(data_hello.proof) == (peer.extended and self._key is not None)
            indices.append(data_hello.stream)
            peer.attach(data, reader)
        assert indices == list(range(hello.num_streams))
        return peer

    def _hello(self, payload) -> Hello:
        return parse_hello(payload, key=self._key, learners=self._learners)

    def accept_socket(self):
        """(socket, its first frame, its reader)."""
        found = self._arrived.get(timeout=DEADLINE_S)
        if isinstance(found, Exception):
            raise found
        return found

    def _open_door(self) -> None:
        self._doorkeepers.append(
            threading.Thread(target=self._stand_at, args=(self._listener,), daemon=True))
        self._doorkeepers[-1].start()

    def _stand_at(self, listener: socket.socket) -> None:
        while True:
            try:
                connected, _ = listener.accept()
            except OSError:
                return  # it is not listened to any more
            self._coming = connected
            try:
                self._arrive(connected)
            except (AssertionError, OSError) as error:
                connected.close()
                self._arrived.put(error)

    def _arrive(self, connected: socket.socket) -> None:
        connected.settimeout(DEADLINE_S)
        reader = FrameReader(Limits.first_frame())
        frames = []
        while not frames:
            count = connected.recv_into(reader.buffer())
            assert count, "connection closed before its first frame"
            frames = list(itertools.islice(reader.received(count), 1))
        msg_type, payload = frames[0]
        if msg_type == Msg.HELLO and bytes(payload).rfind(EXTENSION_MAGIC) > 0:
            hello = self._hello(payload)
            if hello.extension is not None and self.refusal:
                self.refused += 1
                connected.sendall(encode.encode_error(self.refusal))
                connected.close()
                return
            if hello.extension is not None and self.welcome is not None:
                kept = self.welcome.kept or (False,) * len(hello.layout.fragments)
                connected.sendall(encode_welcome(self.welcome._replace(kept=kept)))
        self._arrived.put((connected, frames[0], reader))

    def stop_listening(self) -> None:
        """Refuses connections, and keeps the port for `listen_again`."""
        self._close_door()
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(("127.0.0.1", self.port))

    def listen_again(self) -> None:
        self._listener.listen()
        self._open_door()

    def _close_door(self) -> None:
        with contextlib.suppress(OSError):  # it may not listen
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def close(self) -> None:
        """Nobody is let in any more, and every socket that was is closed."""
        self._close_door()
        for doorkeeper in self._doorkeepers:
            while doorkeeper.is_alive():  # it may be about to say whom it has let in
                if self._coming is not None:
                    with contextlib.suppress(OSError):  # it may be closed, or in a peer's hands
                        self._coming.shutdown(socket.SHUT_RDWR)
                doorkeeper.join(0.01)
        while not self._arrived.empty():
            found = self._arrived.get()
            if not isinstance(found, Exception):
                found[0].close()
        for peer in self._peers:
            peer.close()

    def __enter__(self) -> ScriptedServer:
        return self

    def __exit__(self, *_) -> None:
        self.close()
