"""A peer of hivemind's decentralised averaging; participant 0 is the one that others find first."""

from __future__ import annotations

import socket
import threading
import time

import hivemind
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.compression import Float16Compression, NoCompression, Uniform8BitQuantization

from benchmarks.peers.part import Part, given, synced

PORT = 29620
TENSORS = 8
FORMS = {"f32": NoCompression, "f16": Float16Compression, "8 bits": Uniform8BitQuantization}
AFTER_FAILURE_S = 0.1


def tell(address: str, text: bytes) -> None:
    """Gives the others the name under which participant 0 is found."""
    listener = socket.create_server((address, PORT))

    def serve() -> None:
        while True:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(text)

    threading.Thread(target=serve, daemon=True).start()


def ask(address: str) -> str:
    while True:
        try:
            with socket.create_connection((address, PORT), timeout=5) as sock:
                return sock.makefile().read()
        except OSError:
            time.sleep(0.1)


def swarm(part: Part) -> hivemind.DHT:
    where = [f"/ip4/{part.own}/tcp/0"]
    if part.rank:
        return hivemind.DHT(start=True, host_maddrs=where, initial_peers=[ask(part.first)])
    dht = hivemind.DHT(start=True, host_maddrs=where)
    tell(part.own, str(dht.get_visible_maddrs()[0]).encode())
    return dht


def main() -> None:
    part = given()
    torch.set_num_threads(1)
    dht = swarm(part)
    averager = DecentralizedAverager(
        [torch.zeros(part.numel // TENSORS) for _ in range(TENSORS)], dht=dht, prefix="sync",
        target_group_size=part.world, min_matchmaking_time=1.0, request_timeout=0.5,
        compression=FORMS[part.form](), start=True)
    for _ in part.counted:
        try:
            group = averager.step(timeout=120)
        except Exception:  # whatever it is, the next attempt is what counts
            group = None
        synced(len(group) if group is not None and len(group) > 1 else 0)
        if group is None:
            time.sleep(AFTER_FAILURE_S)
    averager.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()
