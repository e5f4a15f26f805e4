"""Rounds of members that only move bytes, while others join: both ends of one host of the lab.

    python -m benchmarks.lab.joiners train HOST:PORT MODEL_MB

`train` prints the median seconds of a round before and beside the joiners, which it starts.
"""

from __future__ import annotations

import json
import selectors
import socket
import statistics
import subprocess
import sys
import time

from benchmarks.lab.scenes import JOINERS, TRAINING
from syncer.layout import AVG, FragmentLayout, Layout
from syncer.protocol import DTYPE_F32, Msg
from syncer.wire import encode, messages
from syncer.wire.hello import Hello

FRAGMENTS = 64
BEFORE_S = 4.0
PULL = len(encode.encode_pull(messages.Pull(0, 1, 1)))


class Model:
    """A model of so many MB, as it is on the wire in one piece a fragment."""

    def __init__(self, model_mb: str):
        self.name = model_mb
        self.numel = int(float(model_mb) * 1e6 / 4 / FRAGMENTS)
        self.layout = Layout(tuple(FragmentLayout(AVG, (self.numel,)) for _ in range(FRAGMENTS)))
        self.broadcast_bytes = 13 + 24 + 13 + 12 + 4 * self.numel

    def dial(self, address: str, learner: int) -> socket.socket:
        host, _, port = address.rpartition(":")
        sock = socket.create_connection((host, int(port)))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(encode.encode_hello(
            Hello(learner, 1, DTYPE_F32, self.layout, bytes(32), bytes(32))))
        return sock


def receive(sock: socket.socket, count: int) -> None:
    left = memoryview(bytearray(count))
    while left:
        got = sock.recv_into(left)
        if not got:
            raise SystemExit("the server has closed a connection")
        left = left[got:]


def join(address: str, model: Model) -> None:
    """All at once; each leaves when it has every fragment."""
    selector, buffer, left = selectors.DefaultSelector(), bytearray(1 << 20), {}
    for learner in range(TRAINING, TRAINING + JOINERS):
        sock = model.dial(address, learner)
        sock.setblocking(False)
        left[sock] = FRAGMENTS * model.broadcast_bytes
        selector.register(sock, selectors.EVENT_READ)
    while left:
        for key, _ in selector.select():
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            left[sock] -= sock.recv_into(buffer)
            if left[sock] <= 0:
                selector.unregister(sock)
                del left[sock]
                sock.close()


def train(address: str, model: Model) -> None:
    """Rounds without a pause; says how long they took before, and beside, the joiners."""
    learners = [model.dial(address, learner) for learner in range(TRAINING)]
    body = bytes(4 * model.numel)
    for fragment in range(FRAGMENTS):
        learners[0].sendall(b"".join(encode.bare_message(
            Msg.INIT_PARAMS, encode.init_head(fragment), body)))
    for sock in learners:
        receive(sock, FRAGMENTS * model.broadcast_bytes + PULL)
    joining: subprocess.Popen[bytes] | None = None
    before, beside = [], []
    begun, step = time.perf_counter(), 0
    while joining is None or joining.poll() is None:
        step += 1
        at = time.perf_counter()
        if joining is None and at - begun > BEFORE_S:
            joining = subprocess.Popen([sys.executable, "-m", "benchmarks.lab.joiners", "join",
                                        address, model.name])
        fragment = (step - 1) % FRAGMENTS
        for learner, sock in enumerate(learners):
            push = messages.Push(learner, fragment, step, 1, max(0, step - FRAGMENTS), step, 1, 1,
                                 b"")
            (frame,) = encode.chunk_message(Msg.PUSH_FRAGMENT, encode.push_head(push), body, step)
            sock.sendall(b"".join(bytes(part) for part in frame))
        for sock in learners:
            receive(sock, model.broadcast_bytes + PULL)
        (before if joining is None else beside).append(time.perf_counter() - at)
    print(json.dumps([statistics.median(before), statistics.median(beside)]))


if __name__ == "__main__":
    {"join": join, "train": train}[sys.argv[1]](sys.argv[2], Model(sys.argv[3]))
