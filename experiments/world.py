"""A run in simulated time: the production server, and learners that really train.

Server, sessions, packing and merges are the program's own, in the world of tests/sim: sockets,
clock, disk and chance of one seed. A step costs its arithmetic on this machine, and `step_s` in the
run; a byte on a link costs `ns_per_byte` there. So speed, links and deaths are exact, and the same
figures come out of the same seed. Must not know what an experiment compares.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from experiments.model import BATCH, Model, Size, Trainer
from syncer.config import Config
from syncer.core import actions as act
from syncer.core import events as ev
from syncer.demo.model.adamw import AdamW
from syncer.learner.connection import Connection
from syncer.learner.failures import TurnedAway
from syncer.learner.fragment import Fragment
from syncer.learner.heartbeats import Heartbeats
from syncer.learner.introduction import Introduction
from syncer.learner.session import Phase, Session
from syncer.protocol import DTYPES, Msg
from syncer.wire.names import fingerprint
from tests.sim.clock import MS, SECOND, World
from tests.sim.disk import PATH, Disk
from tests.sim.link import Link
from tests.sim.network import Network
from tests.sim.server import SimServer
from tests.sim.system import SimSystem

DELAY_MS = 20.0
"""Of every link, one way."""
SCALE = 1e9
"""Parameters of the model whose traffic is meant by a link's bits per second: a byte of ours takes
as long as the same share of that model."""
CODES = {name: code for code, name in DTYPES.items()}
AGAIN_S = 1.0
"""After a connection is lost; twice as long each time, up to half a minute."""


@dataclass(frozen=True)
class Setting:
    """What a run is. step_s: seconds of a step, one entry for all or one a learner. rounds: flags
    of the server beside the counts."""

    size: Size
    seed: int
    rate: float
    learners: int
    steps: int
    """Own steps of a learner until the run is through, if rounds keep the pace of H."""
    h: float = 24.0
    dtype: str = "f32"
    feeds_back: bool = False
    """Whether what a delta loses on the wire is in the next one."""
    alpha: float = 0.5
    step_s: tuple[float, ...] = (1.0,)
    bits_per_s: float = 0.0
    """Of each learner's link either way, once everybody trains; 0: it is no bottleneck."""
    look_s: float = 0.0
    """Between two points of the loss curve; 0: there is none."""
    saves: bool = False
    """Whether the server writes a checkpoint at every step."""
    keeps: int = 0
    """Own steps between two checkpoints of a learner's AdamW, that its next process goes on with;
    0: it keeps none."""
    rounds: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Config:
        """K = M and a fixed pace, unless `rounds` says otherwise."""
        fragments = len(self.size.layout.fragments)
        given = {"learners": self.learners, "quorum": self.learners, "grace_ms": 0,
                 "total_steps": max(1, round(self.steps / self.h * fragments)),
                 "sync_interval_steps": self.h, "log_level": "error", "merge_threads": 1}
        if self.saves:
            given |= {"checkpoint_path": PATH, "checkpoint_every": 1}
        return Config(**given | self.rounds)


class LikelyWorld(World):
    """One in which what is more likely than not happens: no socket is cut, no call fails."""

    def chance(self, probability: float) -> bool:
        return probability >= 0.5


class SteadyNetwork(Network):
    def delay_ns(self) -> float:
        return DELAY_MS * MS


class Merge(NamedTuple):
    """One outer step. at_ns: when it was durable, or public. learners: (id, steps, tokens) of each
    push in it."""

    at_ns: int
    learners: tuple[tuple[int, int, int], ...]


class Ledger:
    """What was merged, told by the actions of one server process after the other."""

    def __init__(self) -> None:
        self.scheduler: Any = None
        self.exit: act.Exit | None = None
        self.found: set[str] = set()
        self.computing: dict[int, tuple[act.Contribution, ...]] = {}
        self.merges: dict[int, Merge] = {}

    def begin(self, scheduler: Any) -> None:
        """What a process has not found in its file has not happened."""
        self.scheduler = scheduler
        self.computing.clear()
        self.merges = {step: merge for step, merge in self.merges.items()
                       if step <= scheduler.global_step}

    def before(self, event: Any) -> None:
        if isinstance(event, ev.MergeDone) and event.step in self.computing:
            left = {dropped.position for dropped in event.dropped}
            self.computing[event.step] = tuple(
                c for i, c in enumerate(self.computing[event.step]) if i not in left)

    def after(self, event: Any, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, act.StartMerge):
                self.computing[action.step] = tuple(
                    c._replace(payload=None) for c in action.contributions)
            elif isinstance(action, act.Publish | act.Save) and action.step in self.computing:
                self.merges[action.step] = Merge(self.scheduler.now_ns, tuple(
                    (c.learner, c.c_steps, c.c_tokens) for c in self.computing[action.step]))
                if isinstance(action, act.Publish):
                    del self.computing[action.step]
            elif isinstance(action, act.Exit):
                self.exit = action

    def forget(self) -> None:
        """What it keeps are numbers."""

    def entries(self) -> dict[int, list[int]]:
        """Learner -> [merges, steps, tokens], as a scheduler counts them."""
        found: dict[int, list[int]] = {}
        for merge in self.merges.values():
            for learner, *more in merge.learners:
                entry = found.setdefault(learner, [0, 0, 0])
                found[learner] = [a + b for a, b in zip(entry, (1, *more), strict=True)]
        return found


