"""One of four learners is four times slower: what do quorum and grace make of it?

Goodput is the share of all own steps, of everybody, that is in the merged model. Steps of the fast
ones take a second. The pace counts H steps of the slowest learner; so rows with H 6 merge as often
as a fleet without it does with 24.
"""

from __future__ import annotations

import sys
from typing import Any

from experiments import command
from experiments.model import SIZES
from experiments.tables import straggler as table
from experiments.world import Fleet, Setting

__all__ = ["cells", "measure", "table"]

SIZE, RATE, SECONDS, SEEDS = SIZES["small"], 8e-3, 960, (1, 2, 3)
EQUAL, SLOW = (1.0,), (1.0, 1.0, 1.0, 4.0)
LESS = {"quorum": 3, "grace_ms": 1000}
POLICIES = {
    "nobody is slow, K = M": (EQUAL, 24, {}),
    "K = M": (SLOW, 24, {}),
    "K = M, H 6": (SLOW, 6, {}),
    "K = M - 1, no grace, H 6": (SLOW, 6, LESS | {"grace_ms": 0}),
    "K = M - 1, 1 s of grace, H 6": (SLOW, 6, LESS),
    "K = M - 1, 10 s of grace, H 6": (SLOW, 6, LESS | {"grace_ms": 10_000}),
    "K = M - 1, 1 s of grace, late carry, H 6": (SLOW, 6, LESS | {"late_carry": True}),
    "three learners, without the slow one": (SLOW[:3], 24, {}),
}


def cells(quick: bool) -> list[dict[str, Any]]:
    names, seconds, seeds = (list(POLICIES), SECONDS, SEEDS) if not quick else (
        ["K = M", "K = M - 1, no grace, H 6"], 100, (1,))
    return [{"policy": name, "seed": seed, "seconds": seconds} for name in names for seed in seeds]


def measure(cell: dict[str, Any]) -> dict[str, Any]:
    step_s, h, rounds = POLICIES[cell["policy"]]
    seconds = cell["seconds"]
    learners = 3 if len(step_s) == 3 else 4
    fleet = Fleet(Setting(SIZE, cell["seed"], RATE, learners, 4 * seconds, h=h, step_s=step_s,
                          rounds=rounds))
    fleet.play(lambda: fleet.seconds >= seconds)
    last = fleet.islands[-1]
    entry = fleet.ledger.entries().get(last.learner, (0, 0, 0))
    return cell | {
        "loss": fleet.loss, "goodput": fleet.merged_steps / fleet.own_steps,
        "last_goodput": entry[1] / len(fleet.layout.fragments) / last.steps,
        "steps_a_second": fleet.merged_steps * learners / seconds,
        "commits": len(fleet.ledger.merges)}


if __name__ == "__main__":
    sys.exit(command.main(sys.modules[__name__]))
