"""How both ends set up a socket, write its address, and ask how fast its way is; must not dial,
listen, read or write.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 3),
             ("TCP_USER_TIMEOUT", 60_000))
"""A peer that is gone without a word is noticed after 15 + 3 * 15 seconds, and after 60,000 ms
when bytes wait for its acknowledgement, which keeps the probes away: the kernel alone tries for
about 15 minutes then. The first probe comes after 15 s because links forget flows that are idle
for 30."""
NOT_SENT = ("TCP_NOTSENT_LOWAT", 128 * 1024)
"""So much of what a socket was given may wait in the kernel to be sent. It is no size of a buffer:
what is under way may be as much as the way holds. What is given later goes to the socket that can
send it, not to the one whose buffer was the first with room for it, and is no older than that."""
UNIX = "unix:"
"""What the address of a Unix socket begins with."""
UNIX_PATH_MAX = 107
"""Bytes of its path that fit the address, which ends with a zero byte."""
_DELIVERY_RATE = struct.Struct("=160xQ")
"""Of Linux's TCP_INFO: bytes a second that arrived at the other end when it was last measured."""


class Asked(Protocol):
    """What is asked of a socket here."""

    def getsockname(self) -> Any: ...

    def getsockopt(self, level: int, name: int, size: int, /) -> bytes: ...


class Link(NamedTuple):
    """The way of one connection, as this end sees it."""

    local: str
    """This end of its first socket."""
    mb_per_s: float
    """What its sockets together were seen to carry from here, 0 where the system does not say."""


def configure(sock: socket.socket) -> None:
    """No Nagle delay, keep-alive probes, limits for what is not acknowledged or not sent; a Unix
    socket needs none of them. Raises OSError."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (*KEEPALIVE, NOT_SENT):
        if hasattr(socket, name):  # Linux; elsewhere the system's own intervals hold
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def address_text(address: Any) -> str:
    """An address of the socket module as people write it: host:port, [v6]:port or unix:/path."""
    if isinstance(address, tuple):
        host, port = address[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return UNIX + (address if isinstance(address, str) else "")


def path_trouble(path: str) -> str:
    """Why no Unix socket can have this path, '' if one can."""
    if not path.startswith("/"):
        return "its path must be absolute, for example unix:/run/user/1000/syncer.sock"
    size = len(path.encode("utf-8", "surrogateescape"))
    if size > UNIX_PATH_MAX:
        return (f"its path has {size} bytes, and the system takes {UNIX_PATH_MAX}: choose a "
                "shorter one")
    return "its path has a zero byte" if "\0" in path else ""


def link(socks: Iterable[Asked]) -> Link:
    """Of the open sockets of one connection, the first one first."""
    local, rate = "", 0
    for sock in socks:
        with suppress(OSError):  # closed meanwhile, or a system that does not tell
            local = local or address_text(sock.getsockname())
            rate += _DELIVERY_RATE.unpack(sock.getsockopt(
                socket.IPPROTO_TCP, socket.TCP_INFO, _DELIVERY_RATE.size))[0]
    return Link(local, round(rate / 1e6, 1))
