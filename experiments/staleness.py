"""Four learners of very different speed: which treatment of their deltas trains best?

Steps of 0.58, 0.75, 1.51 and 3.33 s, the server's own quorum of one and grace of a second, H 8 of
the slowest. On links without a limit the slow ones miss rounds; on links of 1 Gb/s (for a model
of 1,000,000,000 parameters, bf16) everybody is behind, since a broadcast is long on its way.
"""

from __future__ import annotations

import sys
from typing import Any

from experiments import command
from experiments.model import SIZES
from experiments.tables import staleness as table
from experiments.world import Fleet, Setting

__all__ = ["cells", "measure", "table"]

SIZE, RATE, SECONDS, SEEDS, H = SIZES["small"], 8e-3, 960, (1, 2, 3), 8
STEP_S = (0.58, 0.75, 1.51, 3.33)
LINKS = {"no limit": 0.0, "1 Gb/s": 1e9}
ROUNDS: dict[str, Any] = {"quorum": 1, "grace_ms": 1000}
DELAYED = {"outer_optimizer": "delayed-nesterov"}
VARIANTS: dict[str, dict[str, Any]] = {
    "HeLoCo, kappa 3 (default)": {},
    "HeLoCo, kappa 0.3": {"heloco_kappa": 0.3},
    "no correction": {"delta_correction": "none"},
    "HeLoCo, late carry": {"late_carry": True},
    "no correction, late carry": {"delta_correction": "none", "late_carry": True},
    "HeLoCo, delayed Nesterov": DELAYED,
    "no correction, delayed Nesterov": DELAYED | {"delta_correction": "none"},
    "HeLoCo, grace of 4 s": {"grace_ms": 4000},
}


def cells(quick: bool) -> list[dict[str, Any]]:
    names, seconds, seeds = (list(VARIANTS), SECONDS, SEEDS) if not quick else (
        list(VARIANTS)[:2], 60, (1,))
    return [{"variant": name, "link": link, "seed": seed, "seconds": seconds}
            for name in names for link in LINKS for seed in seeds]


def measure(cell: dict[str, Any]) -> dict[str, Any]:
    seconds = cell["seconds"]
    fleet = Fleet(Setting(
        SIZE, cell["seed"], RATE, len(STEP_S), 4 * seconds, h=H, dtype="bf16", step_s=STEP_S,
        bits_per_s=LINKS[cell["link"]], rounds=ROUNDS | VARIANTS[cell["variant"]]))
    fleet.play(lambda: fleet.seconds >= seconds)
    return cell | {"loss": fleet.loss, "goodput": fleet.merged_steps / fleet.own_steps,
                   "commits": len(fleet.ledger.merges)}


if __name__ == "__main__":
    sys.exit(command.main(sys.modules[__name__]))
