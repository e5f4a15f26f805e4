"""The learner's sending side against bare `sendall`, and its arithmetic against NumPy expressions.

Sending: one message after another, striped in 4 MiB pieces over the data sockets of a real client,
to a process that reads and throws away. The reference sends the same bytes with `sendall` on one
socket to the same process, from one buffer; 1.0 is as good as one socket can be.

A step boundary without work, against a lock and a clock.

Arithmetic: a fragment of 16 million elements in four tensors, as at a step boundary.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # the reading process is started as a script
    sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import pytest  # noqa: E402
from pairs import ratio  # noqa: E402

from syncer.layout import RDA, FragmentLayout, Layout  # noqa: E402
from syncer.learner import Learner  # noqa: E402
from syncer.learner.client import Client  # noqa: E402
from syncer.learner.fragment import Fragment  # noqa: E402
from syncer.learner.session import Session  # noqa: E402
from syncer.protocol import DTYPE_BF16, DTYPE_F32, DTYPE_Q4, tensor_bytes  # noqa: E402
from tests.e2e.scripted_server import ScriptedServer  # noqa: E402

MIB = 1024 * 1024
ROUNDS = 15


def read_and_drop(connected: socket.socket) -> None:
    buffer = bytearray(4 * MIB)
    with suppress(ConnectionError):
        while connected.recv_into(buffer):
            pass


@contextmanager
def sink():
    """Address of a process that accepts any connection and drops what comes."""
    with subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True) as reader:
        try:
            yield f"127.0.0.1:{int(reader.stdout.readline())}"
        finally:
            reader.kill()


@pytest.mark.parametrize("num_streams", [0, 1, 4])
@pytest.mark.parametrize("size_mib", [1, 64])
def test_sending(benchmark, size_mib, num_streams):
    body = np.zeros(size_mib * MIB, np.uint8)
    layout = Layout((FragmentLayout(RDA, (body.size // 4,)),))
    session = Session(layout, bytes(32), learner=0, dtype=DTYPE_F32, num_streams=num_streams)

    def send() -> None:
        receipt = client.send(session.tensors.init(0, body))
        client.wait_for(lambda: receipt.settled)
        assert receipt.sent

    with sink() as address:
        client = Client(session, address, say=lambda line: None)
        client.start()
        host, port = address.split(":")
        with socket.create_connection((host, int(port))) as bare:
            result = ratio(lambda: bare.sendall(body), send, rounds=ROUNDS, sample_ms=20)
        benchmark.pedantic(send, rounds=3)
        client.close()
    benchmark.extra_info["ratio_to_sendall"] = result.ratio
    print(f"\n{size_mib} MiB, {num_streams} data sockets: {body.size / result.ours_ns:.2f} GB/s, "
          f"bare sendall {body.size / result.reference_ns:.2f} GB/s, ratio {result.ratio:.2f}")


SHAPES = [(2048, 2048)] * 3 + [(4_000_000,)]


def fragment_of(dtype: int) -> tuple[Fragment, np.ndarray, list[np.ndarray]]:
    rng = np.random.default_rng(0)
    tensors = [rng.standard_normal(shape, np.float32) for shape in SHAPES]
    fragment = Fragment(tensors, dtype)
    raw = np.zeros(fragment.numel * (4 if dtype == DTYPE_F32 else 2), np.uint8)
    fragment.rebase(memoryview(raw), 0.5)
    return fragment, raw, tensors


@pytest.mark.parametrize("dtype", [DTYPE_F32, DTYPE_BF16, DTYPE_Q4], ids=["f32", "bf16", "q4"])
def test_delta(benchmark, dtype):
    """Packing a delta against the bare f32 subtraction of one flat array into an existing one."""
    fragment, _, _ = fragment_of(dtype)
    local, out = np.ones(fragment.numel, np.float32), np.empty(fragment.numel, np.float32)
    packed = np.empty(tensor_bytes(fragment.numel, dtype), np.uint8)
    result = ratio(lambda: np.subtract(local, fragment.anchor, out=out),
                   lambda: fragment.pack_delta(packed), rounds=ROUNDS)
    benchmark(fragment.pack_delta, packed)
    benchmark.extra_info["ratio_to_subtract"] = result.ratio
    print(f"\ndelta: {fragment.numel / result.ours_ns:.2f} billion values/s, bare subtraction "
          f"{fragment.numel / result.reference_ns:.2f}, ratio {result.ratio:.2f}")


@pytest.mark.parametrize("dtype", [DTYPE_F32, DTYPE_BF16], ids=["f32", "bf16"])
def test_blend(benchmark, dtype):
    """Applying a broadcast against the NumPy expression for the blend alone."""
    fragment, raw, _ = fragment_of(dtype)
    local, a, b = np.ones(fragment.numel, np.float32), np.float32(0.5), np.float32(0.5)

    def expression() -> None:
        local[:] = a * local + b * fragment.anchor

    result = ratio(expression, lambda: fragment.rebase(memoryview(raw), 0.5), rounds=ROUNDS)
    benchmark(fragment.rebase, memoryview(raw), 0.5)
    benchmark.extra_info["ratio_to_numpy"] = result.ratio
    print(f"\nblend: {fragment.numel / result.ours_ns:.2f} billion values/s, NumPy expression "
          f"{fragment.numel / result.reference_ns:.2f}, ratio {result.ratio:.2f}")


def test_step_without_work(benchmark):
    """What a training loop pays after every optimizer step, nearly always: against one lock and one
    clock, without which it could not do. 13 to 18 times as long is usual."""
    lock = threading.RLock()

    def bare() -> None:
        with lock:
            time.monotonic()

    with ScriptedServer() as server, Learner(
            {"w": np.zeros(1000, np.float32)}, server.address, learner_id=1, num_streams=0, key="",
            fragments=8) as learner:
        result = ratio(bare, lambda: learner.step(1), rounds=ROUNDS, sample_ms=20)
        benchmark(learner.step, 1)
    benchmark.extra_info["ratio_to_lock_and_clock"] = result.ratio
    print(f"\nstep without work: {result.ours_ns / 1000:.1f} us, lock and clock "
          f"{result.reference_ns:.0f} ns, ratio {1 / result.ratio:.0f}")


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            connected, _ = listener.accept()
            threading.Thread(target=read_and_drop, args=(connected,), daemon=True).start()


if __name__ == "__main__":
    main()
