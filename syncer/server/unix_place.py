"""A Unix socket that the server listens on: the file, who may use it, and whose it is.

Must not accept anybody. Only the user of the server can connect (mode 0600), which stands in
the place of a key there. `<path>.lock` says that somebody listens: a file without one is left of a
server that was killed.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
from contextlib import suppress

from syncer.checkpoint.lock import PathLock
from syncer.errors import ConfigError
from syncer.server.addresses import BACKLOG, BindError

MODE = 0o600
_CREDENTIALS = struct.Struct("3i")


class UnixPlace:
    """Listens at `path` until `close`. Raises `BindError` with one sentence."""

    def __init__(self, path: str):
        self.path = path
        try:
            self.lock = PathLock(path, "--listen")
        except ConfigError as error:
            raise BindError(str(error)) from None
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._bind()
            self.file = os.lstat(path)
        except BaseException as error:
            self.sock.close()
            self.lock.close()
            if isinstance(error, OSError):
                raise BindError(f"--listen unix:{path} cannot be listened on: {error.strerror}; "
                                "name a path in a directory you may write to") from None
            raise

    def _bind(self) -> None:
        try:
            self.sock.bind(self.path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            self._clear()
            self.sock.bind(self.path)
        os.chmod(self.path, MODE)  # nobody can connect before it listens
        self.sock.listen(BACKLOG)
        self.sock.setblocking(False)

    def _clear(self) -> None:
        """What a server that was killed has left is removed, and nothing else."""
        if not stat.S_ISSOCK(os.lstat(self.path).st_mode):
            raise BindError(f"--listen unix:{self.path} is a file and no socket: it stays; name "
                            "another path")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked:
            asked.setblocking(False)
            number = asked.connect_ex(self.path)
        if number != errno.ECONNREFUSED:
            raise BindError(f"--listen unix:{self.path} is in use by another program; stop it or "
                            "name another path")
        os.unlink(self.path)

    def close(self) -> None:
        """Nobody can connect any more; the file goes, unless it is another one by now."""
        if self.lock.descriptor < 0:
            return
        self.sock.close()
        with suppress(OSError):
            if os.path.samestat(os.lstat(self.path), self.file):
                os.unlink(self.path)
        self.lock.close()


def process_of(sock: socket.socket) -> str:
    """Who has connected to a Unix socket: the process, as the kernel knows it."""
    pid, _, _ = _CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return f"unix:{pid}"
