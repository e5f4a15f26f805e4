"""How a server is dialed: its address, one connection, how long to wait before the next one.

Must not know a session, or wait longer than it was told to.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import secrets
import socket
import threading
import time
from ipaddress import ip_address
from typing import Any, TypeAlias

from syncer import tcp
from syncer.errors import ConfigError
from syncer.tls import (
    A_DAY_S,
    WARN_DAYS,
    Stream,
    TlsFiles,
    TlsPaths,
    TlsSocket,
    context_of,
    expiry_of,
)

BACKOFF_MAX_S = 30.0
ONE_ADDRESS_MIN_S = 0.1
"""An address has so long at least, whatever was left."""


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
    """Where a server is, from where it is dialed, and whether with TLS.

    address: "host:port" or "unix:/path"; local: an address or interface of this machine, None: the
    system's choice; tls: as `TlsFiles.of` takes it, None: plain. Raises `ConfigError`.
    """

    def __init__(self, address: str, local: str | None = None, tls: TlsPaths | None = None):
        self.address, self.local, self.place = address, local, parse_address(address)
        self.files = None if tls is None else TlsFiles.of(tls)
        if self.files is not None:
            if isinstance(self.place, str):
                raise ConfigError(f"tls has no effect with {address}, which the mode of its file "
                                  "guards: leave it out")
            context_of(self.files, server_side=False)
            expiry_of(self.files.certificate)
        if local is None:
            return
        if isinstance(self.place, str):
            raise ConfigError(f"local_address {local!r} has no effect with {address}: leave it out")
        names = [name for _, name in socket.if_nameindex()]
        if local not in names and not _is_address(local):
            raise ConfigError(f"local_address {local!r} is neither an address nor an interface of "
                              f"this machine: give an address, or one of {', '.join(names)}")

    def dial(self, timeout_s: float) -> Stream:
        """A connected socket with the options of the protocol; raises `OSError`.

        Files are read anew: a renewed certificate is that of the next connection.
        """
        until = time.monotonic() + timeout_s
        connected = dial(self.place, timeout_s, self.local)
        if self.files is None:
            return connected
        try:
            stream = TlsSocket(connected, context_of(self.files, server_side=False),
                               name=self.place[0])
            stream.handshake(max(until - time.monotonic(), ONE_ADDRESS_MIN_S))
        except ConfigError as error:
            connected.close()
            raise OSError(errno.EINVAL, str(error)) from None
        except BaseException:
            connected.close()
            raise
        return stream

    def expiring(self, stream: Stream, now: float) -> str:
        """A line about certificates of a connection that expire soon, '' if none does. now: seconds
        since 1970."""
        if self.files is None or not isinstance(stream, TlsSocket):
            return ""
        left = {self.files.certificate: expiry_of(self.files.certificate) - now,
                f"of {self.address}": stream.certificate().expires - now}
        soon = [f"{whose} in {int(left_s // A_DAY_S)} days" for whose, left_s in left.items()
                if left_s < WARN_DAYS * A_DAY_S]
        return f"certificates expire soon: {', '.join(soon)}; put new ones there" if soon else ""


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


class Lookup(threading.Thread):
    """Asks the system what a name means. That takes as long as resolvers take, and nothing ends it:
    so it is a thread of its own, and whoever asks waits as long as he likes."""

    def __init__(self, address: tuple[str, int]):
        super().__init__(daemon=True, name="syncer-lookup")
        self.address = address
        self.found: list[Any] = []
        self.error: OSError | None = None

    def run(self) -> None:
        try:
            self.found = socket.getaddrinfo(*self.address, type=socket.SOCK_STREAM)
        except OSError as error:
            self.error = error


_lookups: dict[tuple[str, int], Lookup] = {}
"""The last one of each name: one that hangs is waited for again, and no second one is made."""


def resolve(address: tuple[str, int], timeout_s: float) -> list[Any]:
    """Entries as of `socket.getaddrinfo`, at least one; raises `OSError`."""
    with contextlib.suppress(socket.gaierror):  # numbers need no resolver
        return socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    lookup = _lookups.get(address)
    if lookup is None or not lookup.is_alive():
        lookup = _lookups[address] = Lookup(address)
        try:
            lookup.start()
        except RuntimeError:
            raise OSError(errno.EAGAIN, f"no thread to look {address[0]} up in") from None
    lookup.join(timeout_s)
    if lookup.is_alive():
        raise TimeoutError(f"the name {address[0]} was not resolved within {timeout_s:.3g} s; look "
                           "at the resolver of this machine, or give a number")
    if lookup.error is not None:
        raise lookup.error
    return lookup.found


def dial(address: Place, timeout_s: float, local: str | None = None) -> socket.socket:
    """A connected socket with the options of the protocol; raises `OSError`. local: the address or
    interface of this machine to dial from. All within this time: the name is looked up, and each of
    its addresses has a share of what is left then."""
    if isinstance(address, str):
        return _connected(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), address, timeout_s)
    until = time.monotonic() + timeout_s
    failures = []
    found = resolve(address, timeout_s)
    for tried, (family, kind, protocol, _, place) in enumerate(found):
        share_s = max((until - time.monotonic()) / (len(found) - tried), ONE_ADDRESS_MIN_S)
        try:
            return _connected(socket.socket(family, kind, protocol), place, share_s, local)
        except OSError as error:
            failures.append(error)
    raise failures[0]


def _connected(sock: socket.socket, place: Any, timeout_s: float,
               local: str | None = None) -> socket.socket:
    try:
        sock.settimeout(timeout_s)
        if local is not None and _is_address(local):
            sock.bind((local, 0))
        elif local is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, local.encode() + b"\0")
        sock.connect(place)
        if not isinstance(place, str) and sock.getsockname() == sock.getpeername():
            # On loopback, dialing a free port can connect a socket to itself.
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        tcp.configure(sock)
    except BaseException:
        sock.close()
        raise
    return sock


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
