"""Rounds of 1 KiB: what the server itself costs, where the bytes cost nothing.

The real server process with 1, 8 and 64 learners that answer at once, against a process of a few
lines that receives as many bytes from each of them and sends as many to each: two calls a learner
and round, which nobody can do without. Both are measured in CPU time of their own process, the
system's part included, so that neither the other end nor other programs on the machine count.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # the other end is started as a script
    sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402

from benchmarks.bench_server import receive  # noqa: E402
from benchmarks.limits.figure import Figure, on, sides  # noqa: E402
from syncer.layout import AVG, FragmentLayout, Layout  # noqa: E402
from syncer.protocol import DTYPE_F32, Msg  # noqa: E402
from syncer.wire import encode, messages  # noqa: E402
from syncer.wire.hello import Hello  # noqa: E402

NUMEL = 256
TURNS = 7
PULL = len(encode.encode_pull(messages.Pull(0, 1, 1)))
DOWN = sum(len(part) for piece in encode.chunk_message(
    Msg.BCAST_FRAGMENT, encode.bcast_head(0, 1), bytes(4 * NUMEL), 1) for part in piece)


def cpu_ns(process: subprocess.Popen) -> int:
    """CPU time of all threads of another process (the clock of its id, as clock_getcpuclockid)."""
    return time.clock_gettime_ns((~process.pid << 3) | 2)


def push(learner: int, fragments: int, step: int) -> bytes:
    head = encode.push_head(messages.Push(
        learner, (step - 1) % fragments, step, 1, max(0, step - fragments), step, 1, 1, b""))
    return b"".join(bytes(part) for piece in encode.chunk_message(
        Msg.PUSH_FRAGMENT, head, bytes(4 * NUMEL), step) for part in piece)


@contextmanager
def server(learners: int, *flags: str) -> Iterator[tuple[subprocess.Popen, int]]:
    """The real server, as soon as it listens, and its port."""
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        log = stack.enter_context((Path(directory) / "log").open("w+b"))
        process = subprocess.Popen(
            [sys.executable, "-m", "syncer.server", "--learners", str(learners), "--quorum",
             str(learners), "--total-steps", "1000000000", "--port", "0", "--pipeline", "1",
             "--sync-interval-steps", "0", "--delta-correction", "none", "--merge-threads", "1",
             *flags],
            cwd=ROOT, stderr=log)
        try:
            yield process, port_in(Path(directory) / "log", process)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)


@contextmanager
def served(learners: int, fragments: int) -> Iterator[tuple[subprocess.Popen, list]]:
    """The real server, up to its first pull."""
    layout = Layout((FragmentLayout(AVG, (NUMEL,)),) * fragments)
    with server(learners) as (process, port), ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                   for _ in range(learners)]
        for learner, sock in enumerate(sockets):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(encode.encode_hello(
                Hello(learner, 1, DTYPE_F32, layout, bytes(32), bytes(32))))
        for fragment in range(fragments):
            sockets[0].sendall(b"".join(encode.bare_message(
                Msg.INIT_PARAMS, encode.init_head(fragment), bytes(4 * NUMEL))))
        for sock in sockets:
            assert receive(sock, memoryview(bytearray(fragments * DOWN + PULL)))
        yield process, sockets


def port_in(log: Path, process: subprocess.Popen) -> int:
    """The port that the server says it listens on."""
    while True:
        assert process.poll() is None, log.read_text()
        for line in log.read_text().splitlines():
            if "syncer listening" in line:
                return int(line.partition(" port=")[2].split()[0])
        time.sleep(0.01)


@contextmanager
def answered(learners: int, up: int) -> Iterator[tuple[subprocess.Popen, list]]:
    """The bare process: so many bytes from each, then as many to each as the server sends."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=learners))
        process = subprocess.Popen([sys.executable, __file__, str(listener.getsockname()[1]),
                                    str(learners), str(up), str(DOWN + PULL)])
        sockets = [stack.enter_context(listener.accept()[0]) for _ in range(learners)]
        for sock in sockets:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            yield process, sockets
        finally:
            for sock in sockets:
                sock.close()
            process.wait(timeout=60)


