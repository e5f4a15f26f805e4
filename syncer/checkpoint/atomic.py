"""A file that appears under its name only when it is complete and on disk, or not at all.

It must not know what the bytes mean. Order of a commit: everything written, fsync, rename over the
name, fsync of the directory. Until that has succeeded the file that was there can come back: a
second name keeps it. A crash at any instant leaves the old file or the new one under the name.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from syncer.checkpoint.files import FILES, Files, Patient
from syncer.checkpoint.lane import Work, beside
from syncer.checkpoint.pace import UNHELD, Tempo
from syncer.checkpoint.pieces import Pieces
from syncer.errors import CheckpointError

OF_CONTENTS = frozenset({"security.ima", "security.evm", "security.capability"})
"""Attributes that would be wrong of any other file."""
ACCESS_LIST = "system.posix_acl_access"
LARGE_BYTES = 64 * 1024 * 1024
"""A file of so much that was replaced is held open while its last name goes, and its space is given
back beside what comes next: on ext4 that takes a quarter of a second for each GB."""


Retire = Callable[[str | None], None]
"""What becomes of a file that was replaced, under its second name; None: it has none any more."""


class WriteError(CheckpointError):
    """A file could not be written. What was there before is there still, unless the text says not.

    `number` is the errno, `call` the method of `Files` that failed.
    """

    def __init__(self, text: str, number: int | None = None, call: str = ""):
        super().__init__(text)
        self.number, self.call = number, call


def check_space(path: str | os.PathLike[str], size_bytes: int, files: Files = FILES) -> None:
    """Raises `WriteError` if a file of that size does not fit beside what is there, OSError if the
    file system does not say."""
    free = files.free_bytes(os.path.dirname(files.real_path(os.fspath(path))) or ".")
    if size_bytes > free:
        raise WriteError(
            f"{os.fspath(path)} needs {size_bytes} bytes next to the file that is there, but its "
            f"file system has {free} bytes free; free {size_bytes - free} bytes or name a path on "
            "another one", errno.ENOSPC, "free_bytes")


def clear_leftovers(path: str | os.PathLike[str], files: Files = FILES) -> None:
    """Remove what a killed process left beside `path`. Raises OSError. Only for whoever is alone
    with the path."""
    real = files.real_path(os.fspath(path))
    directory, base = os.path.split(real)
    # a file without its first name may live on under the second one alone
    old = r"|\.old" if files.exists(real) else ""
    form = re.compile(rf"{re.escape(base)}(|\.step(-[0-9]+)?{old})\.tmp")
    for name in files.names(directory or "."):
        if form.fullmatch(name):
            with suppress(FileNotFoundError):
                files.unlink(os.path.join(directory, name))


def written_anew(write: Callable[[Files], int], files: Files) -> int:
    """What `write` returns, begun again from nothing where a call failed that may not be repeated
    alone (an fsync, a check of the space), as often as `files` has retries left, if it has any."""
    while True:
        try:
            return write(files)
        except WriteError as error:
            if error.number is None or not isinstance(files, Patient):
                raise
            problem = OSError(error.number, os.strerror(error.number))
            if not files.take_retry(error.call, problem):
                raise


class AtomicFile:
    """Writes `<path>.tmp` in the directory of `path`, then takes its place.

    What a killed process left (`.tmp`, `.old.tmp`) goes first, so that its space counts as free;
    the second name of an old file stays while it may be the only one. Mode and owner of a file that
    is there are kept, as far as this process may. A symbolic link stays one: the file it leads to
    is replaced. Every method raises `WriteError`, after which nothing of the new file is left.
    size_bytes: what is going to be written, checked against the free space first. direct: past the
    page cache; refused by some file systems. retire: takes the file that was replaced, once the new
    one stands; must raise nothing. Without it that file goes. beside, pace: as of `Pieces`.

    Append, then `commit`; leaving the `with` block without that removes the partial file.

    Large: it is one write, from the free space to the place it takes, and each method is a step of
    it that can fail on its own and must then leave nothing behind.
    """

    def __init__(self, path: str | os.PathLike[str], *, size_bytes: int = 0, files: Files = FILES,
                 direct: bool = False, retire: Retire | None = None,
                 beside: Callable[[Work, str], Work] = beside, pace: Tempo = UNHELD):
        self.shown = os.fspath(path)
        self.path = files.real_path(self.shown)
        self.directory = os.path.dirname(self.path) or "."
        self.temporary = f"{self.path}.tmp"
        self.backup = f"{self.path}.old.tmp"
        self.files = files
        self.descriptor = -1
        self.pieces = Pieces(files, direct=direct, beside=beside, pace=pace)
        self.retire = retire
        self.direct = direct
        self._check_place()
        self._clear()
        with self._calling("free_bytes", "asked for its free space"):
            check_space(self.shown, size_bytes, files)
        self._create()

    def __enter__(self) -> AtomicFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.abort()

    @property
    def size(self) -> int:
        """Bytes appended so far."""
        return self.pieces.size

    @property
    def written(self) -> int:
        """Bytes that were handed to the kernel so far."""
        return self.pieces.written

    def _check_place(self) -> None:
        with self._calling("status", "looked at"), suppress(FileNotFoundError):
            if not stat.S_ISREG(self.files.status(self.path).st_mode):
                raise OSError(errno.EINVAL, "the name belongs to something that is no regular file")

    def _clear(self) -> None:
        with self._calling("unlink", "cleared of an old partial file"):
            self._remove(self.temporary)
            if self.files.exists(self.path):
                self._remove(self.backup)

    def _create(self) -> None:
        with self._calling("create", "created"):
            self.descriptor = self.files.create(self.temporary, direct=self.direct)
        self.pieces.descriptor = self.descriptor
        with self._calling("set_mode", "given its mode"):
            self._keep_mode()

    def _keep_mode(self) -> None:
        try:
            there = self.files.status(self.path)
        except FileNotFoundError:
            return
        mine = self.files.status(self.descriptor)
        if (mine.st_uid, mine.st_gid) != (there.st_uid, there.st_gid):
            # Only root may give a file away; losing a checkpoint over that would be worse.
            with suppress(PermissionError):
                self.files.set_owner(self.descriptor, there.st_uid, there.st_gid)
        self._keep_attributes()
        self.files.set_mode(self.descriptor, stat.S_IMODE(there.st_mode))

    def _keep_attributes(self) -> None:
        """Access lists and whatever else is tied to the file, not to its contents. One that may not
        be given is no reason to lose a checkpoint."""
        wanted = self.files.attributes(self.path)
        mine = self.files.attributes(self.descriptor)
        for name in sorted(wanted.keys() | mine.keys()):
            if wanted.get(name) == mine.get(name) or name in OF_CONTENTS or (
                    name not in wanted and name != ACCESS_LIST):
                continue
            try:
                self.files.set_attribute(self.descriptor, name, wanted.get(name))
            except OSError as error:
                self.files.remark("an attribute of the replaced file could not be kept",
                                  {"path": self.shown, "attribute": name, "error": error.strerror})

    # -------------------------------------------------------------------------------- writing
    def append(self, data: Any) -> None:
        """Write a C-contiguous buffer behind what is there.

        It must not change before `flush` or `commit`: it may be written only then.
        """
        with self._calling("write", "written"):
            self.pieces.append(data)

    def flush(self) -> None:
        """Hand everything appended to the kernel."""
        with self._calling("write", "written"):
            self.pieces.flush()

    def rewrite(self, data: bytes, offset: int) -> None:
        """Replace bytes that are written already. With `direct`: whole blocks at block offsets."""
        with self._calling("write", "written"):
            self.pieces.rewrite(data, offset)

    # ------------------------------------------------------------------------------ the end
    def commit(self) -> None:
        """Make the file durable under its name.

        If the directory cannot be made durable, the file that was there comes back.
        """
        self.flush()
        with self._calling("sync", "made durable (fsync)"):
            self.files.sync(self.descriptor)
        with self._calling("status", "looked at"):
            mine = self.files.status(self.descriptor)
        descriptor, self.descriptor = self.descriptor, -1
        with self._calling("close", "closed"):
            self.files.close(descriptor)
        kept = self._keep_old()
        with self._calling("status", "looked at"):
            replaced = kept or (self.retire is not None and self.files.exists(self.path))
        self._check_mine(mine)
        with self._calling("rename", "renamed"):
            self.files.rename(self.temporary, self.path)
        try:
            self.files.sync_directory(self.directory)
        except OSError as error:
            raise self._take_back(kept, error) from None
        if self.retire is not None and replaced:
            self.retire(self.backup if kept else None)
        else:
            self._forget_old()

    def _check_mine(self, mine: os.stat_result) -> None:
        """A second writer, let in by a lock that does not hold (two hosts, a network file system),
        has put its partial file under the same name: that must not be published."""
        with self._calling("status", "found again under its temporary name"):
            there = self.files.status(self.temporary)
        if (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino):
            temporary, self.temporary = self.temporary, ""  # it is the other's
            self.abort()
            raise WriteError(f"{self.shown} is being written by another process, too: {temporary} "
                             "is not the file that this one wrote; the file that was there is "
                             "unchanged; stop one of them", errno.EEXIST, "status")

    def _keep_old(self) -> bool:
        """Give the old file a second name; False if there is none, or no such thing as links."""
        try:
            self.files.link(self.path, self.backup)
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                return False
            self.abort()
            raise self._failed("link", "replaced", error) from None
        return True

    def _take_back(self, kept: bool, error: OSError) -> WriteError:
        try:
            if kept:
                self.files.rename(self.backup, self.path)
            else:
                self.files.unlink(self.path)
        except OSError as second:
            old = f"is kept as {self.backup}" if kept else "did not exist"
            self.backup = ""  # whoever comes to help may want it
            return WriteError(
                f"{self.shown} was replaced, but its directory cannot be made durable "
                f"({error.strerror}), and that could not be undone ({second.strerror}); the name "
                f"leads to the new file, which is complete, and the old one {old}", error.errno,
                "sync_directory")
        with suppress(OSError):
            self.files.sync_directory(self.directory)
        return self._failed("sync_directory", "made durable under its name (fsync of the "
                            "directory)", error)

    def _forget_old(self) -> None:
        """The new file stands; a second name that cannot be removed now goes at the next write."""
        held = -1
        with suppress(OSError):
            if self.size >= LARGE_BYTES:
                held = self.files.open(self.backup)
        with suppress(OSError):
            self._remove(self.backup)
        if held >= 0:
            self.pieces.beside(partial(self._free, held), "syncer-checkpoint-free")

    def _free(self, descriptor: int) -> None:
        """Without a name it has been the last that held the file."""
        with suppress(OSError):
            self.files.close(descriptor)

    def abort(self) -> None:
        """Remove the partial file; harmless after `commit` and when repeated."""
        self.pieces.drop()
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            with suppress(OSError):
                self.files.close(descriptor)
        with suppress(OSError):
            if self.temporary:
                self._remove(self.temporary)
        with suppress(OSError):
            if self.backup and self.files.exists(self.path):
                self._remove(self.backup)

    def _remove(self, name: str) -> None:
        if self.files.exists(name):
            with suppress(FileNotFoundError):
                self.files.unlink(name)

    @contextmanager
    def _calling(self, call: str, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.abort()
            raise self._failed(call, what, error) from None

    def _failed(self, call: str, what: str, error: OSError) -> WriteError:
        if call == "create" and self.direct and error.errno == errno.EINVAL:
            return WriteError(f"{self.shown} lies on a file system that takes no direct writes; "
                              "leave --checkpoint-direct out", error.errno, call)
        if error.errno == errno.ENAMETOOLONG:
            return WriteError(f"{self.shown} is too long a name: {os.path.basename(self.backup)!r} "
                              "must fit beside it; give a shorter one", error.errno, call)
        return WriteError(f"{self.shown} could not be {what}: {error.strerror}; the file that was "
                          "there is unchanged", error.errno, call)
