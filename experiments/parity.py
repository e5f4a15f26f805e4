"""Does a run train as well as synchronous data parallel at equal tokens?

One, two, four and eight learners that merge a fragment every 24 own steps, against as many that
average their gradients at every step (DP), with the same batches, the same AdamW and, to the step,
the same number of tokens. Two model sizes, three seeds. Everything else is the server's default.

The inner learning rate of every row is the best of `TRIED` on another seed, for both sides:

    python -m experiments.parity --tune
"""

from __future__ import annotations

import sys
from typing import Any

from experiments import command
from experiments.model import SIZES, synchronous
from experiments.tables import parity as table
from experiments.world import Fleet, Setting

__all__ = ["cells", "measure", "table"]

SEEDS = (1, 2, 3)
LEARNERS = (1, 2, 4, 8)
STEPS = 960
TUNING_SEED = 100
TRIED = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
RATES: dict[tuple[str, str], dict[int, float]] = {
    ("small", "run"): {1: 0.004, 2: 0.004, 4: 0.008, 8: 0.008},
    ("small", "dp"): {1: 0.008, 2: 0.008, 4: 0.016, 8: 0.016},
    ("large", "run"): {1: 0.002, 2: 0.002, 4: 0.004, 8: 0.004},
    ("large", "dp"): {1: 0.004, 2: 0.004, 4: 0.004, 8: 0.008},
}
"""(size, kind) -> the best of TRIED by number of learners, as `--tune` says."""


def cells(quick: bool) -> list[dict[str, Any]]:
    steps, learners, seeds = (48, (1, 2), (1,)) if quick else (STEPS, LEARNERS, SEEDS)
    return [{"size": size, "learners": m, "seed": seed, "steps": steps}
            for size in SIZES for m in learners for seed in seeds]


def measure(cell: dict[str, Any]) -> dict[str, Any]:
    size, m = cell["size"], cell["learners"]
    fleet = played(size, m, cell["seed"], cell["steps"], RATES[size, "run"][m])
    steps = round(fleet.own_steps)
    bound = synchronous(SIZES[size], cell["seed"], m, RATES[size, "dp"][m], steps)
    return cell | {"loss": fleet.loss, "bound": bound, "own_steps": fleet.own_steps}


def played(size: str, learners: int, seed: int, steps: int, rate: float) -> Fleet:
    fleet = Fleet(Setting(SIZES[size], seed, rate, learners, steps))
    fleet.play()
    return fleet


def tune() -> None:
    """Prints `RATES`, and what each of `TRIED` gives."""
    for size in SIZES:
        for kind in ("run", "dp"):
            best = {}
            for m in LEARNERS:
                losses = {rate: played(size, m, TUNING_SEED, STEPS, rate).loss if kind == "run"
                          else synchronous(SIZES[size], TUNING_SEED, m, rate, STEPS)
                          for rate in TRIED}
                best[m] = min(losses, key=losses.get)
                said = "  ".join(f"{rate:g}: {loss:.3f}" for rate, loss in losses.items())
                print(f"{size:5} {kind:3} {m}   {said}", flush=True)
            print(f"    {(size, kind)!r}: {best!r},", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--tune"]:
        tune()
    else:
        sys.exit(command.main(sys.modules[__name__]))
