"""Sockets of nobody: they connect and say nothing, half a HELLO, rubbish, or what they must not.

Each must be answered or closed within the limits of the door, and change nothing else.
"""

from __future__ import annotations

from typing import Any

from syncer.layout import ISO, FragmentLayout, Layout
from syncer.protocol import DTYPE_F32, Msg
from syncer.wire.contracts import run_contract
from syncer.wire.encode import encode_data_hello, encode_hello, frame, frame_header
from syncer.wire.extension import Extension, Held, Role, RunClaim
from syncer.wire.hello import Hello, hello_mac
from syncer.wire.messages import DataHello
from tests.sim.clock import MS, SECOND
from tests.sim.network import Wire

STAYS_MS_MAX = 60_000


class Stranger:
    """Connects at once, says one thing, and leaves after `stays_ns` unless it is closed before.

    tls: as of a `Wire`.
    """

    def __init__(self, fleet: Any, said: bytes, stays_ns: float, tls: Any = ...):
        self.closed = False
        self.answer = bytearray()
        self.wire = Wire(fleet.network, fleet.network.delay_ns(), self.answer.extend, self.ended,
                         tls)
        if said:
            self.wire.write(said)
        fleet.world.after(stays_ns, self.leave)

    def ended(self) -> None:
        self.closed = True

    def leave(self) -> None:
        if not self.closed:
            self.closed = True
            self.wire.close()


def openings(fleet: Any) -> dict[str, bytes]:
    """What a stranger may say, by what is wrong with it."""
    rng = fleet.world.rng
    learner = rng.choice(fleet.learners)
    hello: Hello = fleet.hello(learner.learner, rng.getrandbits(64) | 1)
    whole = encode_hello(hello, fleet.key)
    found = {
        "silence": b"",
        "half a HELLO": whole[:rng.randrange(1, len(whole))],
        "rubbish": bytes(rng.randrange(256) for _ in range(40)),
        "a huge frame": frame_header(Msg.HELLO, 1 << 50),
        "a message out of place": frame(Msg.HEARTBEAT, bytes(12)),
        "a HELLO of nobody": encode_hello(hello._replace(learner=fleet.config.learners), fleet.key),
        "a HELLO with another key": encode_hello(hello, b"another key"),
        "a HELLO of another profile": encode_hello(
            hello._replace(profile_hash=bytes(32)), fleet.key),
        "a HELLO of another profile and session": encode_hello(
            hello._replace(profile_hash=bytes(32), fingerprint=bytes(32)), fleet.key),
        "a short HELLO": frame(Msg.HELLO, bytes(5)),
        "a DATA_HELLO of nobody": encode_data_hello(DataHello(hello.learner, hello.generation, 0)),
        "a short DATA_HELLO": frame(Msg.DATA_HELLO, bytes(3)),
    }
    if fleet.config.fold == "exact":
        found["a HELLO that cannot be merged"] = encode_hello(
            hello._replace(layout=Layout((FragmentLayout(ISO, (4,), ((2, 2),)),))), fleet.key)
    if fleet.strict_and_resumed:                  # ends the run
        found["a HELLO in a strict run"] = encode_hello(
            hello._replace(fingerprint=bytes(32), contract=bytes(32)), fleet.key)
    if fleet.model_is_fixed:                      # otherwise it would be what fixes it
        found["a HELLO of another session"] = encode_hello(
            hello._replace(fingerprint=bytes(32), contract=bytes(32)), fleet.key)
        found["a HELLO of another layout"] = encode_hello(
            hello._replace(layout=Layout(hello.layout.fragments * 2)), fleet.key)
    if fleet.session_is_fixed:
        found["a HELLO of another group"] = encode_hello(
            hello._replace(compat_group="other"), fleet.key)
    found |= introductions(fleet, hello)
    members = fleet.server.scheduler.members
    before = [generation for generation, whose in fleet.generations.items()
              if whose == learner.learner and generation not in members.used[whose]]
    if before and not fleet.server.ended:
        found["a HELLO of an earlier process"] = encode_hello(
            hello._replace(generation=rng.choice(before)), fleet.key)
    gone = [generation for generation in members.used[learner.learner]
            if (learner.learner, generation) not in members.members]
    if gone:
        found["a recorded HELLO"] = encode_hello(
            hello._replace(generation=rng.choice(gone)), fleet.key)
    last = learner.session.last_generation
    if last is not None:
        found["a DATA_HELLO too many"] = encode_data_hello(DataHello(learner.learner, last, 200))
        if learner.link is not None and not fleet.config.learner_budget_steps:
            found["a generation twice"] = encode_hello(
                hello._replace(generation=last), fleet.key)
    return found


