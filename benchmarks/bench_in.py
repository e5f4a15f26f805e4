"""The way in against bare sockets that take the same bytes, over TCP on loopback, in turns.

- Push: frames, reassembly, decode, negate and finite scan, against `recv_into` into memory that is
  there already.
- Initial values: the same with the digest, against a thread that receives as many bytes beside one
  that hashes as many in two interleaved streams: with free cores, the slower of both.
- Before decode: CPU seconds alone, of a group whose messages nobody looks at.

As many sockets on both sides, and a process of its own at the other end of each four, which waits
for nothing but room. 1.0 would be free.
"""

from __future__ import annotations

import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # the senders are started as scripts
    sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402

from benchmarks.limits.figure import Figure, in_turns, on, sides  # noqa: E402
from syncer import kernels, pages, tcp  # noqa: E402
from syncer.layout import RDA, FragmentLayout, Layout  # noqa: E402
from syncer.merge.buffers import BufferPool  # noqa: E402
from syncer.protocol import (  # noqa: E402
    CHUNK_SIZE,
    DTYPE_BF16,
    DTYPE_F32,
    DTYPES,
    Msg,
    tensor_bytes,
)
from syncer.server.conn import Channel  # noqa: E402
from syncer.server.group import Group, Reports  # noqa: E402
from syncer.server.ingest import Ingest, Intake  # noqa: E402
from syncer.server.selector import SelectorLoop  # noqa: E402
from syncer.server.system import ThreadWorkers  # noqa: E402
from syncer.wire import encode, messages  # noqa: E402
from syncer.wire.frames import FrameReader  # noqa: E402
from syncer.wire.hello import Hello  # noqa: E402
from syncer.wire.limits import Limits  # noqa: E402

MIB = 1 << 20
MESSAGE_BYTES = 128 * MIB
"""Of one tensor on the wire; an eighth of it in a short run."""
MESSAGES = 4
"""Of one sample; initial values are those of as many fragments."""
STREAMS = 4
TURNS = 9


# ------------------------------------------------------------------------------ the senders
def pieces(kind: str, body: memoryview, number: int) -> list[list[bytes | memoryview]]:
    """The CHUNKs of one message, as a learner cuts it for `STREAMS` sockets."""
    if kind == "init":
        head, inner = encode.init_head(number % MESSAGES), Msg.INIT_PARAMS
    else:
        inner = Msg.PUSH_FRAGMENT
        head = encode.push_head(messages.Push(0, 0, 1, 1, 0, 1, 1, 1, b""))
    return encode.chunk_message(inner, head, body, number, STREAMS)


class Sender:
    """One socket and what waits for it."""

    def __init__(self, port: int, poll: select.poll):
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.sock.setblocking(False)
        self.poll = poll
        self.queue: list[memoryview] = []
        poll.register(self.sock, 0)

    def put(self, piece: list[bytes | memoryview]) -> None:
        self.queue += [memoryview(part).cast("B") for part in piece if len(part)]
        self.poll.modify(self.sock, select.POLLOUT)

    def send(self) -> None:
        sent = self.sock.sendmsg(self.queue[:8])
        while sent:
            taken = min(sent, len(self.queue[0]))
            self.queue[0] = self.queue[0][taken:]
            if not self.queue[0]:
                del self.queue[0]
            sent -= taken
        if not self.queue:
            self.poll.modify(self.sock, 0)


def pour(port: int, kind: str, dtype: int, numel: int) -> None:
    """Messages for ever, their pieces over the sockets in turn, each socket as fast as it takes."""
    poll = select.poll()
    senders = [Sender(port, poll) for _ in range(STREAMS)]
    by_descriptor = {sender.sock.fileno(): sender for sender in senders}
    body = memoryview(bytes(tensor_bytes(numel, dtype)))
    number = 0
    while True:
        while sum(len(sender.queue) for sender in senders) < 2 * STREAMS:
            for i, piece in enumerate(pieces(kind, body, number)):
                senders[i % STREAMS].put(piece)
            number += 1
        for descriptor, events in poll.poll():
            if events & ~select.POLLOUT:
                return
            by_descriptor[descriptor].send()


@contextmanager
def sender(kind: str, dtype: int, numel: int) -> Iterator[list[socket.socket]]:
    """Sockets whose other ends are poured into by a process of their own."""
    with ExitStack() as stack:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = str(listener.getsockname()[1])
            with on(sides()[1]):
                process = subprocess.Popen(
                    [sys.executable, __file__, port, kind, str(dtype), str(numel)])
            stack.callback(process.wait, 60)
            sockets = [stack.enter_context(listener.accept()[0]) for _ in range(STREAMS)]
        for sock in sockets:
            sock.setblocking(False)
        yield sockets


