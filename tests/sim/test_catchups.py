"""Learners that join a run under way over one uplink: those who train come first; all get in."""

from __future__ import annotations

import random
from statistics import median

import pytest

from syncer.layout import AVG, FragmentLayout, Layout
from syncer.protocol import NoticeCode
from syncer.server import catchups
from tests.sim.clock import MS, SECOND
from tests.sim.fleet import Fleet
from tests.sim.reader import SimReader
from tests.sim.scale import scaled
from tests.toy_driver import toy_config

TRAINING = 3
NUMEL, FRAGMENTS = 12_000, 12
LAYOUT = Layout(tuple(FragmentLayout(AVG, (NUMEL,)) for _ in range(FRAGMENTS)))
UPLINK_NS_PER_BYTE = 20.0
"""400 Mbit/s."""
FEW_STEPS_MS = 100


class Joining:
    """Three learners train, one step in `step_ms`; others are there to dial. Nothing else happens.

    A test of seconds has few steps in them: what was merged is kept to the end."""

    def __init__(self, joiners: int, step_ms: float = 2, **settings):
        config = toy_config(learners=TRAINING + joiners, total_steps=10**6, quorum=TRAINING,
                            grace_ms=0, start_learners=TRAINING, write_timeout_s=180, **settings)
        self.fleet = fleet = Fleet(11, config=config, faults=[], settings={
            "step_ms": (step_ms, 1.005 * step_ms), "gates": [1], "streams": 0,
            "work_ms": 0.5, "ns_per_byte": 1.0, "capacity": 1 << 20, "spurious": False,
            "duplicate": 0, "resend": 0, "impatience": 0, "misconfigured": 0,
            "introduced": 0, "turn_ns": 20_000, "chunk_bytes": 4 << 20,
            "inline_elements": 131_072, "catchup_bytes": 1 << 17})
        self.server = fleet.server
        self.late = fleet.learners[TRAINING:]
        for learner in self.late:
            learner.process += 1                  # it has not been started yet
        fleet.network.delay_ns = lambda: 0.1 * MS
        fleet.network.outgoing.ns_per_byte = UPLINK_NS_PER_BYTE

    @property
    def scheduler(self):
        return self.server.scheduler

    def rounds_ms(self, until) -> list[float]:
        """From commit to commit, until something holds."""
        world, found = self.fleet.world, []
        while not until():
            step, begun_ns = self.scheduler.global_step, world.now_ns
            world.wait(lambda step=step: self.scheduler.global_step > step or until())
            found.append((world.now_ns - begun_ns) / MS)
        return found[1:-1]

    def held(self) -> list[int]:
        members = self.scheduler.members.current
        return [member.learner for member in members if member is not None and member.held]

    def in_rounds(self, learner: int) -> bool:
        member = self.scheduler.members.current[learner]
        return member is not None and not member.held

    def lines(self, text: str) -> list[str]:
        return [line.decode() for line in self.fleet.lines.lines if text.encode() in line]


@pytest.fixture(autouse=True)
def layouts(monkeypatch):
    monkeypatch.setattr("tests.sim.fleet.draw_layout", lambda rng, config: LAYOUT)


def started(joining: Joining) -> None:
    joining.fleet.world.wait(lambda: joining.scheduler.global_step >= 5)


def test_32_joiners_do_not_choke_those_who_train():
    """Rounds, and the longest of them, against those before, on a link that all share."""
    joining = Joining(32)
    with scaled(joining.fleet.settings):
        started(joining)
        first = joining.scheduler.global_step
        before = joining.rounds_ms(lambda: joining.scheduler.global_step >= first + 40)
        for learner in joining.late:
            learner.restart()
        waiting = list(joining.late)

        def all_were_in() -> bool:
            """Whoever is in leaves at once: more members are more to send."""
            for learner in waiting:
                if joining.in_rounds(learner.learner):
                    learner.process += 1
                    learner.link.close()
                    waiting.remove(learner)
                    break
            return not waiting
        during = joining.rounds_ms(all_were_in)
        assert median(during) <= 1.5 * median(before), (median(before), median(during))
        assert max(during) <= 4 * max(before), (max(before), max(during))
        assert joining.lines("catch-up waits for its turn"), "nobody was told"


