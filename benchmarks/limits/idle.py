"""What learners cost that only say once a second that they are there. Must not use a Learner.

A real server process; one other process holds the other ends of all of its sockets, has given the
initial values, been asked for a push and sends none: heartbeats alone, evenly over each second.
"""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

from benchmarks import bench_rounds
from benchmarks.bench_server import receive
from benchmarks.limits.figure import Figure, on, sides
from syncer.layout import AVG, FragmentLayout, Layout
from syncer.learner.heartbeats import HEARTBEAT_S
from syncer.protocol import DTYPE_F32, Msg
from syncer.wire import encode, messages
from syncer.wire.hello import Hello

LEARNERS = 2000
CORE_SHARE, KIB_EACH = 0.05, 64.0
"""The most that they may cost: of a core, all together, and of memory."""
LAYOUT = Layout((FragmentLayout(AVG, (bench_rounds.NUMEL,)),))
SETTLED_S = 2.0
STEPS = 10
"""Turns of the other end in a second."""


def resident_kib(process: subprocess.Popen[bytes]) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


def beat(port: int, learners: int) -> None:
    """Joins, says so with one byte, and goes on until its input is closed."""
    sockets = []
    for learner in range(learners):  # who says nothing is not kept for long, if there are many
        sockets.append(socket.create_connection(("127.0.0.1", port)))
        sockets[-1].sendall(encode.encode_hello(
            Hello(learner, 1, DTYPE_F32, LAYOUT, bytes(32), bytes(32))))
    sockets[0].sendall(b"".join(encode.bare_message(
        Msg.INIT_PARAMS, encode.init_head(0), bytes(4 * bench_rounds.NUMEL))))
    first = memoryview(bytearray(bench_rounds.DOWN + bench_rounds.PULL))
    for sock in sockets:
        if not receive(sock, first):
            raise SystemExit("the server has closed a connection")
    os.write(1, b"!")
    beats = [encode.encode_heartbeat(messages.Heartbeat(learner, 0)) for learner in range(learners)]
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        turn, due = 0, time.monotonic()
        while True:
            due += HEARTBEAT_S / STEPS
            if selector.select(max(0.0, due - time.monotonic())):
                return
            for learner in range(turn % STEPS, learners, STEPS):
                sockets[learner].sendall(beats[learner])
            turn += 1


@contextmanager
def joined(learners: int) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The server, once all are there, and its KiB before the first of them was."""
    ours, others = sides()
    with ExitStack() as stack:
        with on(ours):
            server, port = stack.enter_context(bench_rounds.server(
                learners, "--quorum-timeout-s", "86400"))
        empty = resident_kib(server)
        with on(others):
            other = stack.enter_context(subprocess.Popen(
                [sys.executable, "-m", "benchmarks.limits.idle", str(port), str(learners)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert other.stdin is not None
        assert other.stdout is not None
        stack.callback(other.stdin.close)
        if not other.stdout.read(1):
            raise RuntimeError("the learners have ended")
        yield server, empty


@cache
def measured(learners: int, seconds: float) -> tuple[float, float]:
    """(share of a core, KiB for each)."""
    with joined(learners) as (server, empty):
        time.sleep(SETTLED_S)
        began, spent = time.monotonic(), bench_rounds.cpu_ns(server)
        time.sleep(seconds)
        share = (bench_rounds.cpu_ns(server) - spent) / 1e9 / (time.monotonic() - began)
        return share, (resident_kib(server) - empty) / learners


def cpu(short: bool) -> Figure:
    share, _ = measured(100 if short else LEARNERS, 2.0 if short else 15.0)
    return Figure(CORE_SHARE / share, 100 * share, 100 * CORE_SHARE, "% core")


def memory(short: bool) -> Figure:
    _, kib = measured(100 if short else LEARNERS, 2.0 if short else 15.0)
    return Figure(KIB_EACH / kib, kib, KIB_EACH, "KiB")


if __name__ == "__main__":
    beat(int(sys.argv[1]), int(sys.argv[2]))
