"""What goes out to learners: broadcasts, pulls, catch-ups, the final cut and the end.

It must not decide who gets what; it makes each version's bytes once, for everybody, and leaves
their order to each group's outbox, and to `catchups` whose turn it is to be caught up. What one
event leads to is queued first, and sent by `flush`: a broadcast and a pull are one call then.

Where there is no memory for the bytes of a broadcast, that broadcast waits, and whatever is to go
out after it waits behind it: a pull must not come before the version that it is about. Its wait has
the limit and the words of every other one (rule 7.9).
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import ref

from syncer.core import actions, events
from syncer.merge import FragmentStore
from syncer.merge.buffers import BufferPool
from syncer.protocol import Msg, NoticeCode, bulk_dtype, tensor_bytes
from syncer.server.catchups import CatchUps
from syncer.server.downlink import Downlink
from syncer.server.group import Group, broadcast_to, pull_from, pump_each, those_there
from syncer.server.log import Log
from syncer.server.loop import Loop, Timer
from syncer.server.shortage import Lack
from syncer.server.wire_version import Image, Source, WireVersion
from syncer.wire.encode import encode_manifest, encode_pull, encode_shutdown
from syncer.wire.extended import Fate, encode_fate
from syncer.wire.hello import Hello
from syncer.wire.messages import Manifest, Pull

LACKING_NS = 100 * 10**6
"""How soon memory is asked for again."""
VERSIONS_LEAST = 64
"""From so many on it is looked which versions nobody holds."""


class Outgoing:
    """Sends the fragments of `store` in the session's dtype to `groups` by member.

    lack: tells of a broadcast for which there is no memory; it is waited for as long as `limit_s`.
    downlink: what learners are sent of each version, if that is not its parameters.

    Large: an action that goes out is a method each.
    """

    def __init__(self, hello: Hello, store: FragmentStore, *,
                 groups: dict[actions.Member, Group], loop: Loop, log: Log,
                 handle: Callable[[events.Event], None],
                 lack: Lack, limit_s: int, catchups_max: int | None = None,
                 write_timeout_ns: int = 180 * 10**9,
                 notice: Callable[[Group, NoticeCode, str], None] = lambda *said: None,
                 downlink: Downlink | None = None):
        self.downlink = downlink
        self.dtype, self.fragments = hello.dtype, len(hello.layout.fragments)
        self.store, self.loop, self.log, self.handle = store, loop, log, handle
        self.groups, self.lack, self.limit_s = groups, lack, limit_s
        self.pool = BufferPool()
        self.versions: dict[tuple[int, int, int, int], ref[WireVersion]] = {}
        """Those that somebody holds, and at most as many again that nobody does any more."""
        self.versions_max = VERSIONS_LEAST
        self.begun_ns: dict[int, int] = {}
        """Of steps whose broadcast is to come: when their commit began."""
        self.behind: deque[tuple[Callable[[Any], None], Any]] = deque()
        """A broadcast that waits for memory, and what goes out after it."""
        self.due: dict[Group, None] = {}
        """Groups for which something was queued, and"""
        self.synced: list[tuple[int, int]] = []
        """(step, ns of its commit) of broadcasts that were: `flush` sends them."""
        self.lacking: Timer | None = None
        dtype = bulk_dtype(hello.dtype)
        self.sizes = [tensor_bytes(fragment.numel, dtype) for fragment in hello.layout.fragments]
        self.catchups = CatchUps(
            loop, log, versions=self._versions,
            images=lambda group: self._all(Msg.BCAST_FRAGMENT, group), limit=catchups_max,
            write_timeout_ns=write_timeout_ns, notice=notice,
            stalled=lambda group, is_still: handle(
                events.Stalled(group.learner, group.generation, is_still)))

    def owners(self) -> dict[type, Callable[[Any], None]]:
        """Who carries out the actions that send something, each behind those before it."""
        def in_order(carry_out: Callable[[Any], None]) -> Callable[[Any], None]:
            def carry_out_in_order(action: Any) -> None:
                if self.behind:
                    self.behind.append((carry_out, action))
                else:
                    carry_out(action)

            return carry_out_in_order

        return {actions.CatchUp: in_order(self.catch_up), actions.Pull: in_order(self.pull),
                actions.TellFate: in_order(self.fate), actions.Broadcast: in_order(self.broadcast),
                actions.SendFinal: in_order(self.final_cut),
                actions.SendShutdown: in_order(self.shutdown)}

    def merging(self, fragment: int) -> None:
        """A round of this fragment has closed: its broadcast comes soon."""
        self.catchups.merging(self.sizes[fragment])

    def commit_begins(self, step: int) -> None:
        """A step is about to be durable or seen: its `Synced` counts the time from here."""
        self.begun_ns.setdefault(step, self.loop.now_ns())

    def catch_up(self, action: actions.CatchUp) -> None:
        group = self._group((action.learner, action.generation), "catch-up")
        if group is not None:
            self.catchups.ask(group)

    def pull(self, action: actions.Pull) -> None:
        frame = encode_pull(Pull(action.fragment, action.step, action.attempt))
        groups = self._groups(action.members, "pull")
        pull_from(groups, action.fragment, frame)
        for group in groups if self.catchups.line else ():
            self.catchups.pulled(group)
        self.due.update(dict.fromkeys(groups))

    def fate(self, action: actions.TellFate) -> None:
        frame = encode_fate(Fate(*action[2:]))
        for group in self._groups((action[:2],), "fate of a push"):
            group.outbox.frame(frame)
            self.due[group] = None

    def broadcast(self, action: actions.Broadcast) -> None:
        try:
            version = self._version(Msg.BCAST_FRAGMENT, action.fragment)
        except MemoryError as error:
            self._wait_for_memory(action, error)
            return
        groups = self._groups(action.members, "broadcast")
        if self.catchups.line:
            groups = [group for group in groups if not self.catchups.waits(group)]
        broadcast_to(groups, version)
        self.catchups.broadcast(self.sizes[action.fragment], groups,
                                lambda group: group.outbox.bytes_of(version))
        self.due.update(dict.fromkeys(groups))
        begun_ns = self.begun_ns.pop(action.version, None)
        if begun_ns is not None:
            self.synced.append((action.version, begun_ns))

    def flush(self) -> None:
        """Everything that an event led to is queued: send it, in as few calls as can be."""
        if self.due:
            due, self.due = self.due, {}
            pump_each(due)
        if self.synced:
            synced, self.synced = self.synced, []
            for step, begun_ns in synced:
                self.handle(events.Synced(step, self.loop.now_ns() - begun_ns))

    def _wait_for_memory(self, action: actions.Broadcast, error: MemoryError) -> None:
        """Nothing goes out before this does, or has waited long enough."""
        now_ns, what = self.loop.now_ns(), (
            f"the broadcast of fragment {action.fragment}, version {action.version}")
        self.lack.tell(now_ns, what, error)
        if self.lack.lasts_s(now_ns) >= self.limit_s:
            self.behind.clear()
            self.handle(events.Broken(f"for {self.limit_s} s there was no memory for {what}: "
                                      f"{error}; give the server more, and resume"))
            return
        self.behind.appendleft((self.broadcast, action))
        self.lacking = self.loop.call_at(now_ns + LACKING_NS, self._go_on)

    def _go_on(self) -> None:
        """Send what has waited, as far as there is memory."""
        self.lacking = None
        while self.behind and self.lacking is None:
            carry_out, action = self.behind.popleft()
            carry_out(action)
        self.flush()
        if self.lacking is None:
            self.lack.end(self.loop.now_ns())

    def close(self) -> None:
        """The run ends: what is queued may go, and what waits for memory is not waited for."""
        if self.lacking is not None:
            self.lacking.cancel()
        self.behind.clear()
        self.catchups.close()

    def final_cut(self, action: actions.SendFinal) -> None:
        group = self._group((action.learner, action.generation), "final cut")
        cut = self.final_images(group)
        if group is not None and cut:
            manifest = Manifest(action.step, tuple(version.version for version in cut))
            group.outbox.final_cut(cut, encode_manifest(manifest))
            self.catchups.leave(group)
            group.pump()

    def final_images(self, group: Group | None) -> list[Image]:
        """The final cut for a group; nothing if there is none, or no memory, which ends it."""
        return self._all(Msg.FINAL_FRAGMENT, group)

    def shutdown(self, action: actions.SendShutdown) -> None:
        for group in self._groups(action.members, "shutdown"):
            group.outbox.frame(encode_shutdown())
            group.pump()

    def _group(self, member: actions.Member, what: str) -> Group | None:
        return next(iter(self._groups((member,), what)), None)

    def _groups(self, members: tuple[actions.Member, ...], what: str) -> list[Group]:
        found, missing = those_there(self.groups, members)
        for learner, generation in missing:
            self.log.warning(f"{what} to a closed connection", learner=learner,
                             generation=generation)
        return found

    def _versions(self) -> list[int]:
        return [self.store.current(fragment).version for fragment in range(self.fragments)]

    def _all(self, kind: Msg, group: Group | None) -> list[Image]:
        """Every fragment for a group; nothing if there is none, or no memory, which ends it."""
        if group is None:
            return []
        try:
            return [self._version(kind, fragment) for fragment in range(self.fragments)]
        except MemoryError:
            self.loop.refused(group.control.peer, os.strerror(errno.ENOMEM))
            group.end("no memory for what it is to be sent")
            return []

    def _version(self, kind: Msg, fragment: int) -> Image:
        source = self.store.current(fragment)
        if self.downlink is not None and kind == Msg.BCAST_FRAGMENT:
            anchor = self.downlink.anchor_of(source)
            if anchor is not None:
                return anchor
        return self.wire(kind, source, self.dtype)

    def wire(self, kind: Msg, source: Source, dtype: int) -> WireVersion:
        """A version on the wire: one for everybody who needs it in this form at the time. Raises
        MemoryError."""
        key = int(kind), source.fragment, source.version, bulk_dtype(dtype)
        known = self.versions.get(key)
        version = None if known is None else known()
        if version is None:
            version = WireVersion(kind, source, dtype, self.pool)
            if len(self.versions) >= self.versions_max:
                self.versions = {k: held for k, held in self.versions.items() if held() is not None}
                self.versions_max = max(VERSIONS_LEAST, 2 * len(self.versions))
            self.versions[key] = ref(version)
        return version
