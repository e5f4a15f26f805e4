"""Whether a checkpoint may continue a run; must not load it or change anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from syncer.checkpoint.facts import Facts
from syncer.errors import CheckpointMismatch
from syncer.ranges import (
    DN_ACTIVATION,
    DN_PERIOD,
    OUTER_OPTIMIZER,
    STEP_LR,
    STEP_MOMENTUM,
)

FLAGS = {
    "lr": ("--outer-lr", STEP_LR), "momentum": ("--outer-momentum", STEP_MOMENTUM),
    "dn_period": ("--dn-period", DN_PERIOD), "dn_activation": ("--dn-activation", DN_ACTIVATION),
}
"""Of each constant the flag that sets it, and what that takes."""
VALUE_SHOWN_MAX = 60
NOBODYS = "no setting gives that: the file is of another program or version, or was changed"


def check_resumable(facts: Facts, path: str, *, optimizer: Mapping[str, Any],
                    state: Sequence[str], total_steps: int) -> None:
    """Compares what a run was configured with. Raises `CheckpointMismatch`, which says what was
    expected and found.

    optimizer: as `facts.optimizer_facts` gives it; constants that the file does not state are not
    compared. state: the arrays that this optimizer keeps. Layout, fingerprint and contract are the
    checkpoint's: a learner with others is refused.
    """
    found = facts.optimizer or {"name": "nesterov"}
    if found["name"] != optimizer["name"] or tuple(state) != facts.state:
        known = OUTER_OPTIMIZER.admits(found["name"])
        other = known and found["name"] != optimizer["name"]
        name = found["name"] if known else _shown(found["name"])
        raise CheckpointMismatch(
            f"{path}: outer optimizer: expected {optimizer['name']} ({_arrays(state)}), found "
            f"{name} ({_arrays(facts.state)}); "
            f"{f'resume with --outer-optimizer {name}' if other else NOBODYS}")
    for name, value in found.items():
        if name != "name" and not _same(value, optimizer.get(name)):
            raise CheckpointMismatch(
                f"{path}: outer optimizer: expected {_constant(name, optimizer)}, found "
                f"{_shown(value)}; {_advice(name, value, optimizer)}")
    renumbered = facts.lineage.renumbered
    if facts.step - renumbered > total_steps:
        also = f" and {renumbered} that were added" if renumbered else ""
        raise CheckpointMismatch(
            f"{path}: global_step: expected at most --total-steps {total_steps}{also}, found "
            f"{facts.step}; give more steps or another checkpoint")


def _arrays(state: Sequence[str]) -> str:
    return f"arrays {', '.join(state)}" if state else "no arrays"


def _constant(name: str, optimizer: Mapping[str, Any]) -> str:
    if name in optimizer:
        return f"{name} {optimizer[name]}"
    return f"no {_shown(name, quoted=False)}"


def _shown(value: Any, quoted: bool = True) -> str:
    """Something out of a file: a text in quotes, so that it is no number, and no screenful."""
    if isinstance(value, int) and value.bit_length() > 4 * VALUE_SHOWN_MAX:
        return f"a number of {value.bit_length()} bits"
    words = repr(value)[1:-1] if isinstance(value, str) and not quoted else repr(value)
    return words if len(words) <= VALUE_SHOWN_MAX else f"{words[:VALUE_SHOWN_MAX]}…"


def _advice(name: str, value: Any, optimizer: Mapping[str, Any]) -> str:
    if name in optimizer and name in FLAGS:
        flag, values = FLAGS[name]
        with suppress(OverflowError):
            if values.admits(value):
                return f"resume with {flag} {value}"
    return NOBODYS


def _same(found: Any, expected: Any) -> bool:
    """Equal as merges use it: constants are f32 there."""
    if isinstance(found, bool) or not isinstance(found, int | float) or expected is None:
        return False
    try:
        with np.errstate(over="ignore"):
            return bool(np.float32(found) == np.float32(expected))
    except OverflowError:
        return False
