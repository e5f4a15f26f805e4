"""What people do to a run between two of its servers: wrong settings, and steps back.

Must not judge what a server does then; it looks at the earlier checkpoints that it has left.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from syncer.checkpoint.history import History as Kept
from syncer.checkpoint.reader import Checkpoint
from syncer.checkpoint.restore import restore
from syncer.config import Config
from syncer.errors import CheckpointError, ConfigError
from syncer.learner.session import Phase
from tests.sim.clock import SECOND
from tests.sim.disk import PATH, Disk, SimFiles

if TYPE_CHECKING:
    from tests.sim.fleet import Fleet
    from tests.sim.learner import SimLearner


def command_line(fleet: Fleet, config: Config) -> Config:
    """The settings that a supervisor has for every process of the run."""
    supervised = fleet.supervised and config.learner_budget_steps is None
    return replace(config, resume="auto") if supervised else config


def start_wrongly(fleet: Fleet, state: dict[str, Any] | None) -> None:
    """With settings that this checkpoint cannot be resumed with: it says so, and no more."""
    config = replace(fleet.config, resume=True, learner_budget_steps=None)
    if state is not None and state["step"] > 0 and fleet.world.chance(0.3):
        config, state = replace(config, resume=False), None
        fleet.marks.add("not begun anew in the place of a run")
    if state is not None:
        others: list[dict[str, Any]] = [{"expected_island_contract": bytes(31) + b"\1"}]
        taken = state["step"] - state["renumbered"]
        if taken > 1:
            others.append({"total_steps": taken - 1})
        if config.checkpoint_format == "safetensors":  # which states them
            others.append({"outer_lr": 0.25})
            others.append({"outer_optimizer": "sgd", "outer_momentum": 0.9, "dn_period": 4,
                           "dn_activation": 0.0} if config.outer_optimizer != "sgd"
                          else {"outer_optimizer": "nesterov"})
        config = replace(config, **fleet.world.rng.choice(others))
    try:
        fleet.start(config, faultless=True)
    except CheckpointError:
        fleet.marks.add("not resumed with other settings" if state else "nothing to resume")
        return
    raise AssertionError(f"resumed with other settings: {config}")


def start_in_vain(fleet: Fleet) -> None:
    """The directory of the checkpoint is away: nothing may begin that is there already."""
    try:
        fleet.start(command_line(fleet, fleet.config), faultless=True)
    except (CheckpointError, ConfigError):
        fleet.marks.add("not started without its directory")
        fleet.replace_server()
        return
    raise AssertionError("a run began although nobody could see its checkpoint")


def go_back(fleet: Fleet) -> None:
    """Now and then somebody takes up an earlier checkpoint, with the command or by hand."""
    check_kept(fleet.disk)
    files = SimFiles(fleet.disk)
    if any(".abandoned-" in name for name in fleet.disk.names):
        fleet.marks.add("set aside")
    known = [step for step in Kept(PATH, 0, files).kept() if step in fleet.history.cuts]
    if PATH not in fleet.disk.names or not known or not fleet.world.chance(0.2):
        return
    fleet.disk.gone_back = True
    name = f"{PATH}.step-{fleet.world.rng.choice(known)}"
    if fleet.world.chance(0.5):
        fleet.marks.add("went back with restore")
        with Checkpoint(name, files) as checkpoint:
            restore(checkpoint, PATH, files)
    else:
        fleet.marks.add("went back with a copy")
        newest = fleet.disk.names[PATH]            # written over, as cp does
        newest.cached[:] = fleet.disk.names[name].cached
        newest.synced, newest.step = bytes(newest.cached), None
    check_kept(fleet.disk)
    fleet.disk.durable_names = dict(fleet.disk.names)


def check_kept(disk: Disk) -> None:
    """13: each earlier checkpoint is whole, of the step in its name, and a file of its own."""
    files = SimFiles(disk)
    for step in Kept(PATH, 0, files).kept():
        name = f"{PATH}.step-{step}"
        assert disk.names[name] is not disk.names.get(PATH), f"13: {name} is the newest one itself"
        with Checkpoint(name, files) as checkpoint:
            assert checkpoint.facts.step == step, f"13: {name} is of step {checkpoint.facts.step}"


def start_again(learner: SimLearner, delay_ns: float) -> None:
    """Somebody starts a learner anew, unless it has done so itself by then."""
    learner.done = False                          # the end that it knows is none of this history

    def start(process: int) -> None:
        if process == learner.process:
            learner.done = False                  # nor is one that it has heard of meanwhile
            learner.restart()

    learner.world.after(delay_ns, start, learner.process)


def start_finished_again(fleet: Fleet) -> None:
    """A run goes on behind a final cut that was out. Who has been let go with it makes no more
    steps; who still waits to be is told so by the server."""
    for learner in fleet.learners:
        if learner.done or learner.session.phase is not Phase.TRAINING:
            fleet.marks.add("trains again after a final cut")
        if learner.done:
            start_again(learner, fleet.world.rng.random() * 20 * SECOND)
