"""A simulated disk below the real checkpoint writer: slow, full, failing, and forgetful.

A save runs the production writer at once against a recorder; what it asked the file system for then
happens one call after the other in simulated time. So the order of the calls, the bytes and what is
cleaned up after a failure are the real ones, and a server can die between any two of them. Names
and contents reach the disk only by fsync, as they do in reality: a power failure leaves any part of
what was not synced. Must not decide when anything is saved.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections import deque
from collections.abc import Callable
from typing import Any

from syncer.checkpoint.atomic import WriteError
from syncer.checkpoint.facts import Cut
from syncer.checkpoint.files import Files
from syncer.checkpoint.marker import marker_path, write_marker
from syncer.checkpoint.reader import Checkpoint
from syncer.checkpoint.resume import check_resumable
from syncer.checkpoint.writer import write_checkpoint
from tests.sim.clock import MS, World

PATH = "/simulated/checkpoint"
FAILING = ("create", "write", "sync", "close", "link", "rename", "sync_directory")


class Inode:
    """Contents as processes see them, and as they are on the disk."""

    def __init__(self):
        self.cached = bytearray()
        self.synced = b""
        self.step: int | None = None


class Save:
    """What a writer asked for, call by call, and how it will end."""

    def __init__(self, calls: list[tuple], done: Callable[[str | None], Any], error: str | None,
                 pause_ns: float):
        self.calls = deque(calls)
        self.done = done
        self.error = error
        self.pause_ns = pause_ns
        self.files: dict[int, Inode] = {}


class Recorder(Files):
    """The file system that a writer sees: notes its calls, and fails the one it was told to."""

    def __init__(self, disk: Disk, fault: str | None):
        self.disk = disk
        self.fault = fault
        self.calls: list[tuple] = []
        self.created = 0

    def note(self, call: str, *given: Any) -> None:
        if self.fault == call:
            self.fault = None
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.calls.append((call, *given))

    def create(self, path: str, *, direct: bool = False) -> int:
        self.note("create", path)
        self.created += 1
        return self.created

    def write(self, descriptor, buffers, offset) -> int:
        """Now and then fewer bytes than asked for."""
        data = b"".join(bytes(buffer) for buffer in buffers)
        if len(data) > 1 and self.disk.world.chance(0.2):
            data = data[:self.disk.world.rng.randrange(1, len(data))]
        self.note("write", descriptor, data, offset)
        return len(data)

    def sync(self, descriptor) -> None:
        self.note("sync", descriptor)

    def close(self, descriptor) -> None:
        self.note("close", descriptor)

    def link(self, path: str, name: str) -> None:
        if path not in self.disk.names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        self.note("link", path, name)

    def rename(self, path: str, name: str) -> None:
        self.note("rename", path, name)

    def unlink(self, path: str) -> None:
        self.note("unlink", path)

    def sync_directory(self, path: str) -> None:
        self.note("sync_directory", path)

    def free_bytes(self, path: str) -> int:
        if self.fault == "full":
            self.fault = None
            return 10
        return 1 << 40


class Disk:
    """One file system, over the deaths of its servers. `faults`: kinds a save may suffer."""

    def __init__(self, world: World, slow_ms: float, form: str):
        self.world = world
        self.slow_ms = slow_ms
        self.form = form
        self.names: dict[str, Inode] = {}
        self.durable_names: dict[str, Inode] = {}
        self.writing: Save | None = None
        self.fault_chance = 0.0

    # ---- saves -----------------------------------------------------------------------------------

    def save(self, cut: Cut, done: Callable[[str | None], Any], *, let_go: bool,
             mark: bool) -> None:
        """Write a cut; `done(error)` when the last call has ended."""
        assert self.writing is None, "13: two writers of one checkpoint"
        fault, error = None, None
        if self.world.chance(self.fault_chance):
            fault = self.world.rng.choice((*FAILING, "full"))
        recorder = Recorder(self, fault)
        try:
            write_checkpoint(PATH, cut, self.form, files=recorder, let_go=let_go)
            if mark:
                write_marker(PATH, cut.facts.step, recorder)
        except WriteError as problem:
            error = str(problem)
        self.writing = Save(recorder.calls, done, error,
                            self.world.between(0.01, self.slow_ms) * MS)
        self.world.after(self.writing.pause_ns, self.next_call, self.writing)

    def next_call(self, save: Save) -> None:
        if self.writing is not save:
            return                                # its process has died
        if not save.calls:
            self.writing = None
            save.done(save.error)
            return
        call, *given = save.calls.popleft()
        self.apply(call, given, save.files)
        self.world.after(save.pause_ns * self.world.between(0.3, 3), self.next_call, save)

    def apply(self, call: str, given: list, files: dict) -> None:
        if call == "create":
            self.names[given[0]] = files[len(files) + 1] = Inode()
        elif call == "write":
            descriptor, data, offset = given
            files[descriptor].cached[offset:offset + len(data)] = data
        elif call == "sync":
            files[given[0]].synced = bytes(files[given[0]].cached)
        elif call == "link":
            self.names[given[1]] = self.names[given[0]]
        elif call == "rename":
            self.names[given[1]] = self.names.pop(given[0])
        elif call == "unlink":
            self.names.pop(given[0], None)
        elif call == "sync_directory":
            self.durable_names = dict(self.names)

    # ---- death and return ------------------------------------------------------------------------

    def process_dies(self) -> None:
        """What was handed to the kernel stays; nothing further is."""
        self.writing = None

    def power_fails(self) -> None:
        """Every name is the old or the new one, and unsynced contents are anything of theirs."""
        self.writing = None
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
        self.names = left
        self.durable_names = dict(left)

    def unmark(self) -> None:
        """A server begins that will do more steps."""
        self.names.pop(marker_path(PATH), None)
        self.durable_names.pop(marker_path(PATH), None)

    def marked_step(self) -> int | None:
        inode = self.names.get(marker_path(PATH))
        return None if inode is None else int(inode.cached.decode().split("global_step=")[1])

    def durable_step(self) -> int:
        """Step of the cut that a power failure at this moment would leave for certain; -1: none."""
        inode = self.durable_names.get(PATH)
        if inode is None or self.names.get(PATH) is not inode or inode.synced != inode.cached:
            return -1
        if inode.step is None:
            with self.opened(inode) as checkpoint:
                inode.step = checkpoint.facts.step
        return inode.step

    def opened(self, inode: Inode) -> Checkpoint:
        with tempfile.NamedTemporaryFile() as file:
            file.write(inode.cached)
            file.flush()
            return Checkpoint(file.name)

    def load(self, optimizer: dict, total_steps: int) -> dict | None:
        """What a server resumes from, through the real reader and its checks; None: no file."""
        inode = self.names.get(PATH)
        if inode is None:
            return None
        with self.opened(inode) as checkpoint:
            facts = checkpoint.facts
            check_resumable(facts, PATH, optimizer=optimizer, state=("momentum",),
                            total_steps=total_steps)
            self.durable_names = dict(self.names)
            cut = [tuple(entry) for entry in checkpoint.load(threads=1)]
        return {"step": facts.step, "fragments": len(facts.numels),
                "fingerprint": facts.fingerprint, "cut": cut,
                "ledger": {learner: list(entry) for learner, entry in facts.ledger.items()}}
