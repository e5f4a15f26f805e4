"""The system calls that writing needs, one method each; must not hold state or decide anything.

Everything that writes goes through a `Files`, so a test can make any single call fail, and a retry
has one place.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

PERMANENT = frozenset({
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR,
    errno.ENAMETOOLONG, errno.ELOOP, errno.EFBIG, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS,
    errno.EXDEV, errno.EMLINK, errno.EBADF, errno.EEXIST,
})
"""Errors that the same call will give again; everything else may be a moment's trouble."""


class Files:
    """The file system itself. Every method raises OSError."""

    def create(self, path: str, *, direct: bool = False) -> int:
        """A descriptor of a new file; never follows a link, never opens what is already there."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(path, flags | (os.O_DIRECT if direct else 0), 0o666)

    def write(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        """Bytes written of the buffers, one after the other, from `offset`; may be fewer."""
        return os.pwritev(descriptor, buffers, offset)

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def set_owner(self, descriptor: int, uid: int, gid: int) -> None:
        os.fchown(descriptor, uid, gid)

    def set_mode(self, descriptor: int, mode: int) -> None:
        os.fchmod(descriptor, mode)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def link(self, path: str, name: str) -> None:
        os.link(path, name)

    def rename(self, path: str, name: str) -> None:
        os.replace(path, name)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def sync_directory(self, path: str) -> None:
        """A new name survives a power failure only once its directory is on disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def free_bytes(self, path: str) -> int:
        """Bytes that this process may still write to the file system of `path`."""
        facts = os.statvfs(path)
        return facts.f_frsize * (facts.f_bavail if os.geteuid() else facts.f_bfree)


class Patient(Files):
    """Another `Files` whose passing troubles are tried again, `retries` times all in all.

    A failed fsync is never repeated: the kernel may have dropped the pages it could not write, and
    the next fsync would then report success over a hole. Whoever still has the data must write the
    whole file anew.
    """

    def __init__(self, files: Files, retries: int, pause_s: float = 0.1,
                 told: Callable[[str, OSError], None] | None = None):
        self.files, self.left, self.pause_s = files, retries, pause_s
        self.told = told or (lambda name, error: None)

    def take_retry(self, name: str, error: OSError) -> bool:
        """Whether there is one more attempt after this error; if so, it is used up."""
        if error.errno in PERMANENT or self.left <= 0:
            return False
        self.left -= 1
        self.told(name, error)
        time.sleep(self.pause_s)
        return True

    def _again(self, name: str, *given: Any, **options: Any) -> Any:
        while True:
            try:
                return getattr(self.files, name)(*given, **options)
            except OSError as error:
                if not self.take_retry(name, error):
                    raise

    def create(self, path: str, *, direct: bool = False) -> int:
        return self._again("create", path, direct=direct)

    def write(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        return self._again("write", descriptor, buffers, offset)

    def link(self, path: str, name: str) -> None:
        self._again("link", path, name)

    def rename(self, path: str, name: str) -> None:
        self._again("rename", path, name)

    def unlink(self, path: str) -> None:
        self._again("unlink", path)

    def free_bytes(self, path: str) -> int:
        return self._again("free_bytes", path)

    def sync(self, descriptor: int) -> None:
        self.files.sync(descriptor)

    def sync_directory(self, path: str) -> None:
        self.files.sync_directory(path)

    def set_owner(self, descriptor: int, uid: int, gid: int) -> None:
        self.files.set_owner(descriptor, uid, gid)

    def set_mode(self, descriptor: int, mode: int) -> None:
        self.files.set_mode(descriptor, mode)

    def close(self, descriptor: int) -> None:
        self.files.close(descriptor)


FILES = Files()
