"""Time to the same loss on the same link: a run, and synchronous data parallel (DP).

Four learners of the small model, links as for a model of 1,000,000,000 parameters. A step of DP
takes a second or its all-reduce, whichever is longer: 1.5 times the model in bf16 through each link
(a ring of four), all of it hidden behind the arithmetic. No real one is as fast.
"""

from __future__ import annotations

import sys
from typing import Any

from experiments import command, sweep
from experiments.model import data_parallel
from experiments.parity import RATES
from experiments.tables import wall_time as table
from experiments.world import SCALE

__all__ = ["cells", "measure", "table"]

DP = "DP, bf16"
WAYS = {DP: None, "run, H 24, bf16": ("bf16", "bf16"), "run, H 24, q4 both ways": ("q4", "q4")}
SEEDS = (1, 2, 3)


def cells(quick: bool) -> list[dict[str, Any]]:
    if quick:
        return [{"way": way, "link": "1 Gb/s", "seed": 1, "seconds": 40} for way in list(WAYS)[:2]]
    return [{"way": way, "link": link, "seed": seed, "seconds": sweep.SECONDS}
            for way in WAYS for link in sweep.LINKS for seed in SEEDS]


def measure(cell: dict[str, Any]) -> dict[str, Any]:
    formats = WAYS[cell["way"]]
    if formats is None:
        steps = steps_to_target(cell["seed"], 2 * cell["seconds"])
        return cell | {"to_target_s": steps and steps * step_s(sweep.LINKS[cell["link"]])}
    up, down = formats
    found = sweep.measure({"h": 24, "up": up, "down": down, "link": cell["link"],
                           "seed": cell["seed"], "seconds": cell["seconds"]})
    return cell | {"to_target_s": found["to_target_s"]}


def steps_to_target(seed: int, most: int) -> int | None:
    """Looked at as often as a run is."""
    models = data_parallel(sweep.SIZE, seed, sweep.LEARNERS,
                           RATES["small", "dp"][sweep.LEARNERS])
    for step, model in zip(range(1, most + 1), models, strict=False):
        if step % int(sweep.LOOK_S) == 0 and model.bits_per_byte() <= sweep.TARGET:
            return step
    return None


def step_s(bits_per_s: float) -> float:
    """Of DP on such links; 0: of no limit."""
    share = 2 * (sweep.LEARNERS - 1) / sweep.LEARNERS
    return max(1.0, share * 2 * SCALE * 8 / bits_per_s) if bits_per_s else 1.0


if __name__ == "__main__":
    sys.exit(command.main(sys.modules[__name__]))
