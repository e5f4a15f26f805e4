"""The table of phases and events against what the scheduler really does, cell by cell."""

import pytest

from syncer.core import actions as act
from syncer.core import events as ev
from syncer.core.run import phases
from syncer.core.run.phases import Handler, Phase
from syncer.errors import InvariantViolation
from tests.toy_driver import ToyDriver, toy_config

CELLS = [(Phase[phase], event, word) for event, words in phases.rows().items()
         for phase, word in zip(phases.phases(), words, strict=True)]
BUDGET = 50


def initialized(**given) -> ToyDriver:
    """Two learners and both of two fragments."""
    driver = ToyDriver(toy_config(learners=2, quorum=2, pipeline=2, total_steps=9, **given), 2)
    for learner in range(2):
        driver.feed(0, driver.hello(learner, 1))
    for fragment in range(2):
        driver.feed(0, driver.init(0, 1, fragment, 0.0))
    return driver


def started(**given) -> ToyDriver:
    """The same with rounds 1 and 2 open."""
    driver = initialized(**given)
    if driver.saving is not None:                # version 0
        driver.feed(0, ev.Saved(driver.saving, 0))
    return driver


def commit(driver: ToyDriver, step: int) -> None:
    """Both learners push and the merge ends; its Synced is still to come."""
    for learner in range(2):
        driver.feed(1, driver.push(learner, 1, step, -1.0))
    driver.feed(1, ev.MergeDone(step, 0, 0.0))


def waiting() -> ToyDriver:
    config = toy_config(learners=2, start_learners=2, max_base_lag=0, total_steps=9)
    driver = ToyDriver(config, 2, ev.Resumed(4, 2, bytes(32), {}))
    driver.feed(0, driver.hello(0, 1))
    return driver


def running() -> ToyDriver:
    driver = started(checkpoint_path="c", checkpoint_every=1, fold="streaming",
                     learner_budget_steps=BUDGET)
    return driver


def saving() -> ToyDriver:
    driver = ToyDriver(toy_config(learners=1, total_steps=1, final_state="f"), 1)
    driver.feed(0, driver.hello(0, 1))
    driver.feed(0, driver.init(0, 1, 0, 0.0))
    driver.feed(1, driver.push(0, 1, 1, -1.0))
    driver.feed(1, ev.MergeDone(1, 0, 0.0))
    return driver


def finishing() -> ToyDriver:
    driver = saving()
    driver.feed(1, ev.Saved(driver.saving, 1))
    return driver


def cutoff() -> ToyDriver:
    driver = started(learner_budget_steps=BUDGET, checkpoint_path="c")
    commit(driver, 1)
    driver.feed(1, ev.BudgetDone(1, 1, BUDGET))
    return driver


def stopping() -> ToyDriver:
    driver = started(checkpoint_path="c", checkpoint_every=8)
    commit(driver, 1)
    driver.feed(1, ev.Stop(15))
    return driver


def ended() -> ToyDriver:
    driver = finishing()
    driver.feed(1, ev.FinalAck(0, 1, 1))
    return driver


MADE = {Phase.WAITING: waiting, Phase.RUNNING: running, Phase.SAVING: saving,
        Phase.FINISHING: finishing, Phase.CUTOFF: cutoff, Phase.STOPPING: stopping,
        Phase.ENDED: ended}
GIVEN = {
    "Tick": lambda d: ev.Tick(),
    "Hello": lambda d: d.hello(0, 9),
    "Misfit": lambda d: ev.Misfit("another session"),
    "NoRoom": lambda d: ev.NoRoom("no space"),
    "Broken": lambda d: ev.Broken("internal error"),
    "Disconnected": lambda d: ev.Disconnected(0, 1),
    "Init": lambda d: d.init(0, 1, 0, 1.0),
    "Heartbeat": lambda d: ev.Heartbeat(0, 1, 5),
    "Push": lambda d: d.push(0, 1, max(1, d.scheduler.next_step - 1), -1.0, local_step=5),
    "Folded": lambda d: ev.Folded(1, 1, 0),
    "CaughtUp": lambda d: ev.CaughtUp(
        0, d.scheduler.members.latest[0], tuple(d.versions)),
    "Stalled": lambda d: ev.Stalled(0, d.scheduler.members.latest[0]),
    "MergeDone": lambda d: ev.MergeDone(1, 0, 0.0),
    "Synced": lambda d: ev.Synced(1, 0),
    "Saved": lambda d: ev.Saved(d.saving or act.SaveKind.ROUND, d.scheduler.global_step),
    "FinalAck": lambda d: ev.FinalAck(0, 1, 1),
    "BudgetDone": lambda d: ev.BudgetDone(0, 1, BUDGET),
    "Stop": lambda d: ev.Stop(15),
}


