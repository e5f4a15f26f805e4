"""The server against bare sockets that move the same bytes, over TCP on loopback, in the same run.

- Broadcast: a group's queue, striping and sends, against `sendall` of as many bytes.
- Rounds: the real server process with three learners, against a loop of a few lines that receives
  three deltas of known length, decodes, merges, encodes and sends three broadcasts: the same bytes
  and the same arithmetic without frames, rounds, threads or anything that could go wrong.

The other end of every socket is its own process that only moves bytes. 1.0 would be free.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # the other ends are started as scripts
    sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import pytest  # noqa: E402

from benchmarks.limits.figure import Figure, in_turns, on, sides  # noqa: E402
from benchmarks.pairs import ratio  # noqa: E402
from syncer import tcp  # noqa: E402
from syncer.layout import AVG, RDA, FragmentLayout, Layout  # noqa: E402
from syncer.merge import FragmentStore  # noqa: E402
from syncer.merge.buffers import BufferPool  # noqa: E402
from syncer.protocol import (  # noqa: E402
    DTYPE_BF16,
    DTYPE_F32,
    DTYPES,
    Msg,
    bulk_dtype,
    tensor_bytes,
)
from syncer.server.conn import Channel  # noqa: E402
from syncer.server.decoded import DECODERS  # noqa: E402
from syncer.server.group import Group, Reports  # noqa: E402
from syncer.server.selector import SelectorLoop  # noqa: E402
from syncer.server.wire_version import WireVersion  # noqa: E402
from syncer.wire import encode, messages  # noqa: E402
from syncer.wire.frames import FrameReader  # noqa: E402
from syncer.wire.hello import Hello  # noqa: E402
from syncer.wire.limits import Limits  # noqa: E402

MIB = 1024 * 1024
NUMEL = 8 * MIB
ROUNDS = 15
LEARNERS = 3
DEMO = Layout((FragmentLayout(AVG, (65_536,)),
               *(FragmentLayout(RDA, (98_304, 384)) for _ in range(3))))
"""About the size of the demo's model, in four fragments."""


# ------------------------------------------------------------------------- the other processes
def swallow(sock: socket.socket) -> None:
    buffer = bytearray(4 * MIB)
    while sock.recv_into(buffer):
        pass


