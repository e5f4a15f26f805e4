"""Tells the service manager how the server stands, as sd_notify does; must not wait for it.

A manager that started the process names a datagram socket in `NOTIFY_SOCKET`. What is sent there
are lines of `NAME=value`; nobody answers, and what cannot be sent is of no consequence to a run.
"""

from __future__ import annotations

import socket
from contextlib import suppress

STATUS_EVERY_NS = 10**9
"""So often at most the manager hears where the run stands."""


class ServiceManager:
    """The socket at `address`: a path, or a name of the abstract namespace after an `@`."""

    def __init__(self, address: str):
        self.address = f"\0{address[1:]}" if address.startswith("@") else address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.setblocking(False)
        self.status = ""
        self.due_ns = 0

    def ready(self, status: str) -> None:
        """Learners can connect."""
        self._send("READY=1", status)

    def stands(self, status: str, now_ns: int) -> None:
        """Where the run stands; not sent more often than somebody would read it."""
        if now_ns >= self.due_ns and status != self.status:
            self.due_ns = now_ns + STATUS_EVERY_NS
            self._send(f"STATUS={status}", status)

    def stopping(self, status: str) -> None:
        """The run has ended, and the process is about to."""
        self._send("STOPPING=1", status)
        self.socket.close()

    def _send(self, line: str, status: str) -> None:
        self.status = status
        lines = dict.fromkeys((line, f"STATUS={status}"))
        with suppress(OSError):
            self.socket.sendto("\n".join(lines).encode(), self.address)
