"""A simulated file system: slow, full, failing, and forgetful.

The production writer and reader use it call by call; between two calls of a saver time passes, so
that its server can die there. Names and contents reach the disk only by fsync, as they do in
reality: a power failure leaves any part of what was not synced. Must not decide when anything is
saved.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from syncer.checkpoint.atomic import ACCESS_LIST
from syncer.checkpoint.epoch_file import epoch_path
from syncer.checkpoint.facts import optimizer_facts
from syncer.checkpoint.files import Files
from syncer.checkpoint.lock import PathLock
from syncer.checkpoint.marker import marker_path
from syncer.checkpoint.reader import Checkpoint
from syncer.checkpoint.resume import check_resumable
from syncer.checkpoint.trouble import LACKING
from syncer.config import Config
from syncer.errors import ConfigError
from syncer.merge.optimizers import OPTIMIZERS
from tests.sim.clock import MS, World
from tests.sim.lane import Killed

DIRECTORY = "/simulated"
PATH = f"{DIRECTORY}/checkpoint"
BESIDE = epoch_path(PATH)
"""The one file without a digest that a server reads."""
FAILING = ("create", "write", "sync", "close", "link", "rename", "unlink", "set_mode",
           "free_bytes", "sync_directory", "full", "attributes", "set_attribute", "status")
FAILING_AT_START = ("status", "open", "read", "sync_directory", "unlink", "short", "short",
                    "create", "sync", "rename")
NUMBERS = (errno.EIO, errno.EIO, errno.EMFILE, errno.ENOSPC, errno.EDQUOT, errno.EACCES,
           errno.EOPNOTSUPP)
BY_NAME = ("create", "link", "rename", "unlink", "sync_directory", "free_bytes", "open", "names",
           "age_s")
"""Calls that find no directory while it is away; of `status` those about a name."""
BLOCK = 4096


class Inode:
    """Contents as processes see them, and as they are on the disk."""

    def __init__(self) -> None:
        self.cached = bytearray()
        self.synced = b""
        self.mode = 0o644
        self.owner = 0
        self.attributes: dict[str, bytes] = {}
        self.step: int | None = None


class Disk:
    """One file system, over the deaths of its servers. fault_chance: that a save meets trouble."""

    def __init__(self, world: World, slow_ms: float):
        self.world = world
        self.slow_ms = slow_ms
        self.names: dict[str, Inode] = {}
        self.durable_names: dict[str, Inode] = {}
        self.locks: dict[str, SimFiles] = {}
        self.fault_chance = 0.0
        self.away_until_ns = 0
        """Until then no process finds the directory."""
        self.gone_back = False
        """Somebody has put an earlier checkpoint in the place of the newest."""

    @property
    def is_away(self) -> bool:
        return self.world.now_ns < self.away_until_ns

    def release(self, files: SimFiles) -> None:
        """A process is gone: its locks are free."""
        for path in [path for path, owner in self.locks.items() if owner is files]:
            del self.locks[path]

    def power_fails(self) -> None:
        """Every name is the old or the new one, and unsynced contents are anything of theirs."""
        rng = self.world.rng
        left: dict[str, Inode] = {}
        for name in sorted(self.names.keys() | self.durable_names.keys()):
            inode = rng.choice([self.names, self.durable_names]).get(name)
            if inode is not None:
                left[name] = inode
        for inode in left.values():
            if inode.synced != inode.cached:
                kept = rng.randrange(len(inode.cached) + 1)
                hole = bytes(len(inode.cached) - kept) if rng.random() < 0.5 else b""
                inode.cached = bytearray(inode.cached[:kept] + hole)
                inode.synced = bytes(inode.cached)
                inode.step = None
        self.names = left
        self.durable_names = dict(left)

    def marked_step(self) -> int | None:
        inode = self.names.get(marker_path(PATH))
        return None if inode is None else int(inode.cached.decode().split("global_step=")[1])

    def durable_step(self) -> int:
        """Step of the cut that a power failure at this moment would leave for certain; -1: none."""
        inode = self.durable_names.get(PATH)
        if inode is None or self.names.get(PATH) is not inode or inode.synced != inode.cached:
            return -1
        if inode.step is None:
            with Checkpoint(PATH, SimFiles(self)) as checkpoint:
                inode.step = checkpoint.facts.step
        return inode.step

    def load(self, config: Config) -> dict[str, Any] | None:
        """What a server would resume from, through the real reader and its checks; or None."""
        if PATH not in self.names:
            return None
        with Checkpoint(PATH, SimFiles(self)) as checkpoint:
            facts = checkpoint.facts
            check_resumable(facts, PATH, optimizer=optimizer_of(config),
                            state=OPTIMIZERS[config.outer_optimizer].state,
                            total_steps=config.total_steps)
            cut = [tuple(entry) for entry in checkpoint.load(threads=1)]
        return {"step": facts.step, "cut": cut, "renumbered": facts.lineage.renumbered,
                "ledger": {learner: list(entry) for learner, entry in facts.ledger.items()}}


class SimFiles(Files):
    """What one process sees of the disk. `dead`: it is gone, and nothing it does happens."""

    def __init__(self, disk: Disk):
        self.disk = disk
        self.of_process = False
        """Not of who looks on."""
        self.dead = False
        self.passes: Callable[[float], None] = lambda delay_ns: None
        self.descriptors: dict[int, Inode] = {}
        self.direct: set[int] = set()
        self.opened = 0
        self.pause_ns = 0.0
        self.fault: str | None = None
        self.fault_number = 0
        self.fault_count = 0
        self.troubled = 0
        """Calls that have failed."""
        self.may_garble = False
        """What it reads is verified against digests, so one bit of it may be wrong."""

    def begin_resume(self) -> None:
        """A server starts again: what looking at its checkpoint will suffer."""
        self._draw_fault(FAILING_AT_START + ("garbled",) * (3 if self.may_garble else 0))

    def begin_work(self) -> None:
        """A save begins: how slow it is, and what it will suffer."""
        self.pause_ns = self.disk.world.between(0.01, self.disk.slow_ms) * MS
        self._draw_fault(FAILING)

    def _draw_fault(self, calls: Sequence[str]) -> None:
        disk, rng = self.disk, self.disk.world.rng
        self.fault = None
        if disk.world.chance(disk.fault_chance):
            self.fault = rng.choice(calls)
            self.fault_number = rng.choice(NUMBERS)
            self.fault_count = rng.randint(1, 3)

    def _call(self, call: str) -> None:
        """Each call takes its time, and may fail."""
        if self.dead:
            raise Killed
        self.passes(self.pause_ns * self.disk.world.between(0.3, 3) if self.pause_ns else 0)
        if self.dead:
            raise Killed
        if self.is_away and call in BY_NAME:
            self.troubled += 1
            _missing()
        if self.fault == call:
            self.troubled += 1
            self.fault_count -= 1
            if not self.fault_count:
                self.fault = None
            raise OSError(self.fault_number, os.strerror(self.fault_number))

    @property
    def is_away(self) -> bool:
        return self.of_process and self.disk.is_away

    def _inode(self, path: str) -> Inode:
        inode = self.disk.names.get(path)
        return inode if inode is not None else _missing()

    # ---- writing -----------------------------------------------------------------------------

    def create(self, path: str, *, direct: bool = False) -> int:
        self._call("create")
        if path in self.disk.names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        self.opened += 1
        self.disk.names[path] = self.descriptors[self.opened] = Inode()
        if self.disk.world.chance(0.1):           # as the directory has a default access list
            self.descriptors[self.opened].attributes[ACCESS_LIST] = b"of the directory"
        if direct:
            self.direct.add(self.opened)
        return self.opened

    def write(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        """Now and then fewer bytes than asked for."""
        self._call("write")
        data = b"".join(bytes(buffer) for buffer in buffers)
        if descriptor in self.direct:
            assert len(data) % BLOCK == offset % BLOCK == 0, "an unaligned direct write"
        elif len(data) > 1 and self.disk.world.chance(0.2):
            data = data[:self.disk.world.rng.randrange(1, len(data))]
        self.descriptors[descriptor].cached[offset:offset + len(data)] = data
        return len(data)

    def end_direct(self, descriptor: int) -> None:
        self.direct.remove(descriptor)

    def sync(self, descriptor: int) -> None:
        self._call("sync")
        inode = self.descriptors[descriptor]
        inode.synced = bytes(inode.cached)

    def set_owner(self, descriptor: int, uid: int, gid: int) -> None:
        self._call("set_owner")
        if uid and self.disk.world.chance(0.5):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        self.descriptors[descriptor].owner = uid

    def set_mode(self, descriptor: int, mode: int) -> None:
        self._call("set_mode")
        self.descriptors[descriptor].mode = mode

    def attributes(self, file: str | int) -> dict[str, bytes]:
        self._call("attributes")
        inode = self.descriptors[file] if isinstance(file, int) else self._inode(file)
        return dict(inode.attributes)

    def set_attribute(self, descriptor: int, name: str, value: bytes | None) -> None:
        self._call("set_attribute")
        attributes = self.descriptors[descriptor].attributes
        if value is None:
            del attributes[name]
        else:
            attributes[name] = value

    def close(self, descriptor: int) -> None:
        del self.descriptors[descriptor]
        self.direct.discard(descriptor)
        self._call("close")

    def link(self, path: str, name: str) -> None:
        self._call("link")
        inode = self._inode(path)                 # the first name is looked up first, as Linux does
        if name in self.disk.names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        self.disk.names[name] = inode

    def rename(self, path: str, name: str) -> None:
        self._call("rename")
        inode = self._inode(path)
        self.disk.names[name] = inode
        del self.disk.names[path]

    def unlink(self, path: str) -> None:
        self._call("unlink")
        self._inode(path)
        del self.disk.names[path]

    def sync_directory(self, path: str) -> None:
        assert path == DIRECTORY
        try:
            self._call("sync_directory")
        except OSError as error:
            if error.errno in LACKING:            # then a name is durable when it is given
                self.disk.durable_names = dict(self.disk.names)
            raise
        self.disk.durable_names = dict(self.disk.names)

    def free_bytes(self, path: str) -> int:
        self._call("free_bytes")
        if self.fault == "full":
            self.fault = None
            self.troubled += 1
            return 10
        return 1 << 40

    # ---- looking -----------------------------------------------------------------------------

    def open(self, path: str) -> int:
        self._call("open")
        self.opened += 1
        self.descriptors[self.opened] = self._inode(path)
        return self.opened

    def read(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        self._call("read")
        done, inode, rng = 0, self.descriptors[descriptor], self.disk.world.rng
        size = self._size(inode)
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            data = inode.cached[offset + done:min(size, offset + done + len(view))]
            view[:len(data)] = data
            done += len(data)
            if self.fault == "garbled" and data and inode is not self.disk.names.get(BESIDE):
                view[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return done

    def _size(self, inode: Inode) -> int:
        """As it seems to be."""
        if self.fault == "short":
            return len(inode.cached) * self.fault_count // 4
        return len(inode.cached)

    def status(self, file: str | int) -> os.stat_result:
        self._call("status")
        if self.is_away and isinstance(file, str):
            _missing()
        inode = self.descriptors[file] if isinstance(file, int) else self._inode(file)
        return os.stat_result((stat.S_IFREG | inode.mode, id(inode), 0, 1, inode.owner, inode.owner,
                               self._size(inode), 0, 0, 0))

    def age_s(self, path: str) -> float:
        self._call("age_s")
        self._inode(path)
        return 0.0

    def exists(self, path: str) -> bool:
        self._call("exists")
        return path in self.disk.names and not self.is_away

    def names(self, directory: str) -> list[str]:
        self._call("names")
        found = [os.path.basename(name) for name in self.disk.names]
        self.disk.world.rng.shuffle(found)
        return found

    def real_path(self, path: str) -> str:
        return path

    def lock(self, path: str) -> SimLock:
        if self.is_away:
            raise ConfigError(f"--checkpoint-path {path}: its directory does not exist")
        owner = self.disk.locks.get(path)
        if owner is not None:
            raise ConfigError(f"--checkpoint-path {path} is in use by process 1")
        return SimLock(self, path)


class SimLock(PathLock):
    """Held for one process; the kernel takes it back when that dies."""

    def __init__(self, files: SimFiles, path: str):
        self.files, self.locked = files, path
        files.disk.locks[path] = files

    def close(self) -> None:
        if self.files.disk.locks.get(self.locked) is self.files:
            del self.files.disk.locks[self.locked]


def _missing() -> NoReturn:
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


def optimizer_of(config: Config) -> dict[str, Any]:
    """The outer optimizer as a checkpoint states it."""
    return optimizer_facts(config.outer_optimizer, lr=config.outer_lr,
                           momentum=config.outer_momentum, dn_period=config.dn_period,
                           dn_activation=config.dn_activation)
