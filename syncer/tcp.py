"""How both ends set up a TCP socket of the protocol; must not dial, listen, read or write."""

from __future__ import annotations

import socket

KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 3),
             ("TCP_USER_TIMEOUT", 60_000))
"""A peer that is gone without a word is noticed after 15 + 3 * 15 seconds, and after 60,000 ms
when bytes wait for its acknowledgement, which keeps the probes away: the kernel alone tries for
about 15 minutes then. The first probe comes after 15 s because links forget flows that are idle
for 30."""


def configure(sock: socket.socket) -> None:
    """No Nagle delay, keep-alive probes, a limit for what is not acknowledged. Raises OSError."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE:
        if hasattr(socket, name):  # Linux; elsewhere the system's own intervals hold
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
