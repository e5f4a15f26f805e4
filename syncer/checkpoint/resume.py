"""Whether a checkpoint may continue a run; must not load it or change anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from syncer.checkpoint.facts import Facts
from syncer.errors import CheckpointMismatch


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
        raise CheckpointMismatch(
            f"{path}: outer optimizer: expected {optimizer['name']} ({_arrays(state)}), found "
            f"{found['name']} ({_arrays(facts.state)}); resume with --outer-optimizer "
            f"{found['name']}")
    for name, value in found.items():
        if name != "name" and not _same(value, optimizer.get(name)):
            flag = {"lr": "--outer-lr", "momentum": "--outer-momentum"}.get(
                name, "--" + name.replace("_", "-"))
            raise CheckpointMismatch(
                f"{path}: outer optimizer: expected {name} {optimizer.get(name)}, found {value}; "
                f"resume with {flag} {value}")
    if facts.step > total_steps:
        raise CheckpointMismatch(
            f"{path}: global_step: expected at most --total-steps {total_steps}, found "
            f"{facts.step}; give more steps or another checkpoint")


def _arrays(state: Sequence[str]) -> str:
    return f"arrays {', '.join(state)}" if state else "no arrays"


def _same(found: Any, expected: Any) -> bool:
    """Equal as merges use it: constants are f32 there."""
    if isinstance(found, bool) or not isinstance(found, int | float) or expected is None:
        return False
    try:
        with np.errstate(over="ignore"):
            return bool(np.float32(found) == np.float32(expected))
    except OverflowError:
        return False
