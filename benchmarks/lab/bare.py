"""Bare sockets over a link, both ways at once: what any program could reach there.

    python -m benchmarks.lab.bare serve PORT SOCKETS BYTES
    python -m benchmarks.lab.bare dial HOST:PORT SOCKETS BYTES

Each end sends so many bytes in all and receives as many; `dial` prints the seconds.
"""

from __future__ import annotations

import socket
import sys
import threading
import time

PIECE = bytes(256 * 1024)
WARM_BYTES = 256 * 1024
"""By then the system has begun to measure the buffers."""


def swap(socks: list[socket.socket], count: int) -> float:
    """Seconds until everything of both directions is through, from the first byte on."""
    def send(sock: socket.socket) -> None:
        left = count // len(socks)
        while left:
            piece = PIECE[:left]
            sock.sendall(piece)
            left -= len(piece)

    def receive(sock: socket.socket) -> None:
        buffer, left = bytearray(len(PIECE)), count // len(socks)
        while left:
            got = sock.recv_into(buffer, min(left, len(buffer)))
            if not got:
                raise SystemExit("the other end is gone")
            left -= got

    threads = [threading.Thread(target=body, args=(sock,)) for sock in socks
               for body in (send, receive)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def serve(port: str, sockets: int, count: int) -> None:
    with socket.create_server(("0.0.0.0", int(port))) as listener:
        print("listening", file=sys.stderr, flush=True)
        socks = [listener.accept()[0] for _ in range(sockets)]
    swap(socks, WARM_BYTES * sockets)
    swap(socks, count)


def dial(address: str, sockets: int, count: int) -> None:
    host, _, port = address.rpartition(":")
    socks = [socket.create_connection((host, int(port))) for _ in range(sockets)]
    swap(socks, WARM_BYTES * sockets)
    print(swap(socks, count))


if __name__ == "__main__":
    {"serve": serve, "dial": dial}[sys.argv[1]](sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
