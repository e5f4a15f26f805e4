"""The system calls that checkpoints need, one method each; must not hold state or decide anything.

All that writes and reads goes through a `Files`: a test can make any single call fail, the
simulator has files of its own, and a retry has one place.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from syncer.checkpoint.lock import PathLock, real_path
from syncer.checkpoint.trouble import LACKING, PERMANENT, RETRY_PAUSE_S

T = TypeVar("T")

SHORT_OF = frozenset({errno.EMFILE, errno.ENFILE})
"""No descriptor: whoever has them gives them back in a while; nothing is wrong with the disk."""
SHORT_PAUSE_S = 1.0
SHORT_TIMES_MAX = 120
"""So often one save waits for a descriptor; these are no retries."""


class Files:
    """The file system itself. Every method raises OSError.

    Large: one method per system call that a checkpoint needs.
    """

    def create(self, path: str, *, direct: bool = False) -> int:
        """A descriptor of a new file; never follows a link, never opens what is already there."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(path, flags | (os.O_DIRECT if direct else 0), 0o666)

    def write(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        """Bytes written of the buffers, one after the other, from `offset`; may be fewer."""
        return os.pwritev(descriptor, buffers, offset)

    def begin_writeback(self, descriptor: int, offset: int, length: int) -> None:
        """The kernel begins to write what is in its cache of these bytes, and waits for nothing.
        Linux takes this advice so; elsewhere nothing happens."""
        if sys.platform != "linux":
            return
        os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)

    def end_direct(self, descriptor: int) -> None:
        """The next write may have any length: it goes through the page cache."""
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def set_owner(self, descriptor: int, uid: int, gid: int) -> None:
        os.fchown(descriptor, uid, gid)

    def set_mode(self, descriptor: int, mode: int) -> None:
        os.fchmod(descriptor, mode)

    def attributes(self, file: str | int) -> dict[str, bytes]:
        """Extended attributes of a path (links followed) or a descriptor, access lists among them;
        none where the file system has no such thing."""
        found: dict[str, bytes] = {}
        try:
            for name in os.listxattr(file):
                with suppress(OSError):  # not for this process, or just removed
                    found[name] = os.getxattr(file, name)
        except OSError as error:
            if error.errno not in LACKING:
                raise
        return found

    def set_attribute(self, descriptor: int, name: str, value: bytes | None) -> None:
        """None: without it."""
        if value is None:
            os.removexattr(descriptor, name)
        else:
            os.setxattr(descriptor, name, value)

    def remark(self, text: str, fields: dict[str, Any]) -> None:
        """Something went not as it should and is no failure: nobody hears of it here."""

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

    # ------------------------------------------------------------------------------- looking
    def open(self, path: str) -> int:
        """A descriptor to read from. Does not wait for a writer, as a pipe of that name would."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)

    def read(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        """Bytes read into the buffers, one after the other, from `offset`; 0 at the end."""
        return os.preadv(descriptor, buffers, offset)

    def status(self, file: str | int) -> os.stat_result:
        """Kind, mode, owner and size of a path (links followed) or a descriptor."""
        return os.stat(file)

    def age_s(self, path: str) -> float:
        """Seconds since the file was written, by the clock of this machine."""
        return time.time() - os.stat(path).st_mtime

    def exists(self, path: str) -> bool:
        """Whether the name is there, be it a link that leads nowhere."""
        try:
            os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def names(self, directory: str) -> list[str]:
        """What lies in a directory, in no order."""
        return os.listdir(directory)

    def real_path(self, path: str) -> str:
        """Where a symbolic link leads in the end; any other path as it is."""
        return real_path(path)

    def lock(self, path: str) -> PathLock:
        """The path for this process alone. Raises `ConfigError` instead of OSError."""
        return PathLock(path)


class Behind(Files):
    """Another `Files` as it is; whoever changes some of its calls is made of this."""

    def __init__(self, files: Files):
        self.files = files


def _passed_on(name: str) -> Callable[..., Any]:
    def call(self: Behind, *given: Any, **options: Any) -> Any:
        return getattr(self.files, name)(*given, **options)
    return call


for _name in [name for name in vars(Files) if not name.startswith("_")]:
    setattr(Behind, _name, _passed_on(_name))


class Patient(Behind):
    """Another `Files` whose passing troubles are tried again, `retries` times all in all, and
    whose want of a descriptor for two minutes.

    A failed fsync is never repeated: the kernel may have dropped the pages it could not write, and
    the next fsync would then report success over a hole. Whoever still has the data must write the
    whole file anew. (A directory whose handle was stale is only looked up again.) sleep: what
    passes the time between two attempts.
    """

    def __init__(self, files: Files, retries: int, pause_s: float = RETRY_PAUSE_S,
                 told: Callable[[str, OSError], None] | None = None,
                 sleep: Callable[[float], None] = time.sleep):
        super().__init__(files)
        self.left, self.pause_s, self.sleep = retries, pause_s, sleep
        self.told = told or (lambda name, error: None)
        self.short_times = 0

    def take_retry(self, name: str, error: OSError) -> bool:
        """Whether there is one more attempt after this error; if so, it is used up."""
        if error.errno in PERMANENT or self.left <= 0:
            return False
        self.left -= 1
        self.told(name, error)
        self.sleep(self.pause_s)
        return True

    def wait_for_descriptor(self, name: str, error: OSError) -> bool:
        """Whether the call failed as there was none, and may be repeated as if it had not been."""
        if error.errno not in SHORT_OF or self.short_times >= SHORT_TIMES_MAX:
            return False
        if not self.short_times:
            self.told(name, error)
        self.short_times += 1
        self.sleep(SHORT_PAUSE_S)
        return True

    def _again(self, name: str, call: Callable[..., T], *given: Any, **options: Any) -> T:
        while True:
            try:
                return call(*given, **options)
            except OSError as error:
                if not (self.wait_for_descriptor(name, error) or self.take_retry(name, error)):
                    raise

    def create(self, path: str, *, direct: bool = False) -> int:
        return self._again("create", self.files.create, path, direct=direct)

    def write(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        return self._again("write", self.files.write, descriptor, buffers, offset)

    def link(self, path: str, name: str) -> None:
        self._again("link", self.files.link, path, name)

    def rename(self, path: str, name: str) -> None:
        self._again("rename", self.files.rename, path, name)

    def unlink(self, path: str) -> None:
        self._again("unlink", self.files.unlink, path)

    def free_bytes(self, path: str) -> int:
        return self._again("free_bytes", self.files.free_bytes, path)

    def sync_directory(self, path: str) -> None:
        while True:
            try:
                return self.files.sync_directory(path)
            except OSError as error:
                stale = error.errno == errno.ESTALE and self.take_retry("sync_directory", error)
                if not (stale or self.wait_for_descriptor("sync_directory", error)):
                    raise

    def attributes(self, file: str | int) -> dict[str, bytes]:
        return self._again("attributes", self.files.attributes, file)

    def open(self, path: str) -> int:
        return self._again("open", self.files.open, path)

    def read(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        return self._again("read", self.files.read, descriptor, buffers, offset)

    def status(self, file: str | int) -> os.stat_result:
        return self._again("status", self.files.status, file)

    def age_s(self, path: str) -> float:
        return self._again("age_s", self.files.age_s, path)

    def exists(self, path: str) -> bool:
        return self._again("exists", self.files.exists, path)

    def names(self, directory: str) -> list[str]:
        return self._again("names", self.files.names, directory)


FILES = Files()
