"""That nobody who is there and well is left out for long, whatever became of the others.

Looks at the learners and at the server's public state now and then, and must not change either. A
trouble of a learner is a reason for which it cannot take part; each kind has a time after which the
server must have found a way. So a run that goes on without one of its learners is a failure, too,
and not only one that stands still.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from syncer.core.run.phases import Phase as RunPhase
from syncer.learner.session import Phase
from tests.sim.clock import SECOND
from tests.sim.network import KEEPALIVE_NS

NOT_CURRENT = "another connection of it is current, or none"
HELD = "its catch-up does not end"
SLOT = "its slot is that of an older connection"
NOT_ASKED = "its slot is waited for, and it knows of no pull"
PATIENCE_NS = {NOT_CURRENT: 30 * SECOND, HELD: 60 * SECOND, SLOT: 15 * SECOND,
               NOT_ASKED: 75 * SECOND}
"""How long each may last: silence is 5 s, and who is asked again waits for up to 30 s."""


class Neglect:
    """Of one fleet; `look` raises AssertionError when a trouble has lasted for too long."""

    def __init__(self, fleet: Any):
        self.fleet = fleet
        self.since_ns: dict[tuple, int] = {}

    def look(self) -> None:
        fleet, now_ns = self.fleet, self.fleet.world.now_ns
        found = {(fleet.server, learner, *trouble) for learner in fleet.learners
                 if self.is_well(learner) for trouble in self.troubles(learner)}
        self.since_ns = {trouble: self.since_ns.get(trouble, now_ns) for trouble in found}
        for (_, learner, kind, *about), since_ns in self.since_ns.items():
            # Who says nothing while it waits is found when the newer connection has gone.
            quiet_ns = 2 * KEEPALIVE_NS if learner.eager else 0
            assert now_ns - since_ns <= PATIENCE_NS[kind] + quiet_ns, (
                f"learner {learner.learner} is well, but since {since_ns / SECOND:.1f} s {kind}: "
                f"{about}; {fleet.stuck()}")

    def is_well(self, learner: Any) -> bool:
        """It has a connection and trains, and the server is there for it."""
        server = self.fleet.server
        return (learner.link is not None and not learner.done and learner.session.error is None
                and learner.session.phase is Phase.TRAINING
                and self.fleet.world.now_ns >= max(learner.disturbed_until_ns,
                                                   server.frozen_until_ns)
                and not server.ended and not server.crashed
                and server.scheduler.phase is RunPhase.RUNNING)

    def troubles(self, learner: Any) -> Iterator[tuple]:
        """What keeps this one out now, and the connection or round that it is about."""
        scheduler = self.fleet.server.scheduler
        generation = learner.link.connection.generation
        if (learner.learner, generation) not in scheduler.members.members:
            return                                # its HELLO is on the way, or has been refused
        current = scheduler.members.current[learner.learner]
        if current is None or current.generation != generation:
            yield NOT_CURRENT, generation
        elif current.held:
            yield HELD, generation
        else:
            asked = {(pull.step, pull.attempt) for pull in learner.session.pulls}
            for round in scheduler.gathering:
                slot = round.slots.get(learner.learner)
                about = (generation, round.step, round.attempt)
                if slot is None or slot.push is not None or learner.learner in round.carried:
                    continue
                if slot.member is not current and not self.fleet.config.fixed_roster:
                    yield SLOT, *about
                elif about[1:] not in asked:
                    yield NOT_ASKED, *about
