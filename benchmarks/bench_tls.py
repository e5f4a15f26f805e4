"""TLS against a bare pair of Python's ssl sockets that move the same bytes, in the same run.

Into the server: a learner sends chunks of a push, the server's channel reads frames. Out of it:
the channel sends chunks of a message, a learner reads them. The bare pair is `sendall` and
`recv_into` of 1 MiB on blocking `SSLSocket`s, with the same certificates. The far end of every
pair is its own process; CPU seconds are those of both ends, user and system.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # the far ends are started as scripts
    sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402

from benchmarks.limits.figure import Figure, NotHere, in_turns, on, sides  # noqa: E402
from syncer.errors import ConfigError  # noqa: E402
from syncer.layout import RDA, FragmentLayout, Layout  # noqa: E402
from syncer.learner.client_group import send_all  # noqa: E402
from syncer.learner.dialing import Dialer  # noqa: E402
from syncer.protocol import DTYPE_F32, Msg  # noqa: E402
from syncer.server.conn import Channel, Owner  # noqa: E402
from syncer.server.selector import SelectorLoop  # noqa: E402
from syncer.tls import TlsFiles, TlsSocket, context_of  # noqa: E402
from syncer.wire import encode, messages  # noqa: E402
from syncer.wire.frames import FrameReader, Reassembly  # noqa: E402
from syncer.wire.limits import Limits  # noqa: E402

MIB = 1024 * 1024
NUMEL = 8 * MIB
SAMPLE_BYTES = 4 * NUMEL * 4
"""Of one turn: four messages of 32 MiB."""
TURNS = 7
AT_LEAST = 0.9
TICK = os.sysconf("SC_CLK_TCK")
LAYOUT = Layout((FragmentLayout(RDA, (NUMEL,)),))


def chunks() -> list[list[bytes | memoryview]]:
    """The frames of one message of 32 MiB."""
    head = encode.push_head(messages.Push(0, 0, 1, 1, 0, 1, 1, 1, b""))
    return list(encode.chunk_message(Msg.PUSH_FRAGMENT, head, bytes(4 * NUMEL), 7))


# ------------------------------------------------------------------------------------- far ends
def far_end(task: str, kind: str, port: str, file: str) -> None:
    """Sends or takes for ever, until the other side closes."""
    buffer = memoryview(bytearray(MIB))
    if kind == "ours":
        sock = Dialer(f"localhost:{port}", tls=file).dial(60)
        sock.settimeout(None)
    else:
        context = context_of(TlsFiles.of(file), server_side=False)
        sock = context.wrap_socket(socket.create_connection(("localhost", int(port))),
                                   server_hostname="localhost")
    sock.sendall(b"?")  # so that both are through with the handshake
    sock.recv_into(buffer[:1])
    frames = chunks()
    while task == "swallow" and sock.recv_into(buffer):
        pass
    while task == "pour":
        if kind == "ours":
            for frame in frames:
                send_all(sock, frame)
        else:
            sock.sendall(buffer)


class Counter(Owner):
    """Frames are taken and dropped."""

    def __init__(self) -> None:
        self.count = 0
        self.sent = 0

    def on_bytes(self, channel: Channel, count: int) -> None:
        self.count += count

    def on_sent(self, channel: Channel, bulk: object) -> None:
        self.sent += 1


class Pair:
    """A connection whose far end runs `task` in its own process."""

    def __init__(self, task: str, kind: str, file: Path, server: Path):
        with socket.create_server(("localhost", 0)) as listener:
            port = str(listener.getsockname()[1])
            self.process = subprocess.Popen(
                [sys.executable, __file__, task, kind, port, str(file)], stderr=subprocess.DEVNULL)
            plain, _ = listener.accept()
        context = context_of(TlsFiles.of(server), server_side=True)
        self.task, self.buffer = task, memoryview(bytearray(MIB))
        self.owner, self.loop, self.frames = Counter(), SelectorLoop(), chunks()
        if kind == "ours":
            plain.setblocking(False)
            limits = Limits.for_server(LAYOUT, DTYPE_F32)
            self.reader = FrameReader(limits, Reassembly(limits))
            self.channel = Channel(self.loop, TlsSocket(plain, context), "peer", self.owner, None,
                                   60 * 10**9)
            while not self.channel.received:
                self.loop.poll()
            self.channel.reader = self.reader
            self.channel.send([b"!"])
            self.move = self._ours_in if task == "pour" else self._ours_out
        else:
            self.sock = context.wrap_socket(plain, server_side=True)
            self.sock.recv(1)
            self.sock.sendall(b"!")
            self.move = self._bare_in if task == "pour" else self._bare_out

    def _ours_in(self) -> None:
        until = self.owner.count + SAMPLE_BYTES
        while self.owner.count < until:
            self.loop.poll()

    def _ours_out(self) -> None:
        for _ in range(SAMPLE_BYTES // (4 * NUMEL)):
            for frame in self.frames:
                self.channel.send(list(frame))
                while self.channel.unsent:
                    self.loop.poll()

    def _bare_in(self) -> None:
        left = SAMPLE_BYTES
        while left > 0:
            left -= self.sock.recv_into(self.buffer)

    def _bare_out(self) -> None:
        for _ in range(SAMPLE_BYTES // MIB):
            self.sock.sendall(self.buffer)

    def cpu_s(self) -> float:
        """Of both ends, so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return time.process_time() + (int(fields[11]) + int(fields[12])) / TICK

    def close(self) -> None:
        if hasattr(self, "channel"):
            self.channel.close()
        else:
            self.sock.close()
        self.loop.close()
        self.process.wait(timeout=60)


def throughput(task: str, turns: int = TURNS) -> Figure:
    """Out of or into a fleet's server, with certificates of their own. CPU seconds of both ends."""
    try:
        from syncer.keys.authority import Authority  # noqa: PLC0415
    except ConfigError as error:
        raise NotHere(str(error)) from None
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        fleet = Authority.make(f"{folder}/keys")
        server, learner = fleet.server(["localhost"], 1), fleet.learner("learner-0", 1)
        pairs = []
        for kind in ("bare", "ours"):
            with on(sides()[1]):
                pairs.append(Pair(task, kind, learner, server))
            stack.callback(pairs[-1].close)
        stack.enter_context(on(sides()[0]))
        bare, ours = pairs
        return in_turns(bare.move, ours.move, SAMPLE_BYTES / 1e9, turns,
                        cpu=lambda: bare.cpu_s() + ours.cpu_s() - time.process_time())


@pytest.mark.parametrize("task", ["pour", "swallow"])
def test_tls(benchmark, task):
    try:
        figure = benchmark.pedantic(throughput, (task,), rounds=1)
    except NotHere as error:
        pytest.skip(str(error))
    benchmark.extra_info["ratio_to_bare_ssl"] = figure.ratio
    print(f"\nTLS {'into' if task == 'pour' else 'out of'} the server: {figure.ours:.2f} GB/s, "
          f"bare ssl {figure.bound:.2f} GB/s, ratio {figure.ratio:.2f} (at least {AT_LEAST}); "
          f"CPU s per GB, both ends: {figure.ours_cpu:.2f}, bare ssl {figure.bound_cpu:.2f}")


if __name__ == "__main__":
    with suppress(OSError):  # the other side has closed
        far_end(*sys.argv[1:])
