"""How a server is dialed: its address, one connection, how long to wait before the next one.

Must not know a session, or wait itself.
"""

from __future__ import annotations

import errno
import os
import random
import secrets
import socket
from ipaddress import ip_address
from typing import Any, TypeAlias

from syncer import tcp
from syncer.errors import ConfigError

BACKOFF_MAX_S = 30.0


Place: TypeAlias = tuple[str, int] | str
"""(host, port), or the path of a Unix socket."""


def parse_address(address: str) -> Place:
    """("host", port) of "host:port" or "[v6]:port", the path of "unix:/path"; raises
    `ConfigError`."""
    if address.startswith(tcp.UNIX):
        path = address.removeprefix(tcp.UNIX)
        if trouble := tcp.path_trouble(path):
            raise ConfigError(f"address {address!r} cannot be dialed: {trouble}")
        return path
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or not (
            0 < int(port) < 65536):
        raise ConfigError(f"address {address!r} is not host:port, for example 127.0.0.1:29400, "
                          "and not unix:/path")
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise ConfigError(f"address {address!r} has a host that cannot be looked up: {error}"
                          ) from None
    return host, int(port)


def backoff_s(attempt: int) -> float:
    """The back-off before attempt 0, 1, 2, ... of an outage, in seconds, before it is spread."""
    return min(2.0 ** min(attempt, 10), BACKOFF_MAX_S)


class Dialer:
    """Where a server is, and from where it is dialed.

    address: "host:port" or "unix:/path"; local: an address or interface of this machine, None: the
    system's choice. Raises `ConfigError`.
    """

    def __init__(self, address: str, local: str | None = None):
        self.address, self.local, self.place = address, local, parse_address(address)
        if local is None:
            return
        if isinstance(self.place, str):
            raise ConfigError(f"local_address {local!r} has no effect with {address}: leave it out")
        names = [name for _, name in socket.if_nameindex()]
        if local not in names and not _is_address(local):
            raise ConfigError(f"local_address {local!r} is neither an address nor an interface of "
                              f"this machine: give an address, or one of {', '.join(names)}")

    def dial(self, timeout_s: float) -> socket.socket:
        """A connected socket with the options of the protocol; raises `OSError`."""
        return dial(self.place, timeout_s, self.local)


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def _connect(address: Place, timeout_s: float, local: str | None) -> socket.socket:
    if isinstance(address, str):
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        return _connected(connected, address, timeout_s)
    if local is None or _is_address(local):
        return socket.create_connection(address, timeout_s, None if local is None else (local, 0))
    failure = OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    for family, kind, _, _, where in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        connected = socket.socket(family, kind)
        try:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, local.encode() + b"\0")
            return _connected(connected, where, timeout_s)
        except OSError as error:
            connected.close()
            failure = error
    raise failure


def _connected(sock: socket.socket, address: Any, timeout_s: float) -> socket.socket:
    try:
        sock.settimeout(timeout_s)
        sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock


def dial(address: Place, timeout_s: float, local: str | None = None) -> socket.socket:
    """A connected socket with the options of the protocol; raises `OSError`. local: the address or
    interface of this machine to dial from."""
    connected = _connect(address, timeout_s, local)
    try:
        if isinstance(address, tuple) and connected.getsockname() == connected.getpeername():
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
