"""Rounds while 32 learners join over one link of 400 Mbit/s, against the rounds before.

The real server on one side of a veth pair with a token bucket; three learners that only move bytes,
and the joiners, on the other side, in a network namespace. A joiner leaves when it has the model:
more members are more to send. Needs root and iproute2, and is skipped without.

    python -m pytest benchmarks/bench_joiners.py -s
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # the other ends are started as scripts
    sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402

from syncer.layout import AVG, FragmentLayout, Layout  # noqa: E402
from syncer.protocol import DTYPE_F32, Msg  # noqa: E402
from syncer.wire import encode, messages  # noqa: E402
from syncer.wire.hello import Hello  # noqa: E402

TRAINING, JOINERS, FRAGMENTS, NUMEL = 3, 32, 64, 23_000
LAYOUT = Layout(tuple(FragmentLayout(AVG, (NUMEL,)) for _ in range(FRAGMENTS)))
RATE, QUEUE = "400mbit", "latency 50ms"
SERVER, CLIENTS = "10.213.7.1", "10.213.7.2"
PULL = len(encode.encode_pull(messages.Pull(0, 1, 1)))
BROADCAST = 13 + 24 + 13 + 12 + 4 * NUMEL


# ------------------------------------------------------------------------- in the namespace
def dial(port: int, learner: int) -> socket.socket:
    sock = socket.create_connection((SERVER, port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(encode.encode_hello(Hello(learner, 1, DTYPE_F32, LAYOUT, bytes(32), bytes(32))))
    return sock


def receive(sock: socket.socket, count: int) -> None:
    left = memoryview(bytearray(count))
    while left:
        got = sock.recv_into(left)
        if not got:
            raise SystemExit("the server has closed a connection")
        left = left[got:]


def join(port: int) -> None:
    """All at once; each leaves when it has every fragment."""
    selector, buffer, left = selectors.DefaultSelector(), bytearray(1 << 20), {}
    for learner in range(TRAINING, TRAINING + JOINERS):
        sock = dial(port, learner)
        sock.setblocking(False)
        left[sock] = FRAGMENTS * BROADCAST
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


def train(port: int) -> None:
    """Rounds without a pause; says how long they took before, and beside, the joiners."""
    learners = [dial(port, learner) for learner in range(TRAINING)]
    body = bytes(4 * NUMEL)
    for fragment in range(FRAGMENTS):
        learners[0].sendall(b"".join(encode.bare_message(
            Msg.INIT_PARAMS, encode.init_head(fragment), body)))
    for sock in learners:
        receive(sock, FRAGMENTS * BROADCAST + PULL)
    joining: subprocess.Popen[bytes] | None = None
    before, beside = [], []
    begun, step = time.perf_counter(), 0
    while joining is None or joining.poll() is None:
        step += 1
        at = time.perf_counter()
        if joining is None and at - begun > 3:
            joining = subprocess.Popen([sys.executable, __file__, "join", str(port)])
        fragment = (step - 1) % FRAGMENTS
        for learner, sock in enumerate(learners):
            push = messages.Push(learner, fragment, step, 1, max(0, step - FRAGMENTS), step, 1, 1,
                                 b"")
            (frame,) = encode.chunk_message(Msg.PUSH_FRAGMENT, encode.push_head(push), body, step)
            sock.sendall(b"".join(bytes(part) for part in frame))
        for sock in learners:
            receive(sock, BROADCAST + PULL)
        (before if joining is None else beside).append((time.perf_counter() - at) * 1e3)
    print(statistics.median(before), max(before), statistics.median(beside), max(beside),
          sum(beside) / 1e3)


# ------------------------------------------------------------------------------- around it
@contextmanager
def link() -> Iterator[str]:
    """Name of a namespace behind the slow link."""
    name, end = f"syncer{os.getpid()}", f"sj{os.getpid() % 10**6}"

    def ip(command: str) -> None:
        subprocess.run(["ip", *command.split()], check=True)

    ip(f"netns add {name}")
    try:
        ip(f"link add {end}a type veth peer name {end}b netns {name}")
        ip(f"addr add {SERVER}/24 dev {end}a")
        ip(f"link set {end}a up")
        ip(f"-n {name} addr add {CLIENTS}/24 dev {end}b")
        ip(f"-n {name} link set {end}b up")
        subprocess.run(f"tc qdisc add dev {end}a root tbf rate {RATE} burst 64kb {QUEUE}".split(),
                       check=True)
        yield name
    finally:
        ip(f"netns del {name}")


@pytest.mark.skipif(os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")),
                    reason="needs root, ip and tc")
def test_joiners(tmp_path):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SYNCER_")}
    with ExitStack() as stack:
        name = stack.enter_context(link())
        with socket.create_server((SERVER, 0)) as held:
            port = str(held.getsockname()[1])
        log = stack.enter_context((tmp_path / "log").open("wb"))
        server = subprocess.Popen(
            [sys.executable, "-m", "syncer.server", "--learners", str(TRAINING + JOINERS),
             "--quorum", str(TRAINING), "--start-learners", str(TRAINING), "--grace-ms", "0",
             "--total-steps", "1000000000", "--host", SERVER, "--port", port,
             "--allow-unauthenticated", "--pipeline", "1", "--sync-interval-steps", "0",
             "--merge-threads", "1", "--delta-correction", "none"],
            cwd=ROOT, env=clean, stderr=log)
        try:
            while b"listening" not in (tmp_path / "log").read_bytes():
                assert server.poll() is None
                time.sleep(0.05)
            told = subprocess.run(["ip", "netns", "exec", name, sys.executable, __file__, "train",
                                   port], check=True, stdout=subprocess.PIPE, text=True)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(timeout=60)
    before, longest_before, beside, longest, took_s = map(float, told.stdout.split())
    print(f"\n{JOINERS} joiners on {RATE}, {FRAGMENTS * NUMEL * 4 / 1e6:.1f} MB each: rounds of "
          f"{before:.1f} ms take {beside:.1f} ms beside them, ratio {beside / before:.2f}; longest "
          f"{longest_before:.0f} and {longest:.0f} ms; all have the model after {took_s:.1f} s")


if __name__ == "__main__":
    {"join": join, "train": train}[sys.argv[1]](int(sys.argv[2]))