def test_many_slow_links_are_served_side_by_side():
    """Each carries 1 MB/s; one after the other they would take as many times as long."""
    joining = Joining(8)
    with scaled(joining.fleet.settings):
        started(joining)
        joining.fleet.network.ns_per_byte = 1000.0
        for learner in joining.late:
            learner.restart()
        world, begun_ns = joining.fleet.world, joining.fleet.world.now_ns
        world.wait(lambda: all(joining.in_rounds(learner.learner) for learner in joining.late))
        alone_ns = 4 * NUMEL * FRAGMENTS * 1000
        assert world.now_ns - begun_ns < 4 * alone_ns


def test_a_limit_is_a_limit_and_whoever_waits_is_told_behind_whom():
    joining = Joining(4, max_concurrent_catchups=1)
    with scaled(joining.fleet.settings):
        started(joining)
        joining.fleet.network.ns_per_byte = 1000.0
        for learner in joining.late:
            learner.restart()
        world = joining.fleet.world
        world.wait(lambda: len(joining.held()) == 4)
        line = joining.server.server.session.outgoing.catchups.line
        while joining.held():
            assert sum(turn.begun and group.outbox.catching_up
                       for group, turn in line.items()) <= 1
            world.step()
        assert any("behind" in line for line in joining.lines("catch-up waits for its turn"))
        assert joining.lines("catch-up begins after its wait")


def test_who_waits_long_for_a_turn_is_told_again(monkeypatch):
    """With times that fit a catch-up of a twentieth of a second."""
    assert (catchups.TURN_SAID_NS, catchups.TURN_SAID_AGAIN_NS) == (5 * SECOND, 30 * SECOND)
    monkeypatch.setattr(catchups, "TURN_SAID_NS", 10 * MS)
    monkeypatch.setattr(catchups, "TURN_SAID_AGAIN_NS", 20 * MS)
    joining = Joining(2, max_concurrent_catchups=1)
    with scaled(joining.fleet.settings):
        started(joining)
        joining.fleet.network.ns_per_byte = 1000.0
        world, said = joining.fleet.world, []
        line = joining.server.server.session.outgoing.catchups
        line.notice = lambda group, *notice: said.append((world.now_ns, group.learner, *notice))
        for learner in joining.late:
            learner.restart()
        world.wait(lambda: len(joining.held()) == 2)
        begun_ns = world.now_ns
        (second,) = [group.learner for group, turn in line.line.items() if not turn.begun]
        world.wait(lambda: len(said) == 2)
    for (told_ns, learner, code, text), after_ms in zip(said, (10, 30), strict=True):
        assert (learner, code) == (second, NoticeCode.OTHER)
        assert "for its turn to be sent the model, behind" in text
        assert 0 <= told_ns - begun_ns - after_ms * MS < 10 * MS
    assert [line for line in joining.lines("catch-up waits for its turn") if "waited_s=0" in line]


def test_a_dead_link_in_front_gives_its_turn_away():
    """Its packets are lost, and nobody says so for a minute."""
    joining = Joining(2, FEW_STEPS_MS, max_concurrent_catchups=1)
    dead, alive = joining.late
    with scaled(joining.fleet.settings):
        started(joining)
        joining.fleet.network.ns_per_byte = 1000.0
        joining.fleet.network.capacity = 1 << 16  # no kernel takes its whole model
        dead.restart()
        world = joining.fleet.world
        world.wait(lambda: dead.learner in joining.held())
        dead.link.wires[0].down.dead = dead.link.wires[0].up.dead = True
        alive.restart()
        begun_ns = world.now_ns
        world.wait(lambda: joining.in_rounds(alive.learner))
        assert world.now_ns - begun_ns < 10 * SECOND
        assert not joining.in_rounds(dead.learner)
        assert len(joining.lines("its turn goes to the next")) == 1


