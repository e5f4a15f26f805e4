"""What the first HELLO makes: the fragments, the memory for payloads, and who is connected.

It must not decide who is admitted or what is sent; it has the parts that do it, and tells the
scheduler what they report. Of one learner it keeps a few connections only (rule 14.10). To a strict
run's learner that may answer a pull before the broadcast in front of it has come, both go over one
socket (rule 17.6).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from syncer import pages
from syncer.checkpoint.saver import Outcome
from syncer.config import Config
from syncer.core import actions, events
from syncer.core.actions import SaveKind
from syncer.merge.buffers import BufferPool
from syncer.protocol import DTYPE_BF16, NoticeCode, bulk_dtype
from syncer.server.addresses import host_of
from syncer.server.decoded import Decoded
from syncer.server.door import Door
from syncer.server.downlink import Downlink
from syncer.server.farewell import Farewells
from syncer.server.group import Group
from syncer.server.ingest import Ingest, Intake
from syncer.server.introducing import take_records, welcome
from syncer.server.log import Log
from syncer.server.loop import Loop, Timer
from syncer.server.memory import (
    formula_of,
    in_mib,
    kept_max,
    memory_parts,
    readers_max,
    slow_learners_max,
)
from syncer.server.merging import Merging, check_as_bf16
from syncer.server.outgoing import Outgoing
from syncer.server.persistence import Persistence
from syncer.server.promised import Promised
from syncer.server.reporting import ReportBook
from syncer.server.shortage import Lack, Shortage
from syncer.server.tape import Recorder
from syncer.server.telling import PacedNotices
from syncer.server.workers import Workers
from syncer.wire.hello import Hello
from syncer.wire.identity import Identity

CONNECTIONS_MAX = 4
"""Of one learner: its newest one, and those before it that are about to die."""
TWO_ALIVE_NS = 10 * 10**9
"""An older connection that is heard so long after the newest was made is another process's."""
SILENCE_S = 10.0
"""A connection that fails after nothing came for so long was silent, not merely lost: learners of
this library are heard every second or two, unless one step takes longer."""
HUNG_UP = "closed by the peer"


class Parts(NamedTuple):
    """What a server has before it knows any layout."""

    config: Config
    loop: Loop
    workers: Workers
    log: Log
    recorder: Recorder
    persistence: Persistence
    door: Door
    farewells: Farewells
    notices: PacedNotices
    handle: Callable[[events.Event], None]
    """Takes events for the scheduler."""


