"""What happens to a fleet that speaks TLS beside all the rest, until the faults stop.

Somebody comes without TLS, with the certificate of nobody or of an authority that is unknown, with
records that were damaged on their way; and the server is told to read its certificates again. They
have dice of their own, so that everything else is what it was.
"""

from __future__ import annotations

import random
from typing import Any

from syncer.tls import PLAIN_DIALED
from syncer.wire.encode import encode_data_hello, encode_hello
from syncer.wire.messages import DataHello
from tests.sim.clock import MS, SECOND
from tests.sim.strangers import Stranger
from tests.sim.tls import certificates

KINDS = ("plain words", "a certificate of nobody", "an unknown certificate",
         "a data socket with another certificate", "a damaged record",
         "certificates are read again")


class Intruders:
    """One of `KINDS` after the other."""

    def __init__(self, fleet: Any):
        self.fleet = fleet
        self.dice = random.Random(f"intruders {fleet.seed}")
        self.next()

    def next(self) -> None:
        self.fleet.world.after(self.dice.uniform(0.1, 20) * SECOND, self.come)

    def come(self) -> None:
        fleet = self.fleet
        if fleet.world.now_ns >= fleet.faults_end_ns:
            return
        self.next()
        if fleet.server.ended:
            return
        kind = self.dice.choice(KINDS)
        fleet.marks.add(f"intruder: {kind}")
        if kind == "certificates are read again":
            fleet.server.server.read_again()
            return
        said, tls, told = self.chosen(kind)
        stranger = Stranger(fleet, said, self.dice.uniform(1, 60_000) * MS, tls)
        if kind == "a damaged record":
            fleet.world.after(self.dice.uniform(100, 2000) * MS, self.damage, stranger)
        fleet.world.after(90 * SECOND, self.judge, kind, stranger, told)

    def chosen(self, kind: str) -> tuple[bytes, Any, bytes]:
        """(what is said, the certificate, what is part of any answer)"""
        fleet, known = self.fleet, certificates()
        learner = self.dice.choice(fleet.learners)
        hello = encode_hello(fleet.hello(learner.learner, self.dice.getrandbits(64) | 1), fleet.key)
        if kind == "plain words":
            return hello, None, PLAIN_DIALED.encode()
        if kind == "an unknown certificate":
            return hello, known.unknown, b"nothing can be said to it"
        if kind == "a damaged record":
            return b"", known.learners, b"nothing was asked"
        if kind == "a certificate of nobody" and fleet.config.tls_learner_names:
            return hello, known.nobody, b"--tls-learner-names"
        generation = learner.session.last_generation or 1
        return (encode_data_hello(DataHello(learner.learner, generation, 0)), known.nobody,
                b"unknown learner")

    def damage(self, stranger: Stranger) -> None:
        """What arrives is not what was sent."""
        if not stranger.closed:
            stranger.wire.backlog.append(self.dice.randbytes(40))
            stranger.wire._flush()

    def judge(self, kind: str, stranger: Stranger, told: bytes) -> None:
        assert not stranger.answer or told in stranger.answer or b"try again" in stranger.answer, (
            f"{kind}: {bytes(stranger.answer)!r}")
