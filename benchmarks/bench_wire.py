"""Frame reader: large messages against bare `recv_into`, small frames against `struct`.

Large messages come over a real socket pair from another process that waits for nothing but room.
Their reference receives the same number of bytes into a buffer of a whole message that exists
already: it allocates nothing and looks at nothing, so 1.0 is as good as a reader can be. (A reader
that did not use its memory again would be at 0.3 to 0.6 for the largest of them.)
"""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # the sending process is started as a script
    sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402
from pairs import ratio  # noqa: E402

from syncer.layout import RDA, FragmentLayout, Layout  # noqa: E402
from syncer.protocol import CHUNK_SIZE, DTYPE_F32, HEADER_BYTES, MAGIC, Msg  # noqa: E402
from syncer.wire import encode  # noqa: E402
from syncer.wire.frames import FrameReader  # noqa: E402
from syncer.wire.hello import Hello, parse_hello  # noqa: E402
from syncer.wire.limits import Limits  # noqa: E402
from syncer.wire.messages import Heartbeat, Pull, parse_heartbeat  # noqa: E402

MIB = 1024 * 1024
ROUNDS = 25


def chunks(size_mib: int, msg_id: int = 0):
    """Gather lists of an INIT whose inner frame is exactly `size_mib` MiB: only full chunks."""
    head = encode.init_head(0)
    body = bytes(size_mib * MIB - HEADER_BYTES - len(head))
    return list(encode.chunk_message(Msg.INIT_PARAMS, head, body, msg_id))


def send_forever(sock: socket.socket, size_mib: int) -> None:
    gathers = chunks(size_mib)
    while True:
        for gather in gathers:
            sent = sock.sendmsg(gather)
            for part in gather:
                rest = memoryview(part)[sent:]
                sent = max(sent - len(part), 0)
                sock.sendall(rest)


@contextmanager
def stream(size_mib: int):
    """Receiving end of a socket pair whose other end is `send_forever` in its own process."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, __file__, str(theirs.fileno()), str(size_mib)]
    with theirs:
        sender = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    try:
        yield ours
    finally:
        ours.close()
        sender.wait(timeout=60)


def receive_bare(sock: socket.socket, buffer: memoryview) -> None:
    at = 0
    while at < len(buffer):
        at += sock.recv_into(buffer[at : at + CHUNK_SIZE])


def receive_message(sock: socket.socket, reader: FrameReader) -> int:
    while True:
        for _, payload in reader.received(sock.recv_into(reader.buffer())):
            return len(payload)


@pytest.mark.parametrize("size_mib", [4, 16, 64, 160])
def test_large_messages(benchmark, size_mib):
    wire_bytes = sum(len(part) for gather in chunks(size_mib) for part in gather)
    layout = Layout((FragmentLayout(RDA, (size_mib * MIB // 4,)),))
    reader = FrameReader(Limits.for_server(layout, DTYPE_F32))
    buffer = memoryview(bytearray(wire_bytes))
    with stream(size_mib) as plain, stream(size_mib) as framed:
        result = ratio(
            lambda: receive_bare(plain, buffer),
            lambda: receive_message(framed, reader),
            rounds=ROUNDS,
            sample_ms=20,
        )
        benchmark.pedantic(receive_message, (framed, reader), rounds=3)
    benchmark.extra_info["ratio_to_recv_into"] = result.ratio
    print(
        f"\n{size_mib} MiB message: {wire_bytes / result.ours_ns:.2f} GB/s, bare recv_into "
        f"{wire_bytes / result.reference_ns:.2f} GB/s, ratio {result.ratio:.2f}"
    )


def with_struct(data: bytes) -> int:
    """What plain Python does for the same frames: header, checks, a copy of the payload."""
    at, count, header = 0, 0, struct.Struct("<IBQ")
    limits = {Msg.HEARTBEAT.value: 12}
    while at < len(data):
        magic, msg_type, size = header.unpack_from(data, at)
        if magic != MAGIC or size > limits[msg_type]:
            raise ValueError("not a frame")
        memoryview(data[at + HEADER_BYTES : at + HEADER_BYTES + size])
        at += HEADER_BYTES + size
        count += 1
    return count


def test_small_frames(benchmark):
    frames = 10_000
    data = encode.encode_heartbeat(Heartbeat(7, 11)) * frames
    reader = FrameReader(Limits.for_server(Layout((FragmentLayout(RDA, (1,)),)), DTYPE_F32))
    assert with_struct(data) == sum(1 for _ in reader.feed(data)) == frames

    def ours() -> None:
        for _ in reader.feed(data):
            pass

    result = ratio(lambda: with_struct(data), ours)
    benchmark(ours)
    benchmark.extra_info["ratio_to_struct"] = result.ratio
    print(
        f"\nsmall frames: {frames / result.ours_ns * 1e3:.2f} million/s, with struct "
        f"{frames / result.reference_ns * 1e3:.2f} million/s, ratio {result.ratio:.1f}"
    )


def test_small_messages(benchmark):
    """Encoding a PULL and parsing a HEARTBEAT: what a control message costs apart from framing."""
    payload = encode.encode_heartbeat(Heartbeat(7, 11))[HEADER_BYTES:]

    def both() -> None:
        encode.encode_pull(Pull(3, 5, 1))
        parse_heartbeat(payload, 7)

    benchmark(both)


@pytest.mark.parametrize("fragments", [1, 1_290_000])
def test_large_hellos(benchmark, fragments):
    """41,643 tensors in one fragment, and the most fragments that fit into the largest HELLO."""
    numels = (7,) * (41_643 if fragments == 1 else 1)
    layout = Layout((FragmentLayout(RDA, numels),) * fragments)
    hello = Hello(0, 1, DTYPE_F32, layout, bytes(32), bytes(32))
    payload = encode.encode_hello(hello)[HEADER_BYTES:]
    benchmark.pedantic(parse_hello, (payload,), {"key": None, "learners": 1}, rounds=3)


if __name__ == "__main__":
    with suppress(BrokenPipeError, ConnectionResetError):
        send_forever(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