def play(sockets: list, pushes: Iterator[list[bytes]], rounds: int) -> None:
    buffer = memoryview(bytearray(DOWN + PULL))
    for _ in range(rounds):
        for sock, data in zip(sockets, next(pushes), strict=True):
            sock.sendall(data)
        for sock in sockets:
            assert receive(sock, buffer)


def us_per_round(process: subprocess.Popen, call: Callable[[], None], rounds: int) -> float:
    before = cpu_ns(process)
    call()
    return (cpu_ns(process) - before) / rounds / 1e3


def pushes(learners: int, fragments: int) -> Iterator[list[bytes]]:
    step = 0
    while True:
        step += 1
        yield [push(learner, fragments, step) for learner in range(learners)]


def rate(learners: int, wanted: float, short: bool = False, fragments: int = 4) -> Figure:
    """Rounds a second by the clock, the best of several turns, against so many wanted; the other
    end has cores of its own where there are any. CPU seconds are the server's."""
    rounds = max(20, (200 if short else 4000) // learners)
    gigabytes = rounds * learners * (len(push(0, fragments, 1)) + DOWN + PULL) / 1e9
    ours_side, others = sides()
    with ExitStack() as stack:
        with on(ours_side):
            process, sockets = stack.enter_context(served(learners, fragments))
        stack.enter_context(on(others))
        steps, found = pushes(learners, fragments), []
        play(sockets, steps, rounds)
        for _ in range(2 if short else TURNS):
            ready = iter([next(steps) for _ in range(rounds)])
            began, spent = time.perf_counter(), cpu_ns(process)
            play(sockets, ready, rounds)
            found.append((time.perf_counter() - began, (cpu_ns(process) - spent) / 1e9))
    seconds, cpu_s = map(min, zip(*found, strict=True))
    return Figure(rounds / seconds / wanted, rounds / seconds, wanted, "1/s", cpu_s / gigabytes)


@pytest.mark.parametrize("fragments", [1, 4])
@pytest.mark.parametrize("learners", [1, 8, 64])
def test_small_rounds(benchmark, learners, fragments):
    """In turns; the least of each, since whatever else runs can only add to it."""
    rounds = max(20, 2000 // learners)

    up = len(push(0, fragments, 1))
    with served(learners, fragments) as (ours_end, sockets), answered(learners, up) as (
            bare, plain):
        ours, theirs = pushes(learners, fragments), pushes(learners, fragments)
        play(sockets, ours, rounds)
        figures = [(us_per_round(ours_end, lambda: play(sockets, ours, rounds), rounds),
                    us_per_round(bare, lambda: play(plain, theirs, rounds), rounds))
                   for _ in range(TURNS)]
        benchmark.pedantic(play, (sockets, ours, rounds), rounds=3)
    server_us, bare_us = (min(column) for column in zip(*figures, strict=True))
    benchmark.extra_info["server_cpu_us_per_round"] = round(server_us, 1)
    benchmark.extra_info["ratio_to_bare_calls"] = round(bare_us / server_us, 3)
    print(f"\n1 KiB rounds, {learners} learners, {fragments} fragments: {server_us:.0f} us of CPU, "
          f"{server_us / learners:.1f} a learner; bare calls {bare_us:.0f} us, ratio "
          f"{bare_us / server_us:.2f}")


def main(port: int, learners: int, up: int, down: int) -> None:
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(learners)]
    buffer, data = memoryview(bytearray(up)), bytes(down)
    for sock in sockets:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while all([receive(sock, buffer) for sock in sockets]):
        for sock in sockets:
            sock.sendall(data)


if __name__ == "__main__":
    with suppress(BrokenPipeError, ConnectionResetError):
        main(*map(int, sys.argv[1:]))
