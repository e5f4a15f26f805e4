"""What an address means: the sockets that listen on it, and how learners can dial them.

It makes no system call of its own, and must not accept anybody.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from typing import Any, Protocol

from syncer.errors import SyncerError
from syncer.tcp import UNIX, address_text

BACKLOG = 512
"""Of who has connected and is not accepted yet."""
PORTS_TRIED = 20
"""A free port of one address may be in use on the next one."""
SHOWN_MAX = 8
ABSENT = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
"""An address that this machine does not have; a name may have others."""
EVERY = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Every address -> what can be dialed where there is no other."""


class BindError(SyncerError):
    """The address cannot be listened on."""


class Places(Protocol):
    """The port."""

    def resolve(self, host: str, port: int) -> list[tuple[int, Any]]: ...

    def bind(self, family: int, address: Any) -> socket.socket: ...

    def own_addresses(self) -> list[str]: ...


def listen(places: Places, host: str, port: int) -> list[socket.socket]:
    """A listening socket on every address of `host` that this machine has, all on one port. Raises
    `BindError` with one sentence."""
    try:
        found = places.resolve(host, port)
    except (OSError, UnicodeError) as error:  # the name is encoded before it is looked up
        why = getattr(error, "strerror", None) or error
        raise BindError(f"--host {host} cannot be listened on: {why}; name an address of this "
                        "machine") from None
    tries = 1 if port else PORTS_TRIED
    while True:
        tries -= 1
        try:
            return _all_bound(places, found)
        except OSError as error:
            where = f"{host}:{port}"
            if error.errno != errno.EADDRINUSE:
                raise BindError(f"{where} cannot be listened on: {os.strerror(error.errno or 0)}; "
                                "choose another --host or --port") from None
            if not tries:
                raise BindError(f"{where} is in use by another program; stop it or choose another "
                                "--port") from None


def _all_bound(places: Places, wanted: Sequence[tuple[int, Any]]) -> list[socket.socket]:
    """Raises the OSError of the first one that is refused, or absent if all of them are."""
    found: list[socket.socket] = []
    absent: OSError | None = None
    for family, address in wanted:
        port = found[0].getsockname()[1] if found else address[1]
        try:
            found.append(places.bind(family, (address[0], port, *address[2:])))
        except OSError as error:
            if error.errno not in ABSENT:
                for sock in found:
                    sock.close()
                raise
            absent = absent or error
    if absent is not None and not found:
        raise absent
    return found


def reachable(places: Places, socks: Sequence[socket.socket]) -> list[str]:
    """What a learner may dial, as host:port or unix:/path: of "every address" those that this
    machine has."""
    found: list[str] = []
    for sock in socks:
        if sock.family == socket.AF_UNIX:
            found.append(UNIX + sock.getsockname())
            continue
        host, port = sock.getsockname()[:2]
        hosts = [host]
        if host in EVERY:
            hosts = [own for own in places.own_addresses() if host == "::" or ":" not in own]
            hosts = hosts[:SHOWN_MAX] or [EVERY[host]]
        found += [address_text((each, port)) for each in hosts]
    return found


def host_of(peer: str) -> str:
    """The address of a peer as host:port, without its port."""
    return peer.rpartition(":")[0]