def relay(port: int, dtype: int) -> None:
    """The rounds without a server: deltas in, merge, versions out."""
    store = FragmentStore(DEMO, lr=0.7, momentum=0.9, threads=1)
    learners = []
    for _ in range(LEARNERS):
        learners.append(socket.create_connection(("127.0.0.1", port)))
        learners[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for fragment, shape in enumerate(DEMO.fragments):
        store.adopt(fragment, np.zeros(shape.numel, np.float32))
    pool = BufferPool()
    deltas = [memoryview(bytearray(4 * DEMO.largest)) for _ in range(LEARNERS)]
    step = 0
    while True:
        fragment = step % len(DEMO.fragments)
        step += 1
        numel = DEMO.fragments[fragment].numel
        contributions = []
        for learner, sock in enumerate(learners):
            delta = deltas[learner][: tensor_bytes(numel, dtype)]
            if not receive(sock, delta):
                return
            gradient = np.frombuffer(pool.take(numel), np.float32)
            DECODERS[dtype](delta, gradient, True, 1)
            contributions.append((learner, 1, 1.0, gradient))
        version = store.publish(store.prepare(fragment, step, contributions))
        image = WireVersion(Msg.BCAST_FRAGMENT, version, dtype, pool)
        image.ready(len(image.body))
        for sock in learners:
            sock.sendall(image.body)


def receive(sock: socket.socket, buffer: memoryview) -> bool:
    at = 0
    while at < len(buffer):
        count = sock.recv_into(buffer[at:])
        if not count:
            return False
        at += count
    return True


@contextmanager
def peer(task: str, *arguments: str) -> Iterator[socket.socket]:
    """A TCP connection whose other end runs `task` in its own process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        process = subprocess.Popen([sys.executable, __file__, task, port, *arguments])
        ours, _ = listener.accept()
    try:
        yield ours
    finally:
        ours.close()
        process.wait(timeout=60)


# ----------------------------------------------------------------------------------- in process
class Deaf(Reports):
    """Nothing comes in here."""

    def ended(self, group, reason, refusal):
        raise AssertionError((reason, refusal))


class Sink:
    """Groups and their loop."""

    def __init__(self):
        self.loop = SelectorLoop()
        self.pool = BufferPool()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.loop.close()

    def group(self, sockets, dtype) -> Group:
        hello = Hello(0, 1, dtype, Layout((FragmentLayout(RDA, (NUMEL,)),)), bytes(32), bytes(32),
                      None, len(sockets) - 1)
        limits = Limits.for_server(hello.layout, dtype)
        channels = []
        for sock in sockets:
            sock.setblocking(False)
            tcp.configure(sock)
            channels.append(Channel(self.loop, sock, "peer", None, FrameReader(limits), 60 * 10**9))
        group = Group(channels[0], hello, Deaf())
        for index, channel in enumerate(channels):
            channel.reader.reassembly = group.reassembly
            if index:
                group.attach(index - 1, channel)
        return group


def encoded(params: np.ndarray, dtype: int) -> memoryview:
    """These parameters as a learner gets them."""
    source = SimpleNamespace(fragment=0, version=0, params=params)
    image = WireVersion(Msg.BCAST_FRAGMENT, source, dtype, BufferPool())
    image.ready(len(image.body))
    return image.body


def broadcast(dtype: int, learners: int, streams: int = 0, turns: int = ROUNDS) -> Figure:
    """A new version every time; bf16 is encoded once, however many learners get it.

    The bare sockets send the same bytes: of memory that was never written the system has one page
    of zeros, which is in the cache, and one that copies that is faster by a third than any that
    has something to say.
    """
    params = np.linspace(-1, 1, NUMEL, dtype=np.float32)
    body = bytes(encoded(params, dtype))
    with Sink() as sink, ExitStack() as stack:
        def swallowers(count):
            with on(sides()[1]):
                return [stack.enter_context(peer("swallow")) for _ in range(count)]

        plain = swallowers(learners)
        groups = [sink.group(swallowers(1 + streams), dtype) for _ in range(learners)]
        versions = iter(range(10**9))

        def bare() -> None:
            for sock in plain:
                sock.sendall(body)

        def ours() -> None:
            version = next(versions)
            source = SimpleNamespace(fragment=0, version=version, params=params)
            image = WireVersion(Msg.BCAST_FRAGMENT, source, dtype, sink.pool)
            for group in groups:
                group.outbox.broadcast(image)
                group.pump()
            while not all(group.flushed for group in groups):
                sink.loop.poll()

        with on(sides()[0]):
            return in_turns(bare, ours, learners * len(body) / 1e9, turns)


@pytest.mark.parametrize(("dtype", "learners", "streams"), [
    (DTYPE_F32, 1, 0), (DTYPE_F32, 1, 4), (DTYPE_BF16, 1, 0), (DTYPE_BF16, 4, 0)])
def test_broadcast(benchmark, dtype, learners, streams):
    figure = benchmark.pedantic(broadcast, (dtype, learners, streams), rounds=1)
    benchmark.extra_info["ratio_to_bare_socket"] = figure.ratio
    print(f"\nbroadcast {DTYPES[dtype]} to {learners}, {streams or 'no'} data sockets: "
          f"{figure.ours:.2f} GB/s, bare socket {figure.bound:.2f} GB/s, ratio {figure.ratio:.2f}")


def report(benchmark, what, size, result):
    benchmark.extra_info["ratio_to_bare_socket"] = result.ratio
    print(f"\n{what}: {size / result.ours_ns:.2f} GB/s, bare socket "
          f"{size / result.reference_ns:.2f} GB/s, ratio {result.ratio:.2f}")


# --------------------------------------------------------------------------------------- rounds
class Fleet:
    """Three learners that answer at once, as bytes: they know what comes and how long it is."""

    def __init__(self, sockets: list[socket.socket], dtype: int):
        self.sockets = sockets
        self.step = 0
        sizes = [tensor_bytes(f.numel, bulk_dtype(dtype)) for f in DEMO.fragments]
        pushes = [tensor_bytes(f.numel, dtype) for f in DEMO.fragments]
        pull = len(encode.encode_pull(messages.Pull(0, 1, 1)))
        self.down = [13 + 24 + 13 + 12 + size + pull for size in sizes]
        self.buffers = [memoryview(bytearray(sum(self.down))) for _ in sockets]
        self.bodies = [bytes(size) for size in pushes]

    def round(self) -> None:
        self.step += 1
        fragment = (self.step - 1) % len(DEMO.fragments)
        body = self.bodies[fragment]
        for learner, sock in enumerate(self.sockets):
            push = messages.Push(learner, fragment, self.step, 1, max(0, self.step - 4), self.step,
                                 1, 1, b"")
            (frame,) = encode.chunk_message(Msg.PUSH_FRAGMENT, encode.push_head(push), body,
                                            self.step)
            head, tensor = frame
            sent = sock.sendmsg(frame)
            sock.sendall(tensor[sent - len(head):])
        for sock, buffer in zip(self.sockets, self.buffers, strict=True):
            assert receive(sock, buffer[: self.down[fragment]])


@contextmanager
def served(dtype: int) -> Iterator[list[socket.socket]]:
    """The real server with three learners, up to its first pull."""
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        with socket.create_server(("127.0.0.1", 0)) as held:
            port = held.getsockname()[1]
        clean = {k: v for k, v in os.environ.items() if not k.startswith("SYNCER_")}
        log = stack.enter_context((Path(directory) / "log").open("wb"))
        process = subprocess.Popen(
            [sys.executable, "-m", "syncer.server", "--learners", str(LEARNERS), "--quorum",
             str(LEARNERS), "--total-steps", "1000000000", "--port", str(port), "--pipeline", "1",
             "--sync-interval-steps", "0", "--merge-threads", "1",
             "--delta-correction", "none", "--log-level", "warning"],
            cwd=ROOT, env=clean, stderr=log)
        try:
            sockets = join(port, dtype, process)
            try:
                yield sockets
            finally:
                for sock in sockets:
                    sock.close()
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)


def join(port: int, dtype: int, process: subprocess.Popen) -> list[socket.socket]:
    sockets = []
    for learner in range(LEARNERS):
        while True:
            assert process.poll() is None
            try:
                sock = socket.create_connection(("127.0.0.1", port))
                break
            except ConnectionRefusedError:
                continue
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(encode.encode_hello(Hello(learner, 1, dtype, DEMO, bytes(32), bytes(32))))
        sockets.append(sock)
    for fragment, shape in enumerate(DEMO.fragments):
        tensor = bytes(tensor_bytes(shape.numel, bulk_dtype(dtype)))
        sockets[0].sendall(b"".join(encode.bare_message(
            Msg.INIT_PARAMS, encode.init_head(fragment), tensor)))
    first = sum(13 + 24 + 13 + 12 + tensor_bytes(f.numel, bulk_dtype(dtype))
                for f in DEMO.fragments) + 29
    for sock in sockets:
        assert receive(sock, memoryview(bytearray(first)))
    return sockets


@contextmanager
def relayed(dtype: int) -> Iterator[list[socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        process = subprocess.Popen([sys.executable, __file__, "relay", port, str(dtype)])
        sockets = [listener.accept()[0] for _ in range(LEARNERS)]
    try:
        for sock in sockets:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield sockets
    finally:
        for sock in sockets:
            sock.close()
        process.wait(timeout=60)


@pytest.mark.parametrize("dtype", [DTYPE_F32, DTYPE_BF16])
def test_rounds(benchmark, dtype):
    fragments = len(DEMO.fragments)
    sizes = [tensor_bytes(f.numel, dtype) for f in DEMO.fragments]
    bodies = [bytes(size) for size in sizes]
    with served(dtype) as sockets, relayed(dtype) as plain:
        fleet = Fleet(sockets, dtype)
        buffer = memoryview(bytearray(max(sizes)))

        def bare() -> None:
            for size, body in zip(sizes, bodies, strict=True):
                for sock in plain:
                    sock.sendall(body)
                for sock in plain:
                    assert receive(sock, buffer[:size])

        def ours() -> None:
            for _ in range(fragments):
                fleet.round()

        result = ratio(bare, ours, rounds=ROUNDS, sample_ms=60)
        benchmark.pedantic(ours, rounds=5)
    benchmark.extra_info["ratio_to_straight_line"] = result.ratio
    print(f"\nrounds {DTYPES[dtype]}, {LEARNERS} learners, {sum(sizes) / fragments / 1e3:.0f} kB a "
          f"delta: {fragments * 1e9 / result.ours_ns:.0f}/s, straight line "
          f"{fragments * 1e9 / result.reference_ns:.0f}/s, ratio {result.ratio:.2f}")


if __name__ == "__main__":
    with suppress(BrokenPipeError, ConnectionResetError):
        task, port, *rest = sys.argv[1:]
        if task == "relay":
            relay(int(port), int(rest[0]))
        else:
            connected = socket.create_connection(("127.0.0.1", int(port)))
            swallow(connected)
