"""A simulated server that finds no memory for a moment: for a connection, a broadcast, a merge."""

from __future__ import annotations

from datetime import datetime
from itertools import pairwise

import pytest

from syncer.protocol import DTYPE_F32
from syncer.server import door, run_session, service
from syncer.server.outgoing import Outgoing
from tests.sim.clock import SECOND
from tests.sim.disk import PATH
from tests.sim.fleet import Fleet
from tests.sim.scale import scaled
from tests.sim.told import lines_of
from tests.toy_driver import toy_config

SHORT = "no memory: what needs it waits, and the run with it"


def check_one_was_ended(fleet: Fleet) -> None:
    """One connection, and nothing else."""
    said = b"".join(fleet.lines.lines)
    assert said.count(b"the system failed a connection") == 1
    assert b"internal error" not in said


@pytest.mark.parametrize(("module", "name"), [
    (door, "FrameReader"), (door, "read_hello"), (service, "RunSession"), (run_session, "Group")])
def test_memory_that_is_lacking_for_one_connection_ends_that_one(monkeypatch, module, name):
    """Wherever it is asked for on the way in; a learner dials again."""
    fleet = Fleet(3, config=toy_config(learners=2, total_steps=6), faults=[],
                  settings={"streams": 1, "misconfigured": 0})
    made, failed = getattr(module, name), []

    def without_memory(*given, **options):
        if not failed:
            failed.append(True)
            raise MemoryError
        return made(*given, **options)

    monkeypatch.setattr(module, name, without_memory)
    fleet.play()
    fleet.check()
    assert failed
    check_one_was_ended(fleet)


@pytest.mark.parametrize("pipeline", [1, 3])
def test_memory_that_is_lacking_for_a_broadcast_is_waited_for(pipeline):
    """It is everybody's, so that nobody is to blame: it goes out when there is memory again, and
    before the pulls about it. No connection ends for it."""
    fleet = Fleet(9, config=toy_config(learners=3, quorum=2, total_steps=30, pipeline=pipeline,
                                       quorum_timeout_s=60,
                                       log_level="info", log_format="json"),
                  faults=[], settings={"misconfigured": 0})
    assert fleet.dtype != DTYPE_F32
    with scaled(fleet.settings):
        scheduler = fleet.server.scheduler
        fleet.world.wait(lambda: scheduler.global_step >= 10)
        fleet.starve(fleet.world.now_ns + 45 * SECOND)
        fleet.world.wait(lambda: lines_of(fleet, SHORT))
        fleet.world.wait(lambda: scheduler.global_step >= 25)
    fleet.play()
    fleet.check()
    assert len(lines_of(fleet, SHORT)) == 2
    assert all("the broadcast of fragment" in line["what"] for line in lines_of(fleet, SHORT))
    over, = lines_of(fleet, "memory is there again")
    assert 44 < over["waited_s"] < 46
    assert {line["reason"] for line in lines_of(fleet, "push rejected")} <= {"OutOfRound"}, "late"
    assert not lines_of(fleet, "connection ended")
    assert [line["step"] for line in lines_of(fleet, "outer step")] == list(range(1, 31))


@pytest.mark.parametrize("fold", ["batch", "exact"])
def test_memory_that_is_lacking_for_merges_is_waited_for(fold):
    """Nobody is asked again for what has come, and it is said once in 30 s."""
    fleet = Fleet(9, config=toy_config(learners=2, quorum=2, total_steps=20, fold=fold,
                                       learner_weight="equal", quorum_timeout_s=900,
                                       log_level="info", log_format="json"),
                  faults=[], settings={"misconfigured": 0})
    with scaled(fleet.settings):
        scheduler, workers = fleet.server.scheduler, fleet.server.system.the_workers
        fleet.world.wait(lambda: scheduler.global_step >= 10)
        workers.failing = 30
        fleet.world.wait(lambda: scheduler.global_step >= 15)
    fleet.play()
    fleet.check()
    assert workers.failed > 15
    assert {line["what"] for line in lines_of(fleet, SHORT)} == {"a computation"}
    told = [datetime.fromisoformat(line["time"]) for line in lines_of(fleet, SHORT)]
    assert told
    assert all((after - before).total_seconds() >= 30 for before, after in pairwise(told))
    assert len(lines_of(fleet, "memory is there again")) == 1
    assert not lines_of(fleet, "quorum timeout")
    assert not lines_of(fleet, "internal error")
    assert [line["step"] for line in lines_of(fleet, "outer step")] == list(range(1, 21))


