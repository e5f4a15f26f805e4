"""A relay that keeps bytes for a while: delay in a lab whose kernel has none to give.

    python -m benchmarks.lab.relay HOST PORT ROUND_TRIP_MS

Listens on 127.0.0.1 at a free port, which it prints, and passes every connection on to HOST, each
direction half of the round trip late. It acknowledges at once what it takes, so TCP itself sees no
delay; who waits for an answer does.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections import deque

PIECE_BYTES = 256 * 1024
HELD_BYTES_MAX = 64 * 1024 * 1024
"""On their way in one direction: more than rate times delay of any link of the lab."""


class Direction:
    """Bytes of one direction of a connection, each as late as the others."""

    def __init__(self, source: socket.socket, target: socket.socket, delay_s: float):
        self.source, self.target, self.delay_s = source, target, delay_s
        self.held: deque[tuple[float, bytes]] = deque()
        self.bytes = 0
        self.changed = threading.Condition()
        for body in (self._take, self._give):
            threading.Thread(target=body, daemon=True).start()

    def _take(self) -> None:
        data = b"-"
        while data:
            try:
                data = self.source.recv(PIECE_BYTES)
            except OSError:
                data = b""
            with self.changed:
                self.changed.wait_for(lambda: self.bytes < HELD_BYTES_MAX)
                self.held.append((time.monotonic() + self.delay_s, data))
                self.bytes += len(data)
                self.changed.notify()

    def _give(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.held)
                due, data = self.held.popleft()
                self.bytes -= len(data)
                self.changed.notify()
            time.sleep(max(0.0, due - time.monotonic()))
            try:
                if not data:
                    self.target.shutdown(socket.SHUT_WR)
                    return
                self.target.sendall(data)
            except OSError:
                return


def main(host: str, port: str, round_trip_ms: str) -> None:
    delay_s = float(round_trip_ms) / 2000
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            near, _ = listener.accept()
            far = socket.create_connection((host, int(port)))
            for sock in (near, far):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            Direction(near, far, delay_s)
            Direction(far, near, delay_s)


if __name__ == "__main__":
    main(*sys.argv[1:])
