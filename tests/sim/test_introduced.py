"""Simulated fleets that introduce themselves: two of them on one port, and a run that is lost."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from syncer.wire.contracts import run_contract
from tests.sim.clock import MS, SECOND
from tests.sim.fleet import Fleet
from tests.sim.learner import SimLearner
from tests.sim.scale import scaled
from tests.sim.strangers import SecondFleet
from tests.toy_driver import toy_config

CALM: dict[str, Any] = {"introduced": 2, "eager": 0, "misconfigured": 0, "strangers": 1024,
                        "stranger_bytes": 1 << 28, "impatience": 0, "tight": False, "streams": 0}


class SteadyLearner(SimLearner):
    """Whose values depend on what it is sent alone: a step for each pull, of dice of its own."""

    def train(self, process: int) -> None:
        if process != self.process or self.done or self.session.error is not None:
            return
        self.world.after(self.step_ns, self.train, process)
        self.boundary()                           # takes what has come before the pull
        if self.session.pulls and not self.session.due_pulls():
            dice = np.random.default_rng([self.learner, self.session.steps])
            for values in self.values:
                np.add(values, dice.integers(-4, 5, len(values)).astype(np.float32) / 8, out=values)
            self.session.advance(self.learner + 1)
            self.boundary()


class OtherRun:
    """The fleet again, under another name of its run; what its learners are told."""

    def __init__(self, fleet: Fleet, name: str):
        self.fleet, self.told = fleet, []
        self.identity = copy.copy(fleet.identity)
        self.identity.name = name
        self.contract = self.identity.contract = run_contract(fleet.identity.base, name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fleet, name)

    def refused(self, learner: SimLearner, error: Exception) -> None:
        self.told.append(str(error))


def steady(seed: int) -> Fleet:
    fleet = Fleet(seed, config=toy_config(learners=3, quorum=3, total_steps=14, run="blue",
                                          grace_ms=0, max_base_lag=0, log_format="json"),
                  faults=[], settings=CALM | {"gates": [1], "duplicate": 0, "resend": 0})
    fleet.learners = [SteadyLearner(fleet.world, fleet, i, fleet.settings) for i in range(3)]
    return fleet


@pytest.mark.parametrize("seed", [5, 6, 7])
def test_the_bits_of_a_fleet_are_the_same_beside_another_one(monkeypatch, seed):
    """Learners with the same ids and layout dial for another run, again and again."""
    monkeypatch.setattr("tests.sim.fleet.SimLearner", lambda *about: None)
    calm, beside = steady(seed), steady(seed)
    calm.play()
    calm.check()
    other = OtherRun(beside, "red")
    with scaled(beside.settings):
        beside.world.wait(lambda: beside.server.scheduler.global_step >= 1)
    others = [SimLearner(beside.world, other, i, beside.settings) for i in range(3)]
    beside.play()
    beside.check()
    assert [entry[1] for entry in calm.history.current()] == [
        entry[1] for entry in beside.history.current()]
    assert len(other.told) >= 3
    assert all("(run blue)" in told and "(run red)" in told for told in other.told)
    assert all(learner.session.welcome is None for learner in others)
    assert [learner.process for learner in beside.learners] == [1, 1, 1]


def test_a_second_fleet_with_the_same_ids_changes_nothing_for_the_first():
    """Every HELLO of it is refused with both names; nobody of the first one is superseded."""
    fleet = Fleet(5, config=toy_config(learners=3, quorum=3, total_steps=14, run="blue",
                                       log_format="json"), faults=[], settings=CALM)
    second = SecondFleet(fleet, 50 * MS, 1000 * SECOND)
    fleet.play()
    fleet.check()
    assert len(second.answers) > 20
    assert all(b"(run blue)" in answer and b"(run red)" in answer for answer in second.answers)
    said = b"".join(fleet.lines.lines)
    assert b"while its older connection is alive" not in said
    assert said.count(b"learner disconnected") <= 3  # of the end


def test_a_lost_run_goes_on_from_what_learner_0_has_without_a_restart_of_anybody():
    """No checkpoint: the server that follows begins anew."""
    fleet = Fleet(3, config=toy_config(learners=3, total_steps=30), faults=[], settings=CALM)
    with scaled(fleet.settings):
        fleet.world.wait(lambda: fleet.server.scheduler.global_step >= 6)
        fleet.crash("kill")
    fleet.play()
    fleet.check()
    assert "a lost run was begun anew" in fleet.marks
    assert [learner.process for learner in fleet.learners] == [1, 1, 1]
