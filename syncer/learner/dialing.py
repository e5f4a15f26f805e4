"""How a server is dialed: its address, one TCP connection, how long to wait before the next one.

Must not know a session, or wait itself.
"""

from __future__ import annotations

import errno
import os
import random
import secrets
import socket

from syncer import tcp
from syncer.errors import ConfigError

BACKOFF_MAX_S = 30.0


def parse_address(address: str) -> tuple[str, int]:
    """("host", port) of "host:port" or "[v6]:port"; raises `ConfigError`."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or not (
            0 < int(port) < 65536):
        raise ConfigError(f"address {address!r} is not host:port, for example 127.0.0.1:29400")
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise ConfigError(f"address {address!r} has a host that cannot be looked up: {error}"
                          ) from None
    return host, int(port)


def backoff_s(attempt: int) -> float:
    """The back-off before attempt 0, 1, 2, ... of an outage, in seconds, before it is spread."""
    return min(2.0 ** min(attempt, 10), BACKOFF_MAX_S)


def dial(address: tuple[str, int], timeout_s: float) -> socket.socket:
    """A connected TCP socket with the options of the protocol; raises `OSError`."""
    connected = socket.create_connection(address, timeout_s)
    try:
        if connected.getsockname() == connected.getpeername():
            # On loopback, dialing a free port can connect a socket to itself.
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        tcp.configure(connected)
    except BaseException:
        connected.close()
        raise
    return connected


def fresh_generation(last: int | None) -> int:
    """A number for a new connection: random, not 0, not the last one."""
    generation = 0
    while generation in (0, last):
        generation = secrets.randbits(64)
    return generation


_dice = random.SystemRandom()
"""Not the stream of `random`, which islands seed alike and a training loop may count on."""


def jitter(most_s: float) -> float:
    """A random part of so many seconds."""
    return _dice.uniform(0.0, most_s)
