"""A simulated learner: the real protocol session and fragment arithmetic around invented training.

An optimizer step changes the values a little, at the learner's own speed. Faults are done to it
from outside: its connection breaks, its process restarts, it sends what it should not.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from syncer.errors import SyncerError
from syncer.learner.connection import Connection
from syncer.learner.failures import TurnedAway
from syncer.learner.fragment import Fragment
from syncer.learner.session import Phase, Session
from syncer.protocol import Msg
from syncer.wire.encode import (
    encode_budget_done,
    encode_data_hello,
    encode_final_ack,
    encode_hello,
    frame,
    init_head,
    push_head,
)
from syncer.wire.extended import encode_report
from syncer.wire.messages import BudgetDone, DataHello, FinalAck, Pull, Push
from tests.sim.clock import MS, SECOND, World
from tests.sim.feedback import Feedback
from tests.sim.introduced import check_welcome, introduction_of, report_of
from tests.sim.link import Link
from tests.sim.network import KEEPALIVE_NS, Wire
from tests.sim.told import check_words


class EagerSession(Session):
    """As other programs of the protocol do it: a pull is answered on whatever anchor there is, and
    no version is taken back for an older one, on whatever connection it comes. No heartbeats."""

    def connect(self, generation: int) -> Connection:
        connection = super().connect(generation)
        self.unheard.clear()
        self._unconfirmed.clear()
        return connection

    def _due_anchor(self, pull: Pull) -> Any:
        applied = self._applied[pull.fragment]
        enough = applied and self.steps - applied.steps >= self.min_steps_per_sync
        return applied if enough else None


class SimLearner:
    """One island: `restart` begins a process, `connect` a connection of it."""

    def __init__(self, world: World, fleet, learner: int, settings: dict):
        self.world = world
        self.fleet = fleet
        self.learner = learner
        self.settings = settings
        self.step_ns = world.between(*settings["step_ms"]) * MS
        self.eager = world.chance(settings["eager"])
        self.data_ns = settings["slow_data_ms"] * MS * world.rng.random()
        self.gate = world.rng.choice(settings["gates"])
        self.process = 0
        self.link: Link | None = None
        self.redial_s = 1
        self.stalled_until_ns = 0
        self.disturbed_until_ns = 0
        """Until then it may be deaf or still, and nobody has to look after it."""
        self.last_pull = (0, 1, 1)
        self.blown_up = 0
        self.lagging = False
        self.done = False
        self.sent: deque[tuple[Push, bytes]] = deque(maxlen=4)
        """Its newest pushes: it cannot know which of them a connection that broke has carried."""
        self.wrong: str | None = None
        """What its next process is misconfigured with; it is told off, and started again."""
        if world.chance(settings["misconfigured"]):
            self.wrong = world.rng.choice(["key", "profile", "contract"])
        self.restart()

    def restart(self) -> None:
        """A new process: a session without memory, values of its own."""
        if self.done:
            return
        self.process += 1
        self.sent.clear()
        layout = self.fleet.layout
        self.new_session()
        start = np.random.default_rng(7 if self.learner == 0 else self.world.rng.randrange(1 << 30))
        self.values = [start.integers(-8, 8, f.numel).astype(np.float32) for f in layout.fragments]
        self.fragments = [Fragment([values], self.fleet.dtype) for values in self.values]
        self.feedback = Feedback(self)
        self.redial_s = 1
        self.init_sent = False
        self.world.after(self.world.between(1, 100) * MS, self.connect, self.process)
        self.world.after(self.step_ns, self.train, self.process)

    def new_session(self) -> None:
        """Forget every version that was seen, and the steps that were counted."""
        fleet = self.fleet
        if self.link is not None:
            self.link.close()
            self.link = None
            self.redial()
        wrong, self.wrong = self.wrong, None
        if wrong == "contract" and not fleet.model_is_fixed:
            wrong = None                          # it would be what fixes the session
        self.misconfigured = wrong is not None
        introduction = None if self.eager else introduction_of(
            fleet, self.learner, bytes(32) if wrong == "contract" else None)
        self.introduced = introduction is not None
        self.session = (EagerSession if self.eager else Session)(
            fleet.layout, fleet.fingerprint, learner=self.learner, dtype=fleet.dtype,
            introduction=introduction,
            num_streams=self.settings["streams"], compat_group=fleet.group,
            contract=bytes(32) if wrong == "contract" else fleet.contract,
            profile_hash=bytes(32) if wrong == "profile" else fleet.profile,
            key=b"another key" if wrong == "key" else fleet.key, min_steps_per_sync=self.gate,
            bounded_lag=fleet.config.max_base_lag is not None or self.learner % 2 == 0)

    def connect(self, process: int) -> None:
        if process != self.process or self.session.ended or self.done or self.link is not None:
            return
        connection = self.session.connect(self.world.rng.getrandbits(64) | 1)
        self.link = link = Link(
            self.fleet.network, connection,
            lambda stream, data: self.received(connection, link, stream, data),
            lambda link: self.lost(connection, link), self.data_ns)
        self.opened(link)
        impatient = self.world.now_ns < self.fleet.faults_end_ns
        if impatient and self.world.chance(self.settings["impatience"]):
            self.world.after(self.world.between(0.01, 50) * MS, self.dial_again)

    def opened(self, link: Link) -> None:
        """The connection begins, and again when the server has introduced itself on it."""
        link.begin()
        wanted = self.learner == 0 and not self.init_sent
        if link.connection.welcome is not None:
            wanted = self.session.wants_initial_values
        if wanted:
            self.send_init()
        if self.session.phase is Phase.ACKNOWLEDGING:
            link.control(self.session.acknowledge())
        if self.world.chance(self.settings["resend"]) and not self.session.fates.asked:
            for push, delta in self.sent:
                link.tensor(self.session.tensors.push(push, delta))

    def send_init(self) -> None:
        """Anew on every connection until one has carried all of it, as the library does."""
        for index, fragment in enumerate(self.fragments):
            body = np.empty(self.session.tensors.init_bytes(index), np.uint8)
            fragment.pack_values(body)
            self.link.tensor(self.session.tensors.init(index, body))

    def received(self, connection, link: Link, stream: int, data: bytes) -> None:
        if link is not self.link or self.session.error is not None:
            return
        newest = max(self.session.versions)
        try:
            for inbound in self.taken(connection, stream, data):
                if inbound.msg_type == Msg.BCAST_FRAGMENT:
                    self.fleet.anchors.check(link, inbound)
                    self.init_sent = True  # the run has begun: everything has its first value
                elif inbound.msg_type == Msg.WELCOME:
                    check_welcome(self.fleet, self.session, inbound.message, link)
                    if newest > max(self.session.versions):
                        self.fleet.marks.add("a lost run was begun anew")
                    self.opened(link)
                elif inbound.msg_type == Msg.NOTICE:
                    self.fleet.marks.add("a notice has come")
        except TurnedAway:
            self.lost(connection, link)
            link.close()
        except SyncerError as error:
            self.fleet.refused(self, error)
            link.close()
            self.world.after(self.world.between(10, 3000) * MS, self.restart_if, self.process)

    def taken(self, connection, stream: int, data: bytes) -> list:
        """What changed the session's state: in one go, or piece by piece as the library reads."""
        if self.world.chance(0.5):
            return connection.feed(stream, data)
        found = []
        while data:
            window = connection.buffer(stream)
            count = min(len(window), len(data))
            window[:count] = data[:count]
            data = data[count:]
            for frame_type, payload in connection.received(stream, count):
                found += connection.taken(connection.parse(frame_type, payload))
                if frame_type == Msg.BCAST_CHANGE:
                    self.fleet.marks.add("a broadcast came as a change")
        return found

    @property
    def is_left_behind(self) -> bool:
        """Whether somebody must start it again when the server has begun anew: it cannot know."""
        return self.done or not self.introduced

    def restart_if(self, process: int) -> None:
        if process == self.process and not self.done:
            self.restart()

    def lost(self, connection, link: Link) -> None:
        self.session.lost(connection)
        if link is self.link:
            self.link = None
            self.redial()

    def redial(self) -> None:
        self.world.after(self.redial_s * SECOND, self.connect, self.process)
        self.redial_s = min(30, 2 * self.redial_s)

    # ---- training --------------------------------------------------------------------------------

    def train(self, process: int) -> None:
        """One optimizer step and its boundary."""
        if process != self.process or self.done or self.session.error is not None:
            return
        self.world.after(self.step_ns * self.world.between(0.8, 1.25), self.train, process)
        if self.world.now_ns < self.stalled_until_ns:
            if self.link is not None and self.link.idle and self.world.chance(0.3):
                self.link.control(self.session.heartbeat())  # the pulse, which needs no step
            return
        if self.budget_spent():
            return
        if self.session.phase is Phase.TRAINING:
            for values in self.values:
                np.add(values, np.float32(self.world.rng.randrange(-4, 5) / 8), out=values)
            self.session.advance(self.world.rng.randrange(1, 100))
        self.boundary()

    def budget_spent(self) -> bool:
        """In a run with a step budget: report it spent, again and again, and stand still.

        Steps count from the first broadcast on: before it there is no run to report to.
        """
        server = self.fleet.server
        budget = server.config.learner_budget_steps
        if budget is None or self.session.phase is not Phase.TRAINING:
            return False
        if self.session.steps < budget:
            return None in self.session.accepted
        listener = server.system.listener          # what is said to one process is not to the next
        if self.link is not None and self.link.wires[0].listener is listener:
            self.link.control(encode_budget_done(BudgetDone(self.session.steps)))
        return True

    def boundary(self) -> None:
        session = self.session
        for bcast in session.take_broadcasts():
            self.fragments[bcast.fragment].rebase(bcast.tensor, 0.5)
        for pull in session.due_pulls():
            push = session.answer(pull)
            self.last_pull = pull
            delta = np.empty(session.tensors.push_bytes(pull.fragment), np.uint8)
            self.feedback.pack(push, delta)
            if self.lagging and push.base > 0:
                self.lagging, push = False, push._replace(
                    base=max(0, push.base - self.world.rng.choice([1, 5])))
            if self.blown_up:
                self.blown_up -= 1
                delta[:] = 0x7F                   # 3.4e38, also as bf16, and nearly all the weight
                push = push._replace(c_tokens=1 << 40)
            self.send_push(push, bytes(delta))
        if (self.link is not None and self.link.idle and not self.eager
                and self.world.chance(0.3)):
            self.link.control(session.heartbeat())
            if self.link.connection.extended and self.world.chance(0.1):
                self.link.control(encode_report(report_of(self.world)))
        if session.phase is Phase.FINALIZING and (cut := session.final.tensors()) is not None:
            for fragment, tensor in zip(self.fragments, cut, strict=True):
                fragment.overwrite(tensor)
            frame = session.acknowledge()
            if self.link is not None:
                self.link.control(frame)
        elif session.phase is Phase.ACKNOWLEDGING and self.link is not None and (
                self.world.chance(0.1)):
            self.link.control(session.acknowledge())  # the server may be another one now
        if session.phase is Phase.SHUT_DOWN:
            self.done = True
        elif not self.eager:  # other programs have words of their own
            check_words(session)

    def send_push(self, push, delta: bytes) -> None:
        self.sent.append((push, delta))
        if self.link is None:
            return
        message = self.session.tensors.push(push, delta)
        copies = 2 if self.world.chance(self.settings["duplicate"]) else 1
        if self.session.fates.asked:              # a fate is of one push
            copies = 1
        for _ in range(copies):
            self.link.tensor(message)

    # ---- faults ----------------------------------------------------------------------------------

    def drop(self) -> None:
        """The connection breaks; one side may take a while to see it."""
        if self.link is not None:
            half = self.world.between(1, self.settings["half_open_ms"]) * MS
            if self.world.chance(0.1):
                half = KEEPALIVE_NS
            first = self.world.chance(0.5)
            self.link.cut(0 if first else half, half if first else 0)

    def lose_stream(self) -> None:
        if self.link is not None:
            self.link.lose_stream()

    def dribble(self) -> None:
        if self.link is not None:
            self.link.dribble()

    def deaf(self) -> None:
        """It does not read for a while: the server must not wait for it."""
        if self.link is not None:
            pause_ns = self.world.between(100, 20_000) * MS
            self.link.stop_reading(pause_ns)
            self.disturb(pause_ns)

    def disturb(self, pause_ns: float) -> None:
        self.disturbed_until_ns = max(self.disturbed_until_ns, int(self.world.now_ns + pause_ns))

    def stall(self) -> None:
        """It makes no steps for a while."""
        self.stalled_until_ns = self.world.now_ns + self.world.between(100, 20_000) * MS
        self.disturb(self.stalled_until_ns - self.world.now_ns)

    def vanish(self) -> None:
        """Its machine is cut off without a word and back at once. A heartbeat comes late."""
        if self.link is not None:
            late_ns = self.world.between(10, 50_000) * MS
            self.link.vanish(self.session.heartbeat(), late_ns)

    def ghost(self) -> None:
        """A connection that it has given up: only now its HELLO comes, and nothing after it."""
        if self.link is not None:
            self.world.after(1 * SECOND, self.second_wire().vanish, self.session.heartbeat(),
                             self.world.between(10, 50_000) * MS)

    def mute(self) -> None:
        """Somebody says that he is this learner, and neither speaks after that nor reads."""
        if self.link is not None:
            wire = self.second_wire()
            wire.pause()
            wire.down.capacity = 40               # no kernel takes the model in its place
            self.world.after(self.world.between(5000, 60_000) * MS, wire.close)

    def second_wire(self) -> Wire:
        """Beside its own, with a HELLO that nobody has seen before."""
        hello = self.fleet.hello(self.learner, self.world.rng.getrandbits(64) | 1)
        wire = Wire(self.fleet.network, 0, lambda data: None, lambda: None)
        wire.write(encode_hello(hello, self.fleet.key))
        return wire

    def leave(self) -> None:
        self.redial_s = 30
        self.drop()

    def dial_again(self) -> None:
        """A second connection while the server still believes in the first (a new generation).

        The two HELLOs may overtake each other, and then the abandoned connection is the newer one.
        """
        old = self.link
        if old is None or self.session.ended:
            return
        self.link = None
        self.session.lost(self.session.connection)
        self.connect(self.process)
        self.world.after(self.world.between(1, 5000) * MS, old.close)

    def garbage(self) -> None:
        """Bytes that no learner may send: that connection must end, and nothing else."""
        link = self.link
        if link is None:
            return
        rng = self.world.rng
        kind = rng.randrange(9)
        if kind == 0:
            link.control(bytes(rng.randrange(256) for _ in range(40)))
        elif kind == 1:
            self.wild_push(b"\xff")               # no number in any dtype
        elif kind == 6 and self.learner == 0:
            link.cut_anywhere(Msg.INIT_PARAMS, init_head(0)
                              + b"\xff" * self.session.tensors.init_bytes(0))
        elif kind == 8 and link.connection.extended:
            link.control(frame(Msg.REPORT, rng.randbytes(rng.randrange(12))))
        elif kind == 7:
            link.control(encode_final_ack(FinalAck(rng.randrange(30))))
        elif kind == 2:
            link.cut_anywhere(Msg.PUSH_FRAGMENT, bytes(48))
        elif kind == 3:
            link.control(frame(Msg.DATA_HELLO, bytes(14)))
        elif kind == 4 and len(link.wires) > 1:
            twice = Wire(self.fleet.network, 0, lambda data: None, lambda: None)
            twice.write(encode_data_hello(DataHello(self.learner, link.connection.generation, 0)))
            self.world.after(10 * SECOND, twice.close)
        else:
            link.cut_anywhere(Msg.FINAL_MANIFEST, bytes(20))

    def wild_push(self, byte: bytes) -> None:
        """An answer to the last pull, of its own base, whose delta is one byte over and over."""
        fragment, step, attempt = self.last_pull
        base = self.session.versions[fragment]
        push = Push(self.learner, fragment, step, attempt, base, self.session.steps, 1, 1,
                    memoryview(b""))
        self.link.cut_anywhere(Msg.PUSH_FRAGMENT, push_head(push)
                               + byte * self.session.tensors.push_bytes(fragment))

    def overflow(self) -> None:
        """Its training has blown up: values are numbers still, but what comes of them is not."""
        self.blown_up = self.world.rng.choice([1, 2, 30])

    def mend(self) -> None:
        """Its training is sound again, and what it had not known to have arrived is forgotten."""
        self.blown_up = 0
        self.sent.clear()

    def stale(self) -> None:
        """Its next push is of a version that has been merged over."""
        self.lagging = True

    def false_report(self) -> None:
        """It says that a budget is spent which is not, or not there."""
        if self.link is not None:
            self.link.control(encode_budget_done(BudgetDone(self.world.rng.randrange(1, 9))))