def test_memory_for_a_broadcast_is_not_waited_for_without_end():
    """The last cut is saved, and everybody told, although what waits to go out never does."""
    fleet = Fleet(9, config=toy_config(learners=2, quorum=2, total_steps=30, quorum_timeout_s=20,
                                       log_level="info", log_format="json"),
                  faults=[], settings={"misconfigured": 0})
    with scaled(fleet.settings):
        fleet.world.wait(lambda: fleet.server.scheduler.global_step >= 10)
        fleet.starve(fleet.world.now_ns + 3600 * SECOND)
        begun_ns = fleet.world.now_ns
        fleet.world.wait(lambda: fleet.server.over)
    assert 20 * SECOND <= fleet.world.now_ns - begun_ns < 30 * SECOND
    assert fleet.server.status == 1
    assert "for 20 s there was no memory for the broadcast of fragment" in fleet.server.exit_text
    assert not lines_of(fleet, "internal error")


def test_memory_for_a_merge_is_not_waited_for_without_end():
    fleet = Fleet(9, config=toy_config(learners=1, total_steps=9, quorum_timeout_s=60,
                                       checkpoint_path=PATH, checkpoint_every=8), faults=[])
    with scaled(fleet.settings):
        server = fleet.server
        fleet.world.wait(lambda: server.scheduler.global_step >= 3)
        server.system.the_workers.failing = 1000
        begun_ns = fleet.world.now_ns
        fleet.world.wait(lambda: server.over)
    assert 60 * SECOND <= fleet.world.now_ns - begun_ns < 90 * SECOND
    assert "there was no memory for it" in server.exit_text
    fleet.play()
    fleet.check()


def test_a_signal_does_not_wait_for_memory():
    fleet = Fleet(9, config=toy_config(learners=2, total_steps=30, checkpoint_path=PATH,
                                       checkpoint_every=7), faults=[])
    assert fleet.dtype != DTYPE_F32
    with scaled(fleet.settings):
        fleet.world.wait(lambda: fleet.server.scheduler.global_step >= 10)
        fleet.starve(fleet.world.now_ns + 1000 * SECOND)
        fleet.world.wait(lambda: fleet.server.server.session.outgoing.behind)
        begun_ns, server = fleet.world.now_ns, fleet.server
        server.signal()
        fleet.world.wait(lambda: server.over)
        assert fleet.world.now_ns < begun_ns + 10 * SECOND
    assert server.status == 128 + 15
    fleet.play()
    fleet.check()


def test_memory_that_is_lacking_for_a_catch_up_ends_its_connection(monkeypatch):
    fleet = Fleet(3, config=toy_config(learners=2, quorum=2, total_steps=20), faults=[],
                  settings={"misconfigured": 0})
    version, failed = Outgoing._version, []

    def without_memory(outgoing, kind, fragment):
        if not failed and outgoing.catching_up and fleet.server.scheduler.global_step >= 3:
            failed.append(True)
            raise MemoryError
        return version(outgoing, kind, fragment)

    def catch_up(outgoing, action):
        outgoing.catching_up = True
        caught_up(outgoing, action)
        outgoing.catching_up = False

    caught_up = Outgoing.catch_up
    monkeypatch.setattr(Outgoing, "catch_up", catch_up)
    monkeypatch.setattr(Outgoing, "catching_up", False, raising=False)
    monkeypatch.setattr(Outgoing, "_version", without_memory)
    with scaled(fleet.settings):
        fleet.world.wait(lambda: fleet.server.scheduler.global_step >= 3)
        fleet.learners[1].drop()
    fleet.play()
    fleet.check()
    assert failed
    check_one_was_ended(fleet)


def test_a_worker_without_memory_for_a_hello_ends_that_connection():
    """Whose learner dials again; the run is none the worse."""
    fleet = Fleet(4, config=toy_config(learners=2, total_steps=5), faults=[],
                  settings={"hello_inline": 0})
    with scaled(fleet.settings):
        fleet.server.system.the_workers.failing = 1
        fleet.world.wait(lambda: fleet.server.system.the_workers.failed)
    fleet.play()
    fleet.check()
    check_one_was_ended(fleet)
