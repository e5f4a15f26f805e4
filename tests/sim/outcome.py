"""Whether a simulated run was in order: who may be told off in it, and what it leaves behind.

Reads a fleet and its history; must not change anything but its marks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sim.disk import PATH
from tests.sim.introduced import tells_of_another_run
from tests.sim.marks import SAID
from tests.sim.told import check_generations, check_tape

if TYPE_CHECKING:
    from tests.sim.fleet import Fleet
    from tests.sim.learner import SimLearner

GONE_ON = ("trains again after a final cut", "went on after the end", "went back with restore",
           "went back with a copy")
"""Marks of a run that is not at the end any more which somebody has got."""


def look_refused(fleet: Fleet, learner: SimLearner, error: Exception) -> None:
    """A learner was told off: only for what it did, which the faults of this run explain.

    After a roll back it may also see another version of the same number, or, if it has introduced
    itself, a run that begins anew; and its end may be none any more.
    """
    fleet.marks.add("a learner was refused")
    text = str(error)
    if "the final cut" in text and (
            fleet.other_history or any(mark in fleet.marks for mark in GONE_ON)):
        fleet.marks.add("told that its end is none any more")
        return
    if fleet.other_history and tells_of_another_run(fleet, error):
        return
    twice = "duplicate connection generation" in text and "stranger" in fleet.faults
    false = "BUDGET_DONE" in text and "false_report" in fleet.faults
    assert (learner.misconfigured or "garbage" in fleet.faults or twice or false
            or (fleet.other_history and "other bytes" in text)), (
                f"learner {learner.learner}: {error}")


def check(fleet: Fleet) -> None:
    """Every step is merged once and told once, and everybody who has the end has the same."""
    server, config, history = fleet.server, fleet.config, fleet.history
    if not fleet.settings["hello_inline"]:
        fleet.marks.add("HELLOs are read on the workers")
    said = b"".join(fleet.lines.lines)
    for words, mark in SAID.items():
        if words in said:
            fleet.marks.add(mark)
    check_generations(fleet)
    if not server.complete:
        assert "no learner is connected" in server.exit_text, server.exit_text
        assert not config.fixed_roster
        return
    count = len(fleet.layout.fragments)
    merged = [merge.fragment for merge in history.merges]
    taken = config.total_steps - sum(history.short.values())
    assert merged == [t % count for t in range(taken)], merged
    steps = [merge.step for merge in history.merges]
    assert steps == sorted(set(steps)), steps
    assert fleet.last_step == server.scheduler.global_step
    assert server.scheduler.ledger == history.ledger()
    check_tape(fleet)
    final = [params for _, params, _ in history.current()]
    check_disk(fleet, final)
    assert server.over_before or server.scheduler.final_cut.acknowledged, "nobody has the result"
    for learner in fleet.learners:
        if learner.done:
            for fragment, values in enumerate(learner.values):
                assert values.tobytes() == final[fragment], (
                    f"learner {learner.learner} ends with other values than the server")


def check_disk(fleet: Fleet, final: list[bytes]) -> None:
    """The file holds the end of the run, and its marker says so if one was asked for."""
    if not fleet.saves:
        return
    disk, server = fleet.disk, fleet.server
    assert disk.durable_step() == fleet.last_step
    state = disk.load(fleet.config)
    assert [entry[1].tobytes() for entry in state["cut"]] == final
    assert state["ledger"] == server.scheduler.ledger
    marked = fleet.last_step if fleet.config.mark_final_checkpoint else None
    assert disk.marked_step() == marked
    left = [name for name in disk.names if name.endswith(".tmp")]
    troubled = server.system.files.troubled or fleet.lost_processes
    assert not left or troubled, f"left behind: {left}"
    assert PATH in disk.durable_names