class Island:
    """One learner: a process, that `kill` ends, around a training loop."""

    def __init__(self, fleet: Fleet, learner: int):
        self.fleet, self.world, self.learner = fleet, fleet.world, learner
        times = fleet.setting.step_s
        self.step_ns = times[learner % len(times)] * SECOND
        self.process = 0
        self.steps = 0
        """Over all its processes."""
        self.done = False
        self.link: Link | None = None
        self.kept: AdamW | None = None
        self.start()

    def start(self) -> None:
        """A process: the run's first values, nothing learnt, no connection yet."""
        setting, layout = self.fleet.setting, self.fleet.layout
        self.process += 1
        self.trainer = Trainer(setting.size, setting.seed, self.learner, setting.rate, self.process)
        if self.kept is not None:
            self.trainer.optimizer = copy.deepcopy(self.kept)
            self.trainer.steps = self.kept.steps
        parameters = self.trainer.model.parameters
        self.fragments = [
            Fragment([parameters[tensor.name] for tensor in fragment.tensors],
                     CODES[setting.dtype]) for fragment in layout.fragments]
        print_ = fingerprint(layout.wire, layout.names)
        self.session = Session(
            layout.wire, print_, learner=self.learner, dtype=CODES[setting.dtype], num_streams=0,
            introduction=Introduction(print_, names=layout.names if self.learner == 0 else None,
                                      wants_fates=setting.feeds_back))
        for each in self.fragments if setting.feeds_back else ():
            each.feed_back()
        self.beats: Heartbeats | None = None
        self.again_s = AGAIN_S
        self.world.after(self.world.between(1, 100) * MS, self.connect, self.process)

    def kill(self, down_s: float) -> None:
        """SIGKILL; a new process some time later. What was not pushed is lost."""
        self.process += 1
        self.fleet.killed += 1
        if self.link is not None:
            self.link.close()
            self.link = None
        self.world.after(down_s * SECOND, self.start)

    # ---- the connection --------------------------------------------------------------------------

    def connect(self, process: int) -> None:
        if process != self.process or self.done:
            return
        connection = self.session.connect(self.world.rng.getrandbits(64) | 1)
        self.link = link = Link(
            self.fleet.network, connection,
            lambda stream, data: self.received(connection, link, stream, data), self.lost)
        link.begin()

    def received(self, connection: Connection, link: Link, stream: int, data: bytes) -> None:
        if link is not self.link:
            return
        try:
            for inbound in connection.feed(stream, data):
                if inbound.msg_type == Msg.WELCOME:
                    self.again_s = AGAIN_S
                    if self.session.wants_initial_values:
                        self.send_initial_values(link)
        except TurnedAway:
            link.close()
            self.lost(link)
            return
        if self.beats is None and self.session.phase is Phase.TRAINING:
            self.begin()

    def send_initial_values(self, link: Link) -> None:
        for index, fragment in enumerate(self.fragments):
            body = np.empty(self.session.tensors.init_bytes(index), np.uint8)
            fragment.pack_values(body)
            link.tensor(self.session.tensors.init(index, body))

    def begin(self) -> None:
        """Training, once there is a first value of everything."""
        for bcast in self.session.take_broadcasts():
            self.fragments[bcast.fragment].rebase(bcast.tensor, 0.0)
        if not self.session.unapplied():
            self.beats = Heartbeats(self.world.now_ns / SECOND)
            self.world.after(self.step_ns * self.world.rng.random(), self.train, self.process)
            self.fleet.begin()

    def lost(self, link: Link) -> None:
        self.session.lost(link.connection)
        if link is self.link:
            self.link = None
            self.world.after(self.again_s * SECOND, self.connect, self.process)
            self.again_s = min(30.0, 2 * self.again_s)

    # ---- training --------------------------------------------------------------------------------

    def train(self, process: int) -> None:
        """One step and its boundary."""
        if process != self.process or self.done:
            return
        self.world.after(self.step_ns * (0.98 + 0.04 * self.world.rng.random()), self.train,
                         process)
        if self.session.phase is Phase.TRAINING:
            self.trainer.step()
            self.steps += 1
            self.session.advance(BATCH)
            keeps = self.fleet.setting.keeps
            if keeps and self.trainer.steps % keeps == 0:
                self.kept = copy.deepcopy(self.trainer.optimizer)
        self.boundary()

    def boundary(self) -> None:
        session, link = self.session, self.link
        for bcast in session.take_broadcasts():
            self.fragments[bcast.fragment].rebase(bcast.tensor, self.fleet.setting.alpha)
        for pull in session.due_pulls():
            push = session.answer(pull)
            delta = np.empty(session.tensors.push_bytes(pull.fragment), np.uint8)
            if not session.fates.carried(pull.fragment):
                self.fragments[pull.fragment].forget_error()
            self.fragments[pull.fragment].pack_delta(delta)
            if link is not None:
                link.tensor(session.tensors.push(push, delta))
        if link is not None and self.beats.is_due(self.world.now_ns / SECOND):
            link.control(session.heartbeat())
        if session.phase is Phase.FINALIZING and (cut := session.final.tensors()) is not None:
            for fragment, tensor in zip(self.fragments, cut, strict=True):
                fragment.overwrite(tensor)
            if link is not None:
                link.control(session.acknowledge())
        self.done = session.phase is Phase.SHUT_DOWN


