"""A reader that does what a test says: the real protocol session on a blocking socket."""

from __future__ import annotations

import secrets
import socket

from syncer.protocol import DTYPE_F32
from syncer.reader.cut_session import Inbound, ReaderSession, ReceivedCut
from tests.e2e.scripted import PATIENCE_S


class ScriptedReader:
    """Dials at once; `with` closes it. `next()` is what comes next, None at the end."""

    def __init__(self, port: int, dtype: int = DTYPE_F32, *, follows: bool = False,
                 run: str | None = None, key: bytes | None = None, said: bytes | None = None,
                 receive_buffer_bytes: int = 0):
        self.session = ReaderSession(dtype, follows=follows, run=run)
        self.said = said or self.session.hello(secrets.randbits(64) | 1, key)
        self.waiting: list[Inbound] = []
        self.sock = socket.socket()
        self.sock.settimeout(PATIENCE_S)
        if receive_buffer_bytes:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self.sock.connect(("127.0.0.1", port))
        self.sock.sendall(self.said)

    def next(self) -> Inbound | None:
        while not self.waiting:
            try:
                count = self.sock.recv_into(self.session.buffer())
            except ConnectionResetError:
                count = 0
            if not count:
                return None
            self.waiting = list(self.session.received(count))
        return self.waiting.pop(0)

    def until(self, kind: type) -> Inbound:
        """The next of this kind."""
        while not isinstance(found := self.next(), kind):
            assert found is not None, f"the server closed before {kind.__name__}"
        return found

    def cut(self) -> ReceivedCut:
        return self.until(ReceivedCut)

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> ScriptedReader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