def introductions(fleet: Any, hello: Hello) -> dict[str, bytes]:
    """What is wrong behind a HELLO that has a block."""
    rng, key = fleet.world.rng, fleet.key
    body = encode_hello(hello._replace(extension=Extension(client="a stranger", held=(
        Held(rng.getrandbits(64), rng.getrandbits(64)),) * len(hello.layout.fragments))))
    block = body[-1 - rng.randrange(40):]
    other = Extension(run=RunClaim(bytes(32), "other"))
    found = {
        "a HELLO with a block that is cut": proved(body[13:-9] + body[-8:], key),
        "a HELLO with a block that is longer than it": proved(
            body[13:-8] + (1 << 20).to_bytes(4, "little") + body[-4:], key),
        "a HELLO with records behind each other": proved(body[13:] + block, key),
        "a HELLO of a reader": encode_hello(hello._replace(
            dtype=DTYPE_F32, num_streams=0, extension=Extension(role=Role.FOLLOWER)), key),
        "a report of nobody": frame(Msg.REPORT, bytes(4)),
    }
    if fleet.model_is_fixed or fleet.strict_and_resumed:
        found["a HELLO of another run"] = encode_hello(hello._replace(
            contract=run_contract(bytes(32), "other"), extension=other), key)
    return found


class SecondFleet:
    """All ids of a fleet dial under another name of the run, again and again for a while: each time
    both names are in the answer, and nothing else comes of it."""

    def __init__(self, fleet: Any, apart_ns: float = 0, lasts_ns: float = 0):
        self.fleet = fleet
        self.apart_ns = apart_ns or fleet.world.between(50, 5000) * MS
        self.end_ns = fleet.world.now_ns + (lasts_ns or fleet.world.between(100, 30_000) * MS)
        self.came: list[Stranger] = []
        self.dial()

    def dial(self) -> None:
        fleet, world = self.fleet, self.fleet.world
        if world.now_ns >= self.end_ns:
            return
        if fleet.model_is_fixed or fleet.strict_and_resumed:
            base = fleet.identity.base
            hello = fleet.hello(world.rng.randrange(fleet.config.learners),
                                world.rng.getrandbits(64) | 1)
            self.came.append(Stranger(fleet, encode_hello(hello._replace(
                contract=run_contract(base, "red"), num_streams=0,
                extension=Extension(run=RunClaim(base, "red"))), fleet.key), 5 * SECOND))
        world.after(self.apart_ns, self.dial)

    @property
    def answers(self) -> list[bytes]:
        return [bytes(stranger.answer) for stranger in self.came if stranger.answer]


def proved(body: bytes, key: bytes | None) -> bytes:
    """A HELLO of this body, with the MAC that fits it."""
    return frame(Msg.HELLO, body if key is None else body + hello_mac(key, body))


def visit(fleet: Any) -> None:
    """One stranger of any kind."""
    kind, said = fleet.world.rng.choice(list(openings(fleet).items()))
    fleet.marks.add(f"stranger: {kind}")
    Stranger(fleet, said, fleet.world.between(1, STAYS_MS_MAX) * MS)