class Fleet:
    """A run of a `Setting`. `curve`: (seconds, bits per byte) of the merged model."""

    def __init__(self, setting: Setting):
        self.setting = setting
        self.world = LikelyWorld(setting.seed)
        self.network = SteadyNetwork(self.world, 0.0, 1 << 30, False)
        self.layout = setting.size.layout
        self.disk = Disk(self.world, 1.0)
        self.ledger = Ledger()
        self.curve: list[tuple[float, float]] = []
        self.killed = 0
        """Processes of learners."""
        self.merged = Model(setting.size, setting.seed)
        self.server = self.start_server(setting.config)
        self.islands = [Island(self, learner) for learner in range(setting.learners)]
        self.began_ns: int | None = None
        """When everybody trains: the first values are there, and links are what they are from now
        on."""
        self.at_begin = (0, 0)

    def begin(self) -> None:
        """An island trains; the run begins with the last of them."""
        if self.began_ns is not None or any(island.beats is None for island in self.islands):
            return
        self.began_ns = self.world.now_ns
        self.at_begin = self.network.incoming.bytes, self.network.outgoing.bytes
        if self.setting.bits_per_s:
            self.network.ns_per_byte = 8e9 / self.setting.bits_per_s * (
                SCALE / self.setting.size.numel)
            for island in self.islands:
                for wire in island.link.wires:
                    wire.up.ns_per_byte = wire.down.ns_per_byte = self.network.ns_per_byte
        if self.setting.look_s:
            self.world.after(self.setting.look_s * SECOND, self.look)

    def start_server(self, config: Config) -> SimServer:
        system = SimSystem(self.world, self.network, self.disk, 1.0)
        return SimServer(self.world, config, system, self.ledger, MS // 10)

    def kill_server(self, down_s: float) -> None:
        """SIGKILL; somebody starts it again, from its file."""
        self.server.kill()
        self.world.after(down_s * SECOND, self.resume_server)

    def resume_server(self) -> None:
        self.server = self.start_server(replace(self.setting.config, resume=True))

    @property
    def seconds(self) -> float:
        """Since everybody trains."""
        return 0.0 if self.began_ns is None else (self.world.now_ns - self.began_ns) / SECOND

    def play(self, enough: Callable[[], bool] = lambda: False) -> None:
        """To the end of the run, or until it is enough. Raises AssertionError if it gets stuck, or
        ends otherwise."""
        while not (self.server.over or enough()):
            assert self.world.step(), "nothing is left to happen"
        assert not self.server.over or self.server.status == 0, self.server.exit_text
        self.load()

    def load(self) -> None:
        """Into `merged`: what the server has."""
        session = self.server.server.session
        if session is None:
            return
        for index, fragment in enumerate(self.layout.fragments):
            params, start = session.merging.store.current(index).params, 0
            for tensor in fragment.tensors:
                self.merged.parameters[tensor.name][...] = (
                    params[start:start + tensor.numel].reshape(tensor.shape))
                start += tensor.numel

    def look(self) -> None:
        if not self.server.ended:
            self.load()
            self.curve.append((self.seconds, self.loss))
        self.world.after(self.setting.look_s * SECOND, self.look)

    # ---- what came of it -------------------------------------------------------------------------

    @property
    def loss(self) -> float:
        """Bits per held-out byte of the merged model."""
        return self.merged.bits_per_byte()

    @property
    def own_steps(self) -> float:
        """Of a learner, on the average."""
        return sum(island.steps for island in self.islands) / len(self.islands)

    @property
    def merged_steps(self) -> float:
        """The same of steps that are in the merged model."""
        count = len(self.layout.fragments) * len(self.islands)
        return sum(steps for _, steps, _ in self.ledger.entries().values()) / count

    def gaps_s(self, but_for: Iterable[float] = ()) -> list[float]:
        """Between one commit and the next, but for those in which such a moment falls."""
        moments = [(merge.at_ns - self.began_ns) / SECOND
                   for _, merge in sorted(self.ledger.merges.items())]
        return [b - a for a, b in itertools.pairwise(moments)
                if not any(a <= moment <= b for moment in but_for)]

    @property
    def bytes_per_parameter(self) -> tuple[float, float]:
        """That a learner has sent and received since the run began."""
        passed = self.network.incoming.bytes, self.network.outgoing.bytes
        up, down = ((now - before) / len(self.islands) / self.setting.size.numel
                    for now, before in zip(passed, self.at_begin, strict=True))
        return up, down