# ----------------------------------------------------------------------------- the receivers
class Bare:
    """Receives into one buffer of a whole message for each socket's share of it."""

    def __init__(self, sockets: list[socket.socket], size: int):
        self.sockets, self.size = sockets, size
        share = size // len(sockets) // CHUNK_SIZE * CHUNK_SIZE
        memory = memoryview(bytearray(share * len(sockets)))
        self.shares = [memory[i * share : (i + 1) * share] for i in range(len(sockets))]
        self.at = [0] * len(sockets)
        self.poll = select.epoll()
        self.places = {}
        for i, sock in enumerate(sockets):
            self.places[sock.fileno()] = i
            self.poll.register(sock, select.EPOLLIN)

    def take(self, messages: int) -> None:
        left = messages * self.size
        while left > 0:
            for descriptor, _ in self.poll.poll():
                i = self.places[descriptor]
                with suppress(BlockingIOError):
                    count = self.sockets[i].recv_into(
                        self.shares[i][self.at[i] : self.at[i] + CHUNK_SIZE])
                    self.at[i] = (self.at[i] + count) % len(self.shares[i])
                    left -= count


class Counted(Reports):
    """Messages that nobody looks at."""

    def __init__(self):
        self.messages = 0

    def frame(self, group, kind, payload):
        self.messages += 1

    def ended(self, group, reason, refusal):
        raise AssertionError((reason, refusal))


class Ours:
    """A group of the server, with its loop and workers; decodes unless it only counts."""

    def __init__(self, sockets: list[socket.socket], dtype: int, layout: Layout, decode: bool):
        self.loop = SelectorLoop()
        self.workers = ThreadWorkers(self.loop)
        self.pool = BufferPool()
        pages.keep_at_most(8 * 4 * layout.largest)  # as a session says, by what its rounds use
        self.messages = 0
        self.counted = None if decode else Counted()
        self.ingest = self.counted or Ingest(
            self.workers, self.pool, handle=self.handle, left=self.left, say_farewell=self.left,
            report=self.left)
        hello = Hello(0, 1, dtype, layout, bytes(32), bytes(32), None, len(sockets))
        limits = Limits.for_server(layout, dtype)
        self.mute = socket.socketpair()
        self.mute[0].setblocking(False)
        control, *data = [Channel(self.loop, sock, "peer", None, FrameReader(limits), 60 * 10**9)
                          for sock in (self.mute[0], *sockets)]
        self.group = Group(control, hello, self.ingest)
        self.group.work = Intake()
        control.reader.reassembly = self.group.reassembly
        for index, channel in enumerate(data):
            tcp.configure(channel.sock)
            channel.reader.reassembly = self.group.reassembly
            self.group.attach(index, channel)

    def handle(self, event):
        event.payload.release()
        self.messages += 1

    def left(self, *what):
        raise AssertionError(what)

    @property
    def seen(self) -> int:
        return self.messages if self.counted is None else self.counted.messages

    def take(self, messages: int) -> None:
        wanted = self.seen + messages
        while self.seen < wanted:
            self.loop.poll()

    def close(self) -> None:
        self.workers.close()
        self.loop.close()
        for sock in self.mute:
            sock.close()


# ------------------------------------------------------------------------------- the figures
def taken_in(kind: str, dtype: int, *, decode: bool = True, turns: int = TURNS,
             short: bool = False) -> Figure:
    """Ours against bare, in turns."""
    size = MESSAGE_BYTES // 8 if short else MESSAGE_BYTES
    numel = size // tensor_bytes(1, dtype)
    layout = Layout((FragmentLayout(RDA, (numel,)),) * MESSAGES)
    part = bytes(size)

    def digests() -> None:
        for _ in range(MESSAGES // 2):
            kernels.sha256_pair(part, part)

    with sender(kind, dtype, numel) as plain, sender(kind, dtype, numel) as framed:
        bare, ours = Bare(plain, size), Ours(framed, dtype, layout, decode)

        def bound() -> None:
            hashing = threading.Thread(target=digests if kind == "init" else lambda: None)
            hashing.start()
            bare.take(MESSAGES)
            hashing.join()

        try:
            return in_turns(bound, lambda: ours.take(MESSAGES), MESSAGES * size / 1e9, turns)
        finally:
            ours.close()


def before_decode(turns: int = TURNS, short: bool = False) -> Figure:
    """CPU seconds for a GB alone."""
    found = taken_in("push", DTYPE_F32, decode=False, turns=turns, short=short)
    assert found.bound_cpu is not None
    assert found.ours_cpu is not None
    return found._replace(ratio=found.bound_cpu / found.ours_cpu)


def said(what: str, figure: Figure) -> None:
    print(f"\n{what}: {figure.ours:.2f} GB/s and {figure.ours_cpu:.3f} CPU s/GB, bound "
          f"{figure.bound:.2f} GB/s and {figure.bound_cpu:.3f} CPU s/GB, ratio {figure.ratio:.2f}")


@pytest.mark.parametrize("dtype", [DTYPE_F32, DTYPE_BF16])
def test_push(dtype):
    said(f"push {DTYPES[dtype]}", taken_in("push", dtype))


def test_initial_values():
    said("initial values f32", taken_in("init", DTYPE_F32))


def test_before_decode():
    said("in, CPU before decode", before_decode())


if __name__ == "__main__":
    with suppress(BrokenPipeError, ConnectionResetError):
        pour(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
