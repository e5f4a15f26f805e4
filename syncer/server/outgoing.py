"""What goes out to learners: broadcasts, pulls, catch-ups, the final cut and the end.

It must not decide who gets what; it makes each version's bytes once, for everybody, and leaves
their order to each group's outbox, and to `catchups` whose turn it is to be caught up.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from weakref import WeakValueDictionary

from syncer.core import actions, events
from syncer.merge import FragmentStore
from syncer.merge.buffers import BufferPool
from syncer.protocol import Msg, bulk_dtype, tensor_bytes
from syncer.server.catchups import CatchUps
from syncer.server.group import Group
from syncer.server.log import Log
from syncer.server.loop import Loop
from syncer.server.wire_version import WireVersion
from syncer.wire.encode import encode_manifest, encode_pull, encode_shutdown
from syncer.wire.hello import Hello
from syncer.wire.messages import Manifest, Pull


class Outgoing:
    """Sends the fragments of `store` in the session's dtype to the groups that `find` knows."""

    def __init__(self, hello: Hello, store: FragmentStore, *,
                 find: Callable[[int, int], Group | None], loop: Loop, log: Log,
                 handle: Callable[[events.Event], None], catchups_max: int | None = None,
                 write_timeout_ns: int = 180 * 10**9):
        self.dtype, self.fragments = hello.dtype, len(hello.layout.fragments)
        self.store, self.find, self.loop, self.log, self.handle = store, find, loop, log, handle
        self.pool = BufferPool()
        self.versions: WeakValueDictionary[tuple[int, int, int], WireVersion] = (
            WeakValueDictionary())
        self.commit_ns: int | None = None
        dtype = bulk_dtype(hello.dtype)
        self.sizes = [tensor_bytes(fragment.numel, dtype) for fragment in hello.layout.fragments]
        self.catchups = CatchUps(
            loop, log, versions=self._versions,
            images=lambda group: self._all(Msg.BCAST_FRAGMENT, group), limit=catchups_max,
            write_timeout_ns=write_timeout_ns)

    def merging(self, fragment: int) -> None:
        """A round of this fragment has closed: its broadcast comes soon."""
        self.catchups.merging(self.sizes[fragment])

    def commit_begins(self) -> None:
        """A step is about to be durable or seen: its `Synced` counts the time from here."""
        if self.commit_ns is None:
            self.commit_ns = self.loop.now_ns()

    def catch_up(self, action: actions.CatchUp) -> None:
        group = self._group((action.learner, action.generation), "catch-up")
        if group is not None:
            self.catchups.ask(group)

    def pull(self, action: actions.Pull) -> None:
        frame = encode_pull(Pull(action.fragment, action.step, action.attempt))
        for member in action.members:
            group = self._group(member, "pull")
            if group is not None:
                group.outbox.pull(action.fragment, frame)
                self.catchups.pulled(group)
                group.pump()

    def broadcast(self, action: actions.Broadcast) -> None:
        version = self._version(Msg.BCAST_FRAGMENT, action.fragment)
        groups = [group for member in action.members
                  if (group := self._group(member, "broadcast")) is not None
                  and not self.catchups.waits(group)]
        for group in groups:
            group.outbox.broadcast(version)
        self.catchups.broadcast(self.sizes[action.fragment], groups)
        for group in groups:
            group.pump()
        if self.commit_ns is not None:
            elapsed_ns, self.commit_ns = self.loop.now_ns() - self.commit_ns, None
            self.handle(events.Synced(action.version, elapsed_ns))

    def final_cut(self, action: actions.SendFinal) -> None:
        group = self._group((action.learner, action.generation), "final cut")
        cut = self._all(Msg.FINAL_FRAGMENT, group)
        if group is not None and cut:
            manifest = Manifest(action.step, tuple(version.version for version in cut))
            group.outbox.final_cut(cut, encode_manifest(manifest))
            self.catchups.leave(group)
            group.pump()

    def shutdown(self, action: actions.SendShutdown) -> None:
        for member in action.members:
            group = self._group(member, "shutdown")
            if group is not None:
                group.outbox.frame(encode_shutdown())
                group.pump()

    def _group(self, member: actions.Member, what: str) -> Group | None:
        group = self.find(*member)
        if group is None:
            self.log.warning(f"{what} to a closed connection", learner=member[0],
                             generation=member[1])
        return group

    def _versions(self) -> list[int]:
        return [self.store.current(fragment).version for fragment in range(self.fragments)]

    def _all(self, kind: Msg, group: Group | None) -> list[WireVersion]:
        """Every fragment for a group; nothing if there is none, or no memory, which ends it."""
        if group is None:
            return []
        try:
            return [self._version(kind, fragment) for fragment in range(self.fragments)]
        except MemoryError:
            self.loop.refused(group.control.peer, os.strerror(errno.ENOMEM))
            group.end("no memory for what it is to be sent")
            return []

    def _version(self, kind: Msg, fragment: int) -> WireVersion:
        """The current version on the wire: one for everybody who needs it at the time."""
        source = self.store.current(fragment)
        key = int(kind), fragment, source.version
        version = self.versions.get(key)
        if version is None:
            version = self.versions[key] = WireVersion(kind, source, self.dtype, self.pool)
        return version
