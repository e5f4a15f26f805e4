"""What a resumed server calls the step that it goes on from (rule 1.8, rule 1.9).

Must not know how it comes to that: it looks at what was shown before, and at what is shown then.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from syncer.config import Config

if TYPE_CHECKING:
    from tests.sim.fleet import Fleet


def asked_for(fleet: Fleet, config: Config, behind: int) -> Config:
    """Somebody who has gone back so many steps may say so."""
    if not (config.resume and fleet.disk.gone_back and fleet.world.chance(0.5)):
        return config
    more = max(0, behind + len(fleet.layout.fragments))
    if not more and config.downlink != "whole":   # which takes no 0
        return config
    return replace(config, renumber=more)


def left_in_vain(fleet: Fleet, config: Config, state: dict[str, Any] | None) -> None:
    """A server that was to begin from this file came no further than to raise its steps."""
    found = None if state is None else fleet.disk.load(config)
    if state is not None and found is not None and found["step"] > state["step"]:
        fleet.marks.add("renumbered in vain")
        fleet.history.raise_steps(state["step"], found["step"] - state["step"], state["cut"],
                                  config.checkpoint_format == "safetensors")
        if config.renumber is None:
            fleet.history.raised_in_vain = found["step"]


def begun_from(fleet: Fleet, state: dict[str, Any], shown_step: int) -> int:
    """A server goes on from this file; returns the step that it begins at.

    No number that was shown is given again, but where an operator goes back and does not say so, or
    the format has no place for it.
    """
    server, config, step = fleet.server, fleet.server.config, state["step"]
    is_left = step - state["renumbered"] < config.total_steps
    fleet.marks.add("resumed" if is_left else "resumed at the end")
    if server.over_before:
        fleet.marks.add("started again after the end")
    by, lasting = server.raised, config.checkpoint_format == "safetensors"
    may_fall_back = not lasting or (
        fleet.disk.gone_back and config.renumber is None and config.checkpoint_every == 1)
    assert by == 0 or step != fleet.history.raised_in_vain or config.renumber is not None, (
        f"1.10: {step} was raised by a start that came no further, and is raised again by {by}")
    fleet.history.raised_in_vain = None
    oldest = step + by - len(fleet.layout.fragments) + 1
    assert may_fall_back or step + by >= shown_step, (
        f"1.8: {shown_step} was shown, and the run goes on at {step} + {by}")
    assert may_fall_back or by == 0 or oldest > shown_step, f"1.8: {oldest} was shown already"
    if by and oldest <= shown_step:
        fleet.other_history = True                # more saves have failed than was room for
    if by:
        fleet.marks.add("renumbered")
        fleet.history.raise_steps(step, by, state["cut"], lasting)
    return step + by
