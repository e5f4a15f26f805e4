"""One writer per checkpoint: `<path>.lock`, held by flock for as long as the writer lives.

Must not be trusted for more than it says: a killed process leaves the file, but never the lock.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from contextlib import suppress

from syncer.checkpoint.trouble import PERMANENT, RETRY_PAUSE_S
from syncer.errors import ConfigError

ATTEMPTS = 3
"""Of a lock that fails for what may be a moment: a stale handle, a server that comes back."""
LOCKLESS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


def real_path(path: str) -> str:
    """Where a symbolic link leads in the end; any other path as it is."""
    return os.path.realpath(path) if os.path.islink(path) else path


def _owner(found: bytes) -> tuple[str, str]:
    """Whoever wrote this into the file: its process id, and the host that counts it."""
    pid, _, host = (word.strip() for word in found.decode("ascii", "replace").partition("\n"))
    return pid or "unknown", f" on {host}" if host else ""


def _advice(number: int | None) -> str:
    if number in LOCKLESS:
        return (": its file system has no locks here; mount it with them (Lustre: -o flock; NFS: "
                "without nolock; FUSE: the option of its driver), or name a file on another one")
    if number == errno.ENAMETOOLONG:
        return "; give it a shorter name"
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "; make room there"
    return "; name a file in a directory you may write to" if number in PERMANENT else ""


class PathLock:
    """Holds `<path>.lock`; `close` gives it back and removes the file. A file has one lock, under
    whatever symbolic links it is named. what: the option that names it, for messages.

    Raises `ConfigError` naming the process that has it, or why it cannot be taken.
    """

    def __init__(self, path: str | os.PathLike[str], what: str = "--checkpoint-path"):
        self.path = f"{real_path(os.fspath(path))}.lock"
        self.what = what
        self.descriptor = -1
        attempts = ATTEMPTS
        while self.descriptor < 0:
            try:
                self.descriptor = self._take(os.fspath(path))
            except OSError as error:
                attempts -= 1
                if attempts and error.errno not in PERMANENT:
                    time.sleep(RETRY_PAUSE_S)
                    continue
                raise ConfigError(f"{what} {os.fspath(path)} cannot be locked with {self.path}: "
                                  f"{error.strerror}{_advice(error.errno)}") from None

    def _take(self, shown: str) -> int:
        """A locked descriptor, or -1 when the file was removed by its last owner meanwhile."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW,
                             0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self._is_mine(descriptor):
                os.close(descriptor)
                return -1
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n{socket.gethostname()}\n".encode(), 0)
        except BlockingIOError:
            pid, host = _owner(os.pread(descriptor, 512, 0))
            os.close(descriptor)
            raise ConfigError(
                f"{self.what} {shown} is in use by process {pid}, which holds {self.path}{host}; "
                "stop it or name another file") from None
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def _is_mine(self, descriptor: int) -> bool:
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(descriptor))

    def close(self) -> None:
        """Give the lock back; harmless when repeated."""
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            # Removed while it is still held: who opens it from now on makes a new file.
            with suppress(OSError):
                os.unlink(self.path)
            os.close(descriptor)

    def __enter__(self) -> PathLock:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
