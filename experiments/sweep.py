"""What do H and the format on the wire cost, and what do they buy on a slow link?

Four learners, steps of one second, links as for a model of 1,000,000,000 parameters. Nobody waits
for a link: a slower one means rarer merges. So each cell is a run of so many seconds, its loss at
the end, and when it had come down to `TARGET`, until twice as long. Times and links count from the
moment when everybody has the first values.
"""

from __future__ import annotations

import sys
from typing import Any

from experiments import command
from experiments.model import SIZES
from experiments.tables import sweep as table
from experiments.world import Fleet, Setting

__all__ = ["cells", "measure", "table"]

SIZE, RATE, LEARNERS, SECONDS = SIZES["small"], 8e-3, 4, 960
SEEDS = (1, 2)
"""The second one where losses are compared: without a bottleneck."""
H = (2, 8, 24, 96)
FED_BACK = ", fed back"
FORMATS = (("f32", "f32"), ("bf16", "bf16"), ("bf16", "q4"), ("q4", "bf16"), ("q4", "q4"),
           ("q4" + FED_BACK, "bf16"), ("q4" + FED_BACK, "q4"))
"""Up and down; with error feedback or without."""
FREE = "no limit"
LINKS = {FREE: 0.0, "1 Gb/s": 1e9, "100 Mb/s": 1e8}
LOOK_S = 8.0
TARGET = 3.3
"""Bits per byte: what bf16 with H 24 has after about 600 s on a link that is no bottleneck."""


def cells(quick: bool) -> list[dict[str, Any]]:
    if quick:
        return [{"h": 8, "up": "q4" + FED_BACK, "down": "q4", "link": "1 Gb/s", "seed": 1,
                 "seconds": 48}]
    return [{"h": h, "up": up, "down": down, "link": link, "seed": seed, "seconds": SECONDS}
            for h in H for up, down in FORMATS for link in LINKS
            for seed in (SEEDS if link == FREE else SEEDS[:1])]


def measure(cell: dict[str, Any]) -> dict[str, Any]:
    seconds = cell["seconds"]
    whole = {"downlink": "q4"} if cell["down"] == "q4" else {}
    fleet = Fleet(Setting(
        SIZE, cell["seed"], RATE, LEARNERS, 4 * seconds, h=cell["h"],
        dtype=cell["up"].removesuffix(FED_BACK), feeds_back=cell["up"].endswith(FED_BACK),
        bits_per_s=LINKS[cell["link"]], look_s=LOOK_S, rounds=whole))
    fleet.play(lambda: fleet.seconds >= seconds)
    up, down = fleet.bytes_per_parameter
    found = {"loss": fleet.loss, "commits": len(fleet.ledger.merges), "up_bytes": up,
             "down_bytes": down}

    def reached() -> float | None:
        return next((at for at, loss in fleet.curve if loss <= TARGET), None)

    if reached() is None:
        fleet.play(lambda: fleet.seconds >= 2 * seconds or reached() is not None)
    return cell | found | {"to_target_s": reached()}


if __name__ == "__main__":
    sys.exit(command.main(sys.modules[__name__]))