def test_dead_links_in_line_have_whole_turns():
    """Who did not move behind others may move in front: each turn lasts until that is known."""
    joining = Joining(3, FEW_STEPS_MS, max_concurrent_catchups=1)
    *dead, alive = joining.late
    with scaled(joining.fleet.settings):
        started(joining)
        joining.fleet.network.ns_per_byte = 1000.0
        joining.fleet.network.capacity = 1 << 16
        world = joining.fleet.world
        for learner in dead:
            learner.restart()
            world.wait(lambda learner=learner: learner.learner in joining.held())
            learner.link.wires[0].down.dead = learner.link.wires[0].up.dead = True
        alive.restart()
        world.wait(lambda: joining.in_rounds(alive.learner))
        begun_ns, said = world.now_ns, len(joining.lines("its turn goes to the next"))
        world.wait(lambda: world.now_ns > begun_ns + 20 * SECOND)
        assert not any(joining.in_rounds(learner.learner) for learner in dead)
        assert 8 <= len(joining.lines("its turn goes to the next")) - said <= 11, "one in 2 s"


@pytest.mark.parametrize("trickle", [0, 1000])
def test_a_newest_connection_that_takes_nothing_gives_way(trickle):
    """Somebody says that he is a learner which is there, and never reads, or so many bytes a
    second, which no learner could train with: about 10 s."""
    joining = Joining(0, FEW_STEPS_MS)
    with scaled(joining.fleet.settings | {"catchup_bytes": catchups.BEGIN_BYTES}):
        started(joining)
        joining.fleet.network.capacity = 1 << 16
        world, (learner, *_) = joining.fleet.world, joining.fleet.learners
        own = joining.scheduler.members.current[0]
        wire = learner.second_wire()
        wire.pause()

        def take() -> None:
            wire.down.capacity += trickle
            wire.down.full = False
            wire.down.drained()
            world.after(SECOND, take)

        if trickle:
            take()
        world.wait(lambda: joining.scheduler.members.current[0] is not own)
        begun_ns = world.now_ns
        world.wait(lambda: joining.scheduler.members.current[0] is own)
        assert 10 * SECOND <= world.now_ns - begun_ns < 12 * SECOND
        step = joining.scheduler.global_step
        world.wait(lambda: joining.scheduler.global_step > step)


def test_a_waiting_member_is_sent_nothing_and_then_the_versions_of_that_moment():
    joining = Joining(2, max_concurrent_catchups=1)
    first, second = joining.late
    with scaled(joining.fleet.settings):
        started(joining)
        joining.fleet.network.ns_per_byte = 1000.0
        first.restart()
        world = joining.fleet.world
        world.wait(lambda: first.learner in joining.held())
        second.restart()
        world.wait(lambda: second.learner in joining.held())
        asked = joining.scheduler.global_step
        group = joining.server.server.session.find(
            *joining.scheduler.members.current[second.learner].key)
        world.wait(lambda: joining.scheduler.global_step > asked + 1)
        assert joining.server.server.session.outgoing.catchups.waits(group)
        assert not group.outbox.held_versions, "it waits, and a broadcast is queued for it"
        world.wait(lambda: joining.in_rounds(first.learner))
        world.wait(lambda: group.outbox.held_versions)
        assert max(version for _, version in group.outbox.held_versions) > asked


def test_the_end_of_the_run_waits_for_no_turn():
    """The final cut goes to those who wait, too."""
    joining = Joining(3, max_concurrent_catchups=1)
    with scaled(joining.fleet.settings):
        started(joining)
        joining.fleet.network.ns_per_byte = 10_000.0
        for learner in joining.late:
            learner.restart()
        joining.fleet.world.wait(lambda: len(joining.held()) == 3)
        joining.server.signal()
        begun_ns = joining.fleet.world.now_ns
        joining.fleet.world.wait(lambda: joining.server.over)
        assert joining.fleet.world.now_ns - begun_ns < 5 * SECOND