class RunSession:
    """A run whose layout is known. Raises `ConfigError` for one that it cannot merge.

    Large: its parts, and the actions and reports of groups that need more than one of them.
    """

    def __init__(self, hello: Hello, identity: Identity, parts: Parts):
        config, loop, handle = parts.config, parts.loop, parts.handle
        self.hello, self.identity, self.parts = hello, identity, parts
        self.groups: dict[actions.Member, Group] = {}
        self.promised: dict[Group, Promised] = {}
        self.looks: dict[Group, Timer] = {}
        """By a learner's newest connection: when its older one is looked at again."""
        bf16 = bulk_dtype(hello.dtype) == DTYPE_BF16
        self.pool = BufferPool()
        self.workers = Shortage(
            parts.workers, loop, limit_ns=config.quorum_timeout_s * 10**9,
            lack=Lack(parts.log, pages.free_kept))
        self.downlink = None if config.downlink == "whole" else Downlink(
            bulk_dtype(hello.dtype), config.merge_threads)
        self.merging = Merging(config, hello.layout, self.workers, loop, handle, bf16=bf16,
                               downlink=self.downlink)
        if bf16:
            check_as_bf16(parts.persistence.loaded)
        self.merging.resume(parts.persistence.take_loaded(), parts.persistence.lineage.renumbered)
        self.notices, self.reports = parts.notices, ReportBook(loop)
        self.ingest = Ingest(self.workers, self.pool, handle=handle,
                             left=self._left, say_farewell=parts.farewells.say,
                             report=self.reports.take, keep_wire=config.late_carry)
        self.outgoing = Outgoing(hello, self.merging.store, groups=self.groups, loop=loop,
                                 log=parts.log, handle=handle,
                                 lack=Lack(parts.log, pages.free_kept),
                                 limit_s=config.quorum_timeout_s,
                                 catchups_max=config.max_concurrent_catchups,
                                 write_timeout_ns=config.write_timeout_s * 10**9,
                                 notice=self.notices.say, downlink=self.downlink)
        self._say_memory()

    def _say_memory(self) -> None:
        """How much the run takes at most; as much of it as comes and goes stays in the process."""
        config, layout, dtype = self.parts.config, self.hello.layout, self.hello.dtype
        parts = memory_parts(config, layout, dtype)
        pages.keep_at_most(kept_max(parts))
        formula = formula_of(config, layout, parts)
        self.parts.log.info(
            "memory of this run at most",
            **in_mib(parts, slow_learners_max(config, layout, dtype), readers_max(config, layout)),
            formula=formula.text, P=formula.parameters, G=formula.in_flight)

    def owners(self) -> dict[type, Callable[[Any], object]]:
        """Who carries out the actions that need a session."""
        merging, outgoing = self.merging, self.outgoing

        def start_merge(action: actions.StartMerge) -> None:
            outgoing.merging(action.fragment)
            merging.start(action)

        return {
            actions.Admit: self._admit, actions.Close: self._close,
            actions.Release: lambda action: Decoded.release(action.payload),
            actions.Park: lambda action: Decoded.park(action.payload),
            actions.Unpark: lambda action: None,  # whoever needs its values first decodes them
            actions.AdoptInit: self._adopt_init,
            actions.OpenFold: merging.open_fold, actions.Fold: merging.fold,
            actions.StartMerge: start_merge, actions.Publish: self._publish,
            actions.Save: self._save, actions.Hasten: self.parts.persistence.hasten,
            actions.Record: self._record, actions.Notice: self._notice,
            **outgoing.owners(),
        }

    def find(self, learner: int, generation: int) -> Group | None:
        """The admitted group, unless it has ended."""
        group = self.groups.get((learner, generation))
        return None if group is None or group.ended else group

    def _admit(self, action: actions.Admit) -> None:
        channel, hello = self.parts.door.arrived(action.connection)
        try:
            group = Group(channel, hello, self.ingest, in_order=self._in_order(hello))
        except MemoryError:
            self.parts.loop.refused(channel.peer, os.strerror(errno.ENOMEM))
            channel.close()
            self.parts.handle(events.Disconnected(action.learner, action.generation))
            return
        self.parts.door.capacity.promise(group.sockets)
        group.work = Intake()
        older = [other for other in self.open_groups if other.learner == group.learner]
        self.groups[action.learner, action.generation] = group
        if group.extended:
            self._introduce(group, action)
        self.parts.door.open_reader(channel, group)
        channel.resume()
        self.parts.door.group_ready(group)
        if not group.ended:
            self.promised[group] = Promised(group, self.parts.log)
        if older:
            self._meet(group, older)
        group.pump()

    def _introduce(self, group: Group, action: actions.Admit) -> None:
        """It hears who it has come to, and what it has said of itself is taken."""
        persistence = self.parts.persistence
        client = take_records(group.hello, persistence)
        self.parts.log.info("learner has introduced itself", learner=group.learner,
                            generation=group.generation, client=client,
                            kept=len(action.kept), peer=group.control.peer)
        welcome(group, action, self.parts.config, persistence.lineage)

    # rule 17.6
    def _in_order(self, hello: Hello) -> bool:
        """A strict run cannot forgive an answer on an old anchor, which a pull leads to that is
        faster than the broadcast in front of it; whoever waits for that has introduced himself."""
        return self.parts.config.fixed_roster and hello.extension is None

    # rule 14.10
    def _meet(self, group: Group, older: list[Group]) -> None:
        """A learner has connected again: how many it has is limited, and two processes that call
        themselves by one id are told of, since all but one of them train for nothing."""
        if len(older) >= CONNECTIONS_MAX:
            older.pop(0).end(f"its learner has {CONNECTIONS_MAX} newer connections")
        if not older:
            return
        last = older[-1]
        if host_of(last.control.peer) != host_of(group.control.peer):
            self._warn_of_two(group, last)
            return
        # On one machine it may be the same process, whose old connection is as good as gone.
        loop = self.parts.loop
        now_ns = loop.now_ns()

        def look() -> None:
            del self.looks[group]
            if not (last.ended or group.ended) and last.heard_ns > now_ns:
                self._warn_of_two(group, last)

        self.looks[group] = loop.call_at(now_ns + TWO_ALIVE_NS, look)

    def _warn_of_two(self, group: Group, last: Group) -> None:
        for there in (group, last):
            self.notices.say(there, NoticeCode.CLAIMED_TWICE, (
                f"learner {group.learner} is claimed from two addresses, {last.control.peer} and "
                f"{group.control.peer}: only the newest connection of an id counts, so give each "
                "learner an id of its own, and each run a name"))
        self.parts.log.warning(
            "learner connected again while its older connection is alive", learner=group.learner,
            peer=group.control.peer, older_peer=last.control.peer)

    def make_room(self, learner: int) -> None:
        """End the oldest connection of this learner, if it has one."""
        for group in self.open_groups:
            if group.learner == learner:
                group.end("its learner has dialed again, and there is no room for both")
                return

    def _close(self, action: actions.Close) -> None:
        group = self.find(action.learner, action.generation)
        if group is not None:
            group.end(action.reason, action.reason if action.told else None)

    def _left(self, group: Group, reason: str, refusal: str | None) -> None:
        """Everything that came from a group which has ended is handed on."""
        del self.groups[group.learner, group.generation]
        self.outgoing.catchups.leave(group)
        self.notices.leave(group)
        self.reports.leave(group)
        self.parts.door.capacity.promise(-group.sockets)
        promised = self.promised.pop(group, None)
        if promised is not None:
            promised.cancel()
        look = self.looks.pop(group, None)
        if look is not None:
            look.cancel()
        silent_s = (self.parts.loop.now_ns() - group.heard_ns) / 1e9
        if refusal is None and silent_s >= SILENCE_S and reason != HUNG_UP:
            self.parts.log.warning(
                "a learner has fallen silent: its connection is given up",
                learner=group.learner, generation=group.generation, peer=group.control.peer,
                silent_s=round(silent_s, 1), reason=reason,
                next="its open slots wait for it to dial again, at most until their round's "
                     "quorum timeout; rounds go on with the others while they are enough")
        self.parts.log.write("INFO" if refusal is None else "WARNING", "connection ended", {
            "learner": group.learner, "generation": group.generation,
            "peer": group.control.peer, "reason": reason})
        self.say_link(group)
        self.parts.handle(events.Disconnected(group.learner, group.generation))

    def say_link(self, group: Group) -> None:
        """Which way a connection took, and what the kernel has seen it carry to the learner."""
        self.parts.log.info("the way to a learner", learner=group.learner,
                            generation=group.generation, peer=group.control.peer,
                            local=group.link.local, sent=group.sent,
                            mb_per_s=group.link.mb_per_s)

    def _adopt_init(self, action: actions.AdoptInit) -> None:
        digest = self.merging.adopt_init(action)
        self.parts.log.debug("fragment initialized", fragment=action.fragment,
                       elements=action.payload.numel, sha256=digest)

    def _publish(self, action: actions.Publish) -> None:
        self.outgoing.commit_begins(action.step)
        self.merging.publish(action.step)

    def _save(self, action: actions.Save) -> None:
        if action.kind is SaveKind.ROUND and action.step > 0:
            self.outgoing.commit_begins(action.step)
        self.parts.persistence.save(
            action, self.merging.cut(action), self.hello,
            lambda outcome: self.parts.loop.post(self._saved, outcome))

    def _saved(self, outcome: Outcome) -> None:
        self.parts.handle(events.Saved(SaveKind(outcome.kind), outcome.step, outcome.problem))

    def _record(self, action: actions.Record) -> None:
        fields = self.merging.with_figures(action.fields)
        if "fragment" in fields and (reports := self.reports.since_last()):
            fields = fields | {"reports": reports}
        self.parts.recorder.write(fields)

    def _notice(self, action: actions.Notice) -> None:
        for member in action.members:
            group = self.find(*member)
            if group is not None:
                self.notices.say(group, action.code, action.text)

    @property
    def open_groups(self) -> list[Group]:
        """Those that have not ended."""
        return [group for group in self.groups.values() if not group.ended]

    def close(self) -> None:
        """Let go of results that will never be published, of what has come in part, and of what
        would be looked at later."""
        for look in self.looks.values():
            look.cancel()
        for promised in self.promised.values():
            promised.cancel()
        self.workers.close()
        for group in self.groups.values():
            self.ingest.forget(group)
        self.merging.close()
