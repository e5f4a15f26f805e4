"""How both ends set up a TCP socket of the protocol; must not dial, listen, read or write."""

from __future__ import annotations

import socket

KEEPALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
"""A peer that is gone without a word is noticed after 60 + 4 * 15 seconds."""


def configure(sock: socket.socket) -> None:
    """No Nagle delay, keep-alive probes. Raises OSError."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE:
        if hasattr(socket, name):  # Linux; elsewhere the system's own intervals hold
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
