"""Carries out what the scheduler decides, and tells it what happened. Must decide nothing itself.

Everything here runs on the loop's thread; long work goes to the workers and comes back as an event.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from syncer.checkpoint.final_state import write_final_state
from syncer.checkpoint.saver import Outcome
from syncer.config import Config
from syncer.core import actions, events, invariants
from syncer.core.run.phases import Phase
from syncer.core.run.record import failure_record
from syncer.core.run.scheduler import Scheduler
from syncer.errors import CheckpointError, ConfigError
from syncer.exits import Exit
from syncer.merge import FragmentStore
from syncer.merge.buffers import BufferPool
from syncer.protocol import Msg
from syncer.server.conn import Channel, Group
from syncer.server.door import Door
from syncer.server.ingest import Decoded, Ingest, Intake
from syncer.server.log import Log
from syncer.server.loop import Loop
from syncer.server.merging import Merging
from syncer.server.persistence import Persistence
from syncer.server.tape import Tape, TapeError
from syncer.server.wire_version import WireVersion
from syncer.server.workers import Job, Workers
from syncer.wire.encode import encode_error, encode_manifest, encode_pull, encode_shutdown
from syncer.wire.hello import Hello
from syncer.wire.identity import Identity, Pins, identity_refusal, mismatch
from syncer.wire.messages import Manifest, Pull


class Ending(NamedTuple):
    """How the run ends: exit status, and the sentence that says why."""

    status: int
    text: str


class Driver:
    """One run: the scheduler, the session, the groups and the fragments.

    `ending` is set once the scheduler has said `Exit`; from then on events are ignored.
    """

    def __init__(self, config: Config, loop: Loop, workers: Workers, log: Log, *,
                 tape: Tape | None, persistence: Persistence):
        self.config, self.loop, self.workers, self.log, self.tape = config, loop, workers, log, tape
        self.persistence = persistence
        self.scheduler = Scheduler(config, persistence.resumed)
        self.check = os.environ.get("SYNCER_CHECK", "") not in ("", "0")
        self.door: Door | None = None
        self.ingest: Ingest | None = None
        self.pool = BufferPool()
        self.image_pool = BufferPool()
        self.session: Hello | None = None
        self.identity: Identity | None = None
        self.pins = Pins(config.profile_hash, config.require_profile_binding,
                         config.expected_island_contract)
        self.store: FragmentStore | None = None
        self.groups: dict[tuple[int, int], Group] = {}
        self.arrivals: dict[int, tuple[Channel, Hello]] = {}
        self.arrival = 0
        self.merging: Merging | None = None
        self.images: WeakValueDictionary[tuple[int, int, int], WireVersion] = WeakValueDictionary()
        self.digests: dict[int, str] = {}
        self.publish_ns: int | None = None
        self.commits = 0
        self.ending: Ending | None = None
        self.waiting: deque[Any] = deque()
        self.stepping = False
        self.carry_out: dict[type, Callable[[Any], None]] = {
            actions.Admit: self._admit, actions.Refuse: self._refuse, actions.Close: self._close,
            actions.Release: self._release, actions.AdoptInit: self._adopt_init,
            actions.CatchUp: self._catch_up, actions.Pull: self._pull,
            actions.Park: self._park, actions.Unpark: self._unpark,
            actions.OpenFold: self._open_fold, actions.Fold: self._fold,
            actions.StartMerge: self._start_merge, actions.Publish: self._publish,
            actions.Broadcast: self._broadcast, actions.Save: self._save,
            actions.SendFinal: self._send_final, actions.SendShutdown: self._send_shutdown,
            actions.Log: self._log, actions.Record: self._record, actions.Exit: self._exit,
        }

    # --------------------------------------------------------------------------------- events
    def handle(self, event: Any) -> None:
        """Give the scheduler an event and carry out the answer; what that causes comes after it."""
        self.waiting.append(event)
        if self.stepping:
            return
        self.stepping = True
        try:
            while self.waiting:
                self._step(self.waiting.popleft())
        finally:
            self.stepping = False

    def _step(self, event: Any) -> None:
        if self.ending is not None:
            return
        for action in self.scheduler.step(self.loop.now_ns(), event):
            self.carry_out[type(action)](action)
        if type(event) is events.Push:
            event.payload.settle()
        if self.check:
            invariants.check(self.scheduler)

    def tick_if_due(self) -> None:
        """Tell the scheduler that its deadline has passed."""
        deadline_ns = self.scheduler.deadline_ns()
        if deadline_ns is not None and self.loop.now_ns() >= deadline_ns:
            self.handle(events.Tick())

    def fatal(self, error: BaseException) -> None:
        """A worker failed in a way that no peer can cause."""
        raise error

    # --------------------------------------------------------------------- who comes and goes
    def hello(self, channel: Channel, hello: Hello) -> None:
        """A HELLO that passed every check at the connection; the first one fixes the session."""
        if self.session is None:
            try:
                self._open_session(hello)
            except ConfigError as error:  # a layout that this server cannot merge
                self.door.refuse(channel, f"invalid HELLO: {error}")
                return
        self.arrival += 1
        self.arrivals[self.arrival] = channel, hello
        channel.pause()
        self.handle(events.Hello(self.arrival, hello.learner, hello.generation,
                                 len(hello.layout.fragments), hello.fingerprint))

    def identity_refusal(self, hello: Hello) -> str | None:
        """Text of the ERROR for a HELLO that does not belong to this run, else None.

        In a strict run (no stale base allowed) one that is not of the session that was resumed,
        before the start, ends the run.
        """
        resumed = self.persistence.identity
        text = None if resumed is None else mismatch(resumed, hello)
        if (text is not None and self.config.max_base_lag == 0
                and self.scheduler.phase == Phase.WAITING):
            self._record(actions.Record(failure_record("layout_hash_mismatch", text)))
            self._exit(actions.Exit(Exit.NOT_RESUMABLE, text))
        return identity_refusal(self.identity, hello, self.pins) or text

    def _open_session(self, hello: Hello) -> None:
        config = self.config
        self.merging = Merging(config, hello.layout, self.workers, self.loop, self)
        self.store = self.merging.store
        for fragment, loaded in enumerate(self.persistence.take_loaded()):
            self.store.adopt(fragment, loaded.params, version=loaded.version, state=loaded.state)
        self.session, self.identity = hello, Identity.of_hello(hello)
        depth = min(max(config.pipeline, 1), len(hello.layout.fragments))
        # Spares: a push per learner and round in flight, and two bf16 images of the next commits.
        fragment_bytes = 4 * hello.layout.largest
        self.pool.spare_bytes_max = fragment_bytes * (config.learners * depth + 1)
        self.image_pool.spare_bytes_max = fragment_bytes
        self.ingest = Ingest(self.workers, self.pool, self, config.merge_threads,
                             keep_wire=config.late_carry)

    def _admit(self, action: actions.Admit) -> None:
        channel, hello = self.arrivals.pop(action.connection)
        group = Group(channel, hello, self)
        group.work = Intake()
        self.groups[action.learner, action.generation] = group
        self.door.open_reader(channel, group)
        channel.resume()
        self.door.group_ready(group)

    def _refuse(self, action: actions.Refuse) -> None:
        channel, _ = self.arrivals.pop(action.connection)
        self.door.refuse(channel, action.text)

    def _close(self, action: actions.Close) -> None:
        group = self.find_group(action.learner, action.generation)
        if group is not None:
            group.end(action.reason)

    def find_group(self, learner: int, generation: int) -> Group | None:
        group = self.groups.get((learner, generation))
        return None if group is None or group.ended else group

    # ------------------------------------------------------------------ what the groups report
    def frame(self, group: Group, kind: int, payload: Any) -> None:
        if self.ending is None:
            self.ingest.frame(group, kind, payload)

    def caught_up(self, group: Group, delivered: tuple[int, ...]) -> None:
        self.handle(events.CaughtUp(group.learner, group.generation, delivered))

    def ended(self, group: Group, reason: str, refusal: str | None) -> None:
        if refusal is not None:
            self.door.say_farewell(group.channels, group.control, [encode_error(refusal)])
        self.ingest.ended(group, reason, refusal)

    def left(self, group: Group, reason: str, refusal: str | None) -> None:
        del self.groups[group.learner, group.generation]
        write = self.log.info if refusal is None else self.log.warning
        write("connection ended", learner=group.learner, generation=group.generation,
              peer=group.control.peer, reason=reason)
        self.handle(events.Disconnected(group.learner, group.generation))

    # -------------------------------------------------------------------------- what goes out
    def _image(self, kind: Msg, fragment: int) -> WireVersion:
        """The current version on the wire: one image for everybody who needs it at the time."""
        version = self.store.current(fragment)
        key = int(kind), fragment, version.version
        image = self.images.get(key)
        if image is None:
            image = self.images[key] = WireVersion(kind, version, self.session.dtype,
                                             self.image_pool)
        return image

    def _group(self, member: actions.Member, what: str) -> Group | None:
        group = self.find_group(*member)
        if group is None:
            self.log.warning(f"{what} to a closed connection", learner=member[0],
                             generation=member[1])
        return group

    def _catch_up(self, action: actions.CatchUp) -> None:
        group = self._group((action.learner, action.generation), "catch-up")
        if group is not None:
            group.outbox.catch_up([self._image(Msg.BCAST_FRAGMENT, fragment)
                                   for fragment in range(len(self.session.layout.fragments))])
            group.pump()

    def _pull(self, action: actions.Pull) -> None:
        frame = encode_pull(Pull(action.fragment, action.step, action.attempt))
        for member in action.members:
            group = self._group(member, "pull")
            if group is not None:
                group.outbox.pull(action.fragment, frame)
                group.pump()

    def _broadcast(self, action: actions.Broadcast) -> None:
        image = self._image(Msg.BCAST_FRAGMENT, action.fragment)
        for member in action.members:
            group = self._group(member, "broadcast")
            if group is not None:
                group.outbox.broadcast(image)
                group.pump()
        if self.publish_ns is not None:
            elapsed_ns = self.loop.now_ns() - self.publish_ns
            self.publish_ns = None
            self.handle(events.Synced(action.version, elapsed_ns))

    def _send_final(self, action: actions.SendFinal) -> None:
        group = self._group((action.learner, action.generation), "final cut")
        if group is None:
            return
        images = [self._image(Msg.FINAL_FRAGMENT, fragment)
                  for fragment in range(len(self.session.layout.fragments))]
        versions = tuple(image.version for image in images)
        group.outbox.final_cut(images, encode_manifest(Manifest(action.step, versions)))
        group.pump()

    def _send_shutdown(self, action: actions.SendShutdown) -> None:
        for member in action.members:
            group = self._group(member, "shutdown")
            if group is not None:
                group.outbox.frame(encode_shutdown())
                group.pump()

    # ------------------------------------------------------------------------------ fragments
    def _release(self, action: actions.Release) -> None:
        action.payload.release()

    def _park(self, action: actions.Park) -> None:
        action.payload.park()

    def _unpark(self, action: actions.Unpark) -> None:
        action.payload.unpark()

    def _adopt_init(self, action: actions.AdoptInit) -> None:
        decoded: Decoded = action.payload
        self.digests[action.fragment] = decoded.digest.hex()
        self.store.adopt(action.fragment, decoded.array)
        self.log.debug("fragment initialized", fragment=action.fragment,
                       elements=decoded.array.size, sha256=self.digests[action.fragment])

    def _open_fold(self, action: actions.OpenFold) -> None:
        self.merging.open_fold(action)

    def _fold(self, action: actions.Fold) -> None:
        self.merging.fold(action)

    def _start_merge(self, action: actions.StartMerge) -> None:
        self.merging.start(action)

    def _publish(self, action: actions.Publish) -> None:
        if self.publish_ns is None:
            self.publish_ns = self.loop.now_ns()
        self.merging.publish(action.step)
        self.commits += 1

    def _save(self, action: actions.Save) -> None:
        versions = [self.store.current(fragment)
                    for fragment in range(len(self.session.layout.fragments))]
        if action.kind is actions.SaveKind.FINAL_STATE:
            self._save_final_state(action, versions)
        elif self.persistence.saver is None:
            self.handle(events.Saved(action.kind, action.step))
        else:
            if action.kind is actions.SaveKind.ROUND and action.step > 0:
                self.publish_ns = self.loop.now_ns()
                prepared = self.merging.prepared[action.step]
                versions[prepared.fragment] = prepared.result
            self.persistence.save(action, versions, self.session,
                                  lambda outcome: self.loop.post(self._saved, outcome))

    def _saved(self, outcome: Outcome) -> None:
        if outcome.defect is not None:
            self.fatal(outcome.defect)
        self.handle(events.Saved(outcome.kind, outcome.step, outcome.error))

    def _save_final_state(self, action: actions.Save, versions: list[Any]) -> None:
        path = self.config.final_state

        def run() -> str | None:
            try:
                write_final_state(path, [version.params for version in versions],
                                  self.persistence.files)
            except CheckpointError as error:
                return str(error)
            return None

        def done(problem: str | None, error: BaseException | None) -> None:
            if error is not None:
                self.fatal(error)
            if problem is None:
                self.log.info("final state written", path=path, step=action.step)
            self.handle(events.Saved(action.kind, action.step, problem))

        self.workers.submit(Job(run, done))

    # -------------------------------------------------------------------------- what is told
    def _log(self, action: actions.Log) -> None:
        self.log.write(action.level, action.text, action.fields)

    def _record(self, action: actions.Record) -> None:
        if self.tape is None:
            return
        fields = action.fields
        if fields.get("event") == "init":
            fields = fields | {"sha256": [self.digests.get(f) for f in sorted(self.digests)]}
        elif "fragment" in fields and (stats := self.merging.stats.pop(fields["step"], None)):
            fields = fields | {"stats": stats}
        try:
            self.tape.write(fields)
        except TapeError as error:
            # A lost record is no reason to lose a run, but it must be seen.
            self.log.error("event tape record lost", error=str(error))

    def _exit(self, action: actions.Exit) -> None:
        if self.ending is None:
            self.ending = Ending(action.status, action.text)

    def close(self) -> None:
        """Let go of results that will never be published, and of who was being admitted."""
        for channel, _ in self.arrivals.values():
            channel.close()
        self.arrivals.clear()
        if self.merging is not None:
            self.merging.close()
