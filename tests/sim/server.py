"""The simulated server: the real scheduler and merges behind the real wire codec.

What the production driver does with sockets and threads, done with simulated ones. Decides nothing.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np

from syncer import kernels
from syncer.checkpoint.facts import Cut, optimizer_facts
from syncer.core import actions as act
from syncer.core import events as ev
from syncer.core.run.scheduler import Scheduler
from syncer.errors import NumericsError, RemoteProtocolError
from syncer.merge import FragmentStore
from syncer.protocol import DTYPE_BF16, DTYPE_F32, Msg, bulk_dtype
from syncer.wire import encode, messages
from syncer.wire.frames import FrameReader, Reassembly
from syncer.wire.hello import Hello, parse_hello
from syncer.wire.identity import Identity, mismatch
from syncer.wire.limits import Limits
from tests.sim.clock import MS, World
from tests.sim.disk import Disk
from tests.sim.marks import Marks
from tests.sim.network import Link
from tests.watch import Watch

DECODE = {1: kernels.decode_f32, 2: kernels.decode_bf16, 3: kernels.decode_q4}


class Array:
    """A payload: decoded values, given back once."""

    def __init__(self, values: np.ndarray, wire: bytes, fragment: int):
        self.values = values
        self.wire = wire
        self.fragment = fragment


class Group:
    """One connection group as the server sees it."""

    def __init__(self, link: Link):
        self.link = link
        self.readers = [FrameReader(Limits.first_frame()) for _ in range(link.streams)]
        self.early: dict[int, list[bytes]] = {}
        self.hello: Hello | None = None
        self.member: tuple[int, int] | None = None
        self.ended = False
        self.decoding: deque = deque()
        self.left = False
        self.catching_up: dict[int, tuple] | None = None
        self.catch_up_sends = False
        self.delivered: dict[int, int] = {}


class SimServer:
    """One server process. disk: of its checkpoints, None if it writes none."""

    def __init__(self, world: World, config, settings: dict, resumed: dict | None = None,
                 disk: Disk | None = None):
        self.world = world
        self.disk = disk
        self.config = config
        self.settings = settings
        self.resumed = resumed
        state = resumed and ev.Resumed(resumed["step"], resumed["fragments"],
                                       resumed["fingerprint"], resumed["ledger"])
        self.scheduler = Scheduler(config, state or None)
        self.watch = Watch(self.scheduler, resumed["step"] if resumed else -1)
        self.session: Hello | None = None
        self.store: FragmentStore | None = None
        self.groups: dict[tuple[int, int], Group] = {}
        self.arrivals: dict[int, Group] = {}
        self.links: list[Link] = []
        self.prepared: dict[int, Any] = {}
        self.folds: dict[int, Any] = {}
        self.merged: list[tuple] = []
        self.in_cut: tuple | None = None
        self.shown_step = -1
        self.cuts: dict[int, list] = {}
        self.jobs: dict[int, list] = {}
        self.to_sync: list[int] = []
        self.tape: list[dict] = []
        self.initial: dict = {}
        self.marks: set[str] = set()
        self.observer = Marks(self.scheduler, self.marks)
        self.exit: act.Exit | None = None
        self.crashed = False
        self.queue: deque = deque()
        self.stepping = False
        self.armed_ns: int | None = None

    # ---- connections -----------------------------------------------------------------------------

    def accept(self, link: Link) -> None:
        group = Group(link)
        self.links.append(link)
        for stream, pipe in enumerate(link.up):
            pipe.deliver = lambda data, g=group, s=stream: self.received(g, s, data)
        link.server_lost = lambda: self.lost(group)

    def received(self, group: Group, stream: int, data: bytes) -> None:
        if self.crashed or group.ended:
            return
        if stream > 0 and group.hello is None:  # the HELLO is still under way on another stream
            group.early.setdefault(stream, []).append(data)
            return
        try:
            for msg_type, payload in group.readers[stream].feed(data):
                self.frame(group, stream, msg_type, payload)
                if group.ended:
                    return
        except RemoteProtocolError as error:
            self.refuse(group, str(error))

    def frame(self, group: Group, stream: int, msg_type: int, payload) -> None:
        if group.hello is None:
            hello = parse_hello(payload, key=None, learners=self.config.learners)
            self.hello(group, hello)
        elif stream > 0 and msg_type == Msg.DATA_HELLO:
            messages.parse_data_hello(payload)
            group.readers[stream].limits = group.readers[0].limits
            group.readers[stream].reassembly = group.readers[0].reassembly
        else:
            self.message(group, msg_type, payload)

    def hello(self, group: Group, hello: Hello) -> None:
        if self.session is None:
            self.session = hello
            self.open_store(hello)
        elif (text := mismatch(Identity.of_hello(self.session), hello)) is not None:
            self.refuse(group, text)
            return
        group.hello = hello
        limits = Limits.for_server(hello.layout, hello.dtype)
        group.readers[0].limits = limits
        group.readers[0].reassembly = Reassembly(limits)
        self.arrivals[id(group)] = group
        self.handle(ev.Hello(id(group), hello.learner, hello.generation,
                             len(hello.layout.fragments), hello.fingerprint))
        for early_stream, pieces in sorted(group.early.items()):
            for piece in pieces:
                self.received(group, early_stream, piece)

    def open_store(self, hello: Hello) -> None:
        self.store = FragmentStore(hello.layout, lr=self.config.outer_lr,
                                   momentum=self.config.outer_momentum)
        if self.resumed:
            for fragment, (version, params, state) in enumerate(self.resumed["cut"]):
                self.store.adopt(fragment, params.copy(), version=version,
                                 state={name: array.copy() for name, array in state.items()})

    def message(self, group: Group, msg_type: int, payload) -> None:
        if group.member is None:                  # not answered: its socket is not read
            return
        hello, who = group.hello, (group.hello.learner, group.hello.generation)
        if msg_type == Msg.INIT_PARAMS:
            init = messages.parse_init(payload, hello.learner, hello.layout, hello.dtype)
            self.decode(group, bytes(init.tensor), lambda p: ev.Init(*who, init.fragment, p),
                        dtype=bulk_dtype(hello.dtype), fragment=init.fragment, negate=False)
        elif msg_type == Msg.PUSH_FRAGMENT:
            m = messages.parse_push(payload, hello.learner, hello.layout, hello.dtype)
            self.decode(group, bytes(m.delta),
                        lambda p: ev.Push(*who, m.fragment, m.step, m.attempt, m.base,
                                          m.local_step, m.c_steps, m.c_tokens, p),
                        dtype=hello.dtype, fragment=m.fragment, negate=True)
        elif msg_type == Msg.HEARTBEAT:
            beat = messages.parse_heartbeat(payload, hello.learner)
            self.handle(ev.Heartbeat(*who, beat.local_step))
        elif msg_type == Msg.FINAL_ACK:
            self.handle(ev.FinalAck(*who, messages.parse_final_ack(payload).step))
        elif msg_type == Msg.BUDGET_DONE:
            self.handle(ev.BudgetDone(*who, messages.parse_budget_done(payload).steps))
        else:
            raise RemoteProtocolError(f"unexpected message type {msg_type}")

    def decode(self, group: Group, wire: bytes, make, *, dtype: int, fragment: int,
               negate: bool) -> None:
        """On a worker; what a group sent is handed on in its order."""
        job = {"done": None}
        group.decoding.append(job)

        def run():
            values = np.empty(self.session.layout.fragments[fragment].numel, np.float32)
            bad = DECODE[dtype](wire, values, negate)
            job["done"] = (bad, make, Array(values, wire, fragment))
            self.hand_on(group)

        self.world.after(self.world.between(0.01, self.settings["work_ms"]) * MS, run)

    def hand_on(self, group: Group) -> None:
        while group.decoding and group.decoding[0]["done"] is not None:
            bad, make, array = group.decoding.popleft()["done"]
            if bad >= 0:
                self.refuse(group, f"value {bad} is not finite")
                group.decoding.clear()
            elif not self.crashed:
                self.handle(make(array))
        if group.left and not group.decoding:
            self.gone(group)

    def refuse(self, group: Group, text: str) -> None:
        """ERROR, then a graceful end of the connection."""
        if group.ended:
            return
        group.ended = True
        group.link.control("down", encode.encode_error(text))
        group.link.close_after(200 * MS)

    def lost(self, group: Group) -> None:
        group.ended = True
        group.left = True
        self.hand_on(group)

    def gone(self, group: Group) -> None:
        if group.member is not None and not self.crashed:
            if self.groups.get(group.member) is group:
                del self.groups[group.member]
            member, group.member = group.member, None
            self.handle(ev.Disconnected(*member))

    def crash(self, power: bool = False) -> None:
        """The process dies, or the whole machine: then unsynced bytes go with it."""
        self.crashed = True
        for link in self.links:
            link.cut(self.world.between(1, 500) * MS, 0)
        if self.disk is not None:
            (self.disk.power_fails if power else self.disk.process_dies)()

    def last_cut(self) -> dict | None:
        """The last committed cut out of a dead process: what a run without checkpoints goes on
        from, as if every commit had been durable."""
        if self.store is None or not all(self.scheduler.initialized):
            return self.resumed                  # nothing newer than what it was started from
        cut = [(v.version, v.params.copy(), {name: a.copy() for name, a in v.state.items()})
               for v in self.versions()]
        return {"step": self.scheduler.global_step, "fragments": self.scheduler.fragments,
                "fingerprint": self.session.fingerprint, "cut": cut,
                "ledger": {i: list(e) for i, e in self.scheduler.ledger.items()}}

    def versions(self) -> list:
        return [self.store.current(f) for f in range(len(self.session.layout.fragments))]

    # ---- the scheduler ---------------------------------------------------------------------------

    def handle(self, event) -> None:
        self.queue.append(event)
        if self.stepping:
            return
        self.stepping = True
        try:
            while self.queue:
                self.feed(self.queue.popleft())
        finally:
            self.stepping = False
        self.arm_timer()

    def feed(self, event) -> None:
        if self.exit is not None or self.crashed:
            return
        self.watch.event(event)
        self.observer.before(event)
        actions = self.scheduler.step(self.world.now_ns, event)
        self.observer.after(event, actions)
        for action in actions:
            getattr(self, f"do_{type(action).__name__.lower()}")(action)
        self.watch.actions(actions)
        self.bounds()

    def bounds(self) -> None:
        """No queue grows with the length of the run."""
        scheduler = self.scheduler
        for queue in (scheduler.rounds, self.prepared, self.folds, self.jobs):
            assert len(queue) <= max(scheduler.depth, 1), f"queue of {len(queue)}"
        if scheduler.late is not None:
            for waiting in scheduler.late.waiting.values():
                assert len(waiting) <= self.config.learners, "late pushes pile up"

    def arm_timer(self) -> None:
        due = self.scheduler.deadline_ns()
        if due is not None and due != self.armed_ns:
            self.armed_ns = due
            self.world.after(due - self.world.now_ns, self.tick, due)

    def tick(self, due: int) -> None:
        if self.armed_ns == due and self.exit is None and not self.crashed:
            self.armed_ns = None
            self.handle(ev.Tick())

    # ---- actions ---------------------------------------------------------------------------------

    def do_admit(self, action):
        group = self.arrivals.pop(action.connection)
        group.member = (action.learner, action.generation)
        self.groups[group.member] = group

    def do_refuse(self, action):
        self.refuse(self.arrivals.pop(action.connection), action.text)

    def do_close(self, action):
        self.marks.add("closed to get the initial values again")
        group = self.groups[action.learner, action.generation]
        group.ended = True
        group.link.cut(self.world.between(1, 100) * MS)

    def do_release(self, action):
        assert isinstance(action.payload, Array)

    def do_adoptinit(self, action):
        self.initial[action.fragment] = action.payload.values.copy()
        self.store.adopt(action.fragment, action.payload.values)

    def do_pull(self, action):
        data = encode.encode_pull(messages.Pull(action.fragment, action.step, action.attempt))
        for member in action.members:
            if member in self.groups:
                self.groups[member].link.control("down", data)

    def image(self, fragment: int) -> tuple[int, bytes]:
        """Version and bytes of a fragment as broadcast."""
        current = self.store.current(fragment)
        if bulk_dtype(self.session.dtype) == DTYPE_F32:
            body = current.params.tobytes()
        else:
            assert bulk_dtype(self.session.dtype) == DTYPE_BF16
            body = np.empty(2 * current.params.size, np.uint8)
            kernels.encode_bf16(current.params, body)
            body = body.tobytes()
        return current.version, encode.bcast_head(fragment, current.version) + body

    def send_version(self, group: Group, fragment: int, image: tuple[int, bytes]) -> int:
        version, body = image
        self.shown_step = max(self.shown_step, version)
        group.delivered[fragment] = version
        return group.link.chunked("down", Msg.BCAST_FRAGMENT, body)

    def do_broadcast(self, action):
        if self.disk is not None and self.config.checkpoint_every == 1:
            assert self.disk.durable_step() >= action.version, f"12: {action} is not on the disk"
        image = self.image(action.fragment)
        for member in action.members:
            group = self.groups.get(member)
            if group is None:
                continue
            if group.catching_up is None:
                self.send_version(group, action.fragment, image)
            else:
                group.catching_up[action.fragment] = image
        if action.version in self.to_sync:
            self.to_sync.remove(action.version)
            self.queue.append(ev.Synced(action.version, 1000))

    def do_catchup(self, action):
        group = self.groups.get((action.learner, action.generation))
        if group is not None:
            group.catching_up = {f: self.image(f) for f in range(self.scheduler.fragments)}
            if not group.catch_up_sends:
                group.catch_up_sends = True
                self.catch_up_next(group)

    def catch_up_next(self, group: Group) -> None:
        """One fragment at a time, each as it was or was broadcast last when its turn comes."""
        if group.left or self.crashed or self.exit is not None:
            return
        if not group.catching_up:
            group.catching_up = None
            group.catch_up_sends = False
            delivered = tuple(group.delivered[f] for f in range(self.scheduler.fragments))
            self.handle(ev.CaughtUp(*group.member, delivered))
            return
        fragment = next(iter(group.catching_up))
        image, left_ns = group.catching_up.pop(fragment), self.world.now_ns
        if group.delivered.get(fragment, -1) < image[0]:  # nothing goes out twice
            left_ns = self.send_version(group, fragment, image)
        self.world.after(left_ns - self.world.now_ns, self.catch_up_next, group)

    def do_openfold(self, action):
        self.folds[action.step] = self.store.fold(action.fragment, self.config.fold,
                                                  action.learners)
        self.jobs[action.step] = []

    def do_fold(self, action):
        c, fold = action.contribution, self.folds[action.step]
        self.jobs[action.step].append((c, c.payload.values.copy()))
        for learner, _ in fold.add(c.learner, c.generation, c.weight, c.payload.values):
            self.queue.append(ev.Folded(action.step, action.attempt, learner,
                                        c.carried and learner == c.learner))

    def do_park(self, action):
        action.payload.values = None

    def do_unpark(self, action):
        late = action.payload
        late.values = np.empty(self.session.layout.fragments[late.fragment].numel, np.float32)
        assert DECODE[self.session.dtype](late.wire, late.values, True) < 0

    def do_startmerge(self, action):
        fold = self.folds.pop(action.step, None)
        if fold is None:
            parts = [(c, c.payload.values.copy()) for c in action.contributions]
        else:
            parts = self.jobs.pop(action.step)

        def run():
            if self.crashed or self.exit is not None:
                return
            try:
                if fold is None:
                    prepared = self.store.prepare(
                        action.fragment, action.step,
                        [(c.learner, c.generation, c.weight, values) for c, values in parts])
                else:
                    prepared = self.store.prepare_fold(action.step, fold)
            except NumericsError as error:
                self.handle(ev.MergeDone(action.step, 1000, 0.0, str(error)))
                return
            self.prepared[action.step] = (prepared, parts)
            self.handle(ev.MergeDone(action.step, 1000, prepared.gnorm))

        self.world.after(self.world.between(0.01, self.settings["work_ms"]) * MS, run)

    def do_publish(self, action):
        prepared, parts = self.prepared.pop(action.step)
        self.store.publish(prepared)
        self.merged.append((action.step, action.fragment, parts))
        self.note_cut(action.step, self.versions())
        if action.step < self.config.total_steps:
            self.to_sync.append(action.step)

    def do_save(self, action):
        """Through the real writer onto the simulated disk; the final state is only time."""
        if action.kind is act.SaveKind.FINAL_STATE or self.disk is None:
            broken = self.disk is not None and self.world.chance(self.disk.fault_chance)
            self.world.after(self.world.between(1, 1000) * MS, self.handle, ev.Saved(
                action.kind, action.step, "Input/output error" if broken else None))
            return
        versions = self.versions()
        if action.kind is act.SaveKind.ROUND and action.step > 0:
            prepared, parts = self.prepared[action.step]
            versions[prepared.fragment] = prepared.result
            self.in_cut = (action.step, prepared.fragment, parts)
        self.note_cut(action.step, versions)
        hello = self.session
        cut = Cut.of(action.step, versions, action.ledger, fingerprint=hello.fingerprint,
                     contract=hello.contract, layout=hello.layout,
                     optimizer=optimizer_of(self.config), profile_hash=bytes(32))
        self.marks.add(f"saved {action.kind}" + (" in the background" if action.background else ""))
        held = [(v, v.params.tobytes()) for v in versions]

        def done(error: str | None) -> None:
            for version, before in held:
                assert version.params.tobytes() == before, "13: a cut changed while it was written"
            held.clear()
            if error is not None:
                self.marks.add(f"not saved: {action.kind}")
            self.handle(ev.Saved(action.kind, action.step, error))

        self.disk.save(cut, done, let_go=action.background,
                       mark=action.kind is act.SaveKind.FINAL and self.config.mark_final_checkpoint)

    def note_cut(self, step: int, versions: list) -> None:
        self.cuts[step] = [version.params.tobytes() for version in versions]

    def do_sendfinal(self, action):
        self.shown_step = action.step
        group = self.groups.get((action.learner, action.generation))
        if group is None:
            return
        versions = tuple(self.scheduler.versions)
        for fragment, version in enumerate(versions):
            body = encode.final_head(fragment, version) + self.store.current(
                fragment).params.tobytes()
            group.link.chunked("down", Msg.FINAL_FRAGMENT, body)
        group.link.control("down", encode.encode_manifest(
            messages.Manifest(action.step, versions)))

    def do_sendshutdown(self, action):
        for member in action.members:
            if member in self.groups:
                self.groups[member].link.control("down", encode.encode_shutdown())

    def do_log(self, action):
        pass

    def do_record(self, action):
        self.tape.append(action.fields)

    def do_exit(self, action):
        self.exit = action
        for link in self.links:
            link.close_after(2000 * MS)


def optimizer_of(config) -> dict:
    """The outer optimizer as a checkpoint states it."""
    return optimizer_facts(config.outer_optimizer, lr=config.outer_lr,
                           momentum=config.outer_momentum, dn_period=config.dn_period,
                           dn_activation=config.dn_activation)


def shuffled(items: list, seed: int) -> list:
    """The same items in another order: arrival order must not matter."""
    mixed = list(items)
    random.Random(seed).shuffle(mixed)
    return mixed