def reading(joining: Joining, count: int) -> list[SimReader]:
    """Readers that follow, on links as slow as `network.ns_per_byte` is now, and do not vanish."""
    found = []
    for number in range(count):
        dice = random.Random(number)
        reader = SimReader(joining.fleet, dice)
        reader.follows, reader.disturb = True, lambda wire: None
        reader.dial()
        found.append(reader)
    return found


def test_readers_wait_for_whoever_joins():
    """The link of the learner carries as much as theirs; it is in long before they have a cut."""
    joining = Joining(1, FEW_STEPS_MS, max_concurrent_catchups=1)
    (late,) = joining.late
    with scaled(joining.fleet.settings):
        started(joining)
        joining.fleet.network.ns_per_byte = 1000.0
        joining.fleet.network.capacity = 1 << 16
        readers = reading(joining, 2)
        world, line = joining.fleet.world, joining.server.server.session.outgoing.catchups.line
        world.wait(lambda: len(line) == 2)
        late.restart()
        world.wait(lambda: late.learner in joining.held())
        sent = [group.sent for group in line]
        world.wait(lambda: joining.in_rounds(late.learner))
        assert not any(reader.steps for reader in readers)
        assert sum(group.sent for group in joining.server.server.readers.groups) - sum(
            sent[1:]) < 1 << 18
        world.wait(lambda: all(reader.steps for reader in readers))


def test_who_has_a_cut_when_the_run_ends_is_begun_no_other():
    """Nobody would complete it, and the server would stay for it."""
    joining = Joining(0, FEW_STEPS_MS)
    with scaled(joining.fleet.settings):
        started(joining)
        joining.fleet.network.ns_per_byte = 1000.0
        joining.fleet.network.capacity = 1 << 16
        (reader,) = reading(joining, 1)
        world, server = joining.fleet.world, joining.server
        world.wait(lambda: server.server.readers.open)
        (served,) = server.server.readers.open
        world.wait(lambda: served.target is not None)
        first = served.target
        world.wait(lambda: joining.scheduler.global_step > first)
        server.signal()
        world.wait(lambda: server.over)           # which looks for what is left
        assert reader.steps == [first]
        assert served.cuts == 1
        assert served.target is None


def test_half_a_push_is_forgotten_when_the_run_ends():
    joining = Joining(0)
    joining.fleet.settings["inline_elements"] = NUMEL // 12
    with scaled(joining.fleet.settings):
        started(joining)
        joining.fleet.network.ns_per_byte = 1000.0
        world, server = joining.fleet.world, joining.server
        session = server.server.session
        works = [group.work for group in session.groups.values()]
        world.wait(lambda: any(arrival.done or arrival.parts for work in works
                               for _, arrival in work.begun.values()))
        server.signal()
        world.wait(lambda: server.over)
        assert session.groups, "nobody was there at the end"
        assert not any(work.begun or work.pending for work in works)
        assert not session.ingest.arrivals.initial


def test_eight_readers_do_not_choke_those_who_train():
    joining = Joining(0)
    with scaled(joining.fleet.settings):
        started(joining)
        first = joining.scheduler.global_step
        before = joining.rounds_ms(lambda: joining.scheduler.global_step >= first + 60)
        readers = reading(joining, 8)
        joining.fleet.world.wait(lambda: len(joining.server.server.readers.open) == 8)
        first = joining.scheduler.global_step
        during = joining.rounds_ms(lambda: joining.scheduler.global_step >= first + 200)
        assert median(during) <= 1.5 * median(before), (median(before), median(during))
        joining.rounds_ms(lambda: all(reader.steps for reader in readers))
