"""The outer step: learning rate, momentum, a warm-up, a rate of each fragment, and the blend.

Four learners of the small model and eight of the large one, H 24, K = M. Warm-up raises the outer
learning rate linearly over so many merges of a fragment; a rate by fragment is of the averaged one
(embedding and head) and of the others. Neither is a flag of the server: here its store is told so
before each merge.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from experiments import command
from experiments.model import SIZES
from experiments.parity import RATES
from experiments.tables import outer as table
from experiments.world import Fleet, Setting

__all__ = ["cells", "measure", "table"]

STEPS, SEEDS = 960, (1, 2)
FLEETS = {"small": 4, "large": 8}
DEFAULT = 0.7
Rate = Callable[[int, int], float]
"""(fragment, merges of it before) -> outer learning rate."""
VARIANTS: dict[str, tuple[dict[str, Any], float, Rate | None]] = {
    "0.7, momentum 0.9 (default)": ({}, 0.5, None),
    "0.55": ({"outer_lr": 0.55}, 0.5, None),
    "0.4": ({"outer_lr": 0.4}, 0.5, None),
    "0.25": ({"outer_lr": 0.25}, 0.5, None),
    "0.7, momentum 0.8": ({"outer_momentum": 0.8}, 0.5, None),
    "0.5, momentum 0.8": ({"outer_lr": 0.5, "outer_momentum": 0.8}, 0.5, None),
    "0.7, warm-up over 10 merges": ({}, 0.5, lambda f, n: DEFAULT * min(1.0, (n + 1) / 10)),
    "0.4, warm-up over 10 merges": ({}, 0.5, lambda f, n: 0.4 * min(1.0, (n + 1) / 10)),
    "averaged fragment 0.4, others 0.7": ({}, 0.5, lambda f, n: DEFAULT if f else 0.4),
    "averaged fragment 0.7, others 0.4": ({}, 0.5, lambda f, n: 0.4 if f else DEFAULT),
    "0.7, alpha 0.25": ({}, 0.25, None),
    "0.4, alpha 0.25": ({"outer_lr": 0.4}, 0.25, None),
}
"""Flags of the server, alpha of the learners, and the outer learning rate where it changes."""


def cells(quick: bool) -> list[dict[str, Any]]:
    if quick:
        return [{"variant": name, "size": "small", "learners": 2, "seed": 1, "steps": 48}
                for name in ("0.4", "0.7, warm-up over 10 merges")]
    return [{"variant": name, "size": size, "learners": learners, "seed": seed, "steps": STEPS}
            for name in VARIANTS for size, learners in FLEETS.items() for seed in SEEDS]


def measure(cell: dict[str, Any]) -> dict[str, Any]:
    rounds, alpha, rate = VARIANTS[cell["variant"]]
    size, learners = cell["size"], cell["learners"]
    fleet = Fleet(Setting(SIZES[size], cell["seed"], RATES[size, "run"][learners], learners,
                          cell["steps"], alpha=alpha, rounds=rounds))
    if rate is not None:
        fleet.play(lambda: fleet.began_ns is not None)
        follow(fleet.server.server.session.merging.store, rate)
    fleet.play()
    return cell | {"loss": fleet.loss}


def follow(store: Any, rate: Rate) -> None:
    """Each merge of this store takes its outer step at the rate of its fragment and moment."""
    prepare, constants = store.prepare, store._constants

    def prepare_at_rate(fragment: int, *given: Any, **more: Any) -> Any:
        merges = store.current(fragment).commits
        store._constants = replace(constants, lr=rate(fragment, merges))
        return prepare(fragment, *given, **more)

    store.prepare = prepare_at_rate


if __name__ == "__main__":
    sys.exit(command.main(sys.modules[__name__]))