def arranged(phase: Phase, event: str) -> ToyDriver:
    """A run in this phase in which the event can mean something."""
    driver = MADE[phase]()
    if phase == Phase.RUNNING and event == "Saved":
        commit(driver, 1)
    elif phase == Phase.RUNNING and event in ("Folded", "MergeDone"):
        for learner in range(2 if event == "MergeDone" else 1):
            driver.feed(1, driver.push(learner, 1, 1, -1.0))
    elif phase == Phase.RUNNING and event == "Synced":
        commit(driver, 1)
        driver.feed(1, ev.Saved(driver.saving, 1))
    elif phase == Phase.RUNNING and event in ("CaughtUp", "Stalled"):
        driver.feed(1, ev.Disconnected(0, 1))
        driver.feed(1, driver.hello(0, 2))
    elif phase == Phase.WAITING and event == "Init":
        driver = ToyDriver(toy_config(learners=2), 2)
        driver.feed(0, driver.hello(0, 1))
    elif phase == Phase.WAITING and event == "Saved":
        driver = initialized(checkpoint_path="c", checkpoint_every=1)
    elif phase == Phase.CUTOFF and event == "Saved":
        driver.feed(1, ev.BudgetDone(0, 1, BUDGET))
    return driver


def state(driver: ToyDriver) -> tuple:
    """What an event can change and a person can see."""
    s = driver.scheduler
    members = [(m.key, m.held, m.stalled, m.step_time_s) for m in s.members.members.values()]
    rounds = [(r.step, r.state, r.attempt, r.answered) for r in s.rounds.values()]
    leases = None if s.budget is None else dict(s.budget.leases)
    return (s.phase, members, rounds, leases, s.saves.outstanding, s.saves.wanted, s.global_step,
            s.deadline_ns())


def test_the_table_is_whole():
    """Every phase, every event, and no word without a meaning."""
    assert phases.phases() == [phase.name for phase in Phase]
    names = {kind.__name__ for kind in ev.Event.__args__}
    assert set(phases.rows()) == names == set(GIVEN)
    assert {word for _, _, word in CELLS} == set(phases.MEANING)
    assert {word.upper() for _, _, word in CELLS} - {"-"} == (
        {handler.name for handler in Handler} - {"IGNORE"})


@pytest.mark.parametrize("phase", list(Phase), ids=lambda phase: phase.name)
def test_the_runs_here_are_in_their_phase(phase):
    assert MADE[phase]().scheduler.phase == phase


@pytest.mark.parametrize(("phase", "event", "word"), CELLS,
                         ids=[f"{phase.name}-{event}" for phase, event, _ in CELLS])
def test_a_cell_says_what_happens(phase, event, word):
    driver = arranged(phase, event)
    assert driver.scheduler.phase == phase
    given = GIVEN[event](driver)
    assert phases.handler(phase, given).name == {"-": "IGNORE"}.get(word, word.upper())
    if word == "defect":
        with pytest.raises(InvariantViolation, match=f"in the phase {phase.name}"):
            driver.feed(2, given)
        return
    before = state(driver)
    actions = driver.feed(2, given)
    if word in ("-", "time"):
        assert actions == []
        assert state(driver) == before
    elif word == "release":
        assert actions == [act.Release(given.payload)]
        assert state(driver) == before
    elif word == "progress":                     # of a member: two samples make a step time
        driver.feed(1_000_000_000, given._replace(local_step=6))
        assert state(driver) != before
    elif word == "outlived":
        assert actions == [act.Release(given.payload)]
        driver.feed(1_000_000_000, ev.Heartbeat(0, 1, 6))
        assert state(driver) != before
    elif (word, phase) == ("broken", Phase.STOPPING):
        driver.feed(3, ev.Saved(driver.saving, 1))
        assert (driver.exit.status, driver.exit.text) == (1, given.text)
    else:
        assert actions != [] or state(driver) != before


@pytest.mark.parametrize("learner", [2, 10**9])
def test_a_learner_outside_of_the_roster_is_a_defect(learner):
    driver = ToyDriver(toy_config(learners=2, total_steps=9), 1)
    with pytest.raises(InvariantViolation, match=r"outside of 0\.\.1"):
        driver.feed(0, ev.Hello(1, learner, 1, 1))
