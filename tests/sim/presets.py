"""What each preset makes of the fleet that it is for, beside the defaults, for the docs.

The scheduler alone in simulated time, as in `large`. `python docs/generate.py` writes the table.
"""

from __future__ import annotations

import numpy as np

from syncer.config.presets import PRESETS
from syncer.core import events as ev
from syncer.flags import resolve
from tests.sim.large import SECOND, LargeFleet

LEARNERS, FRAGMENTS = 8, 8
KINDS = {"local": (0.005, 0.002), "regions": (1.0, 1.0), "spot": (0.5, 0.2),
         "reproducible": (0.5, 0.05)}
"""Preset -> seconds of a step and of an upload in its fleet; the last learner may be otherwise."""
MINUTES = {"local": 0.25}
"""Simulated, if not 10: rounds of milliseconds are many."""
TROUBLES = ("", "one at a quarter of the speed", "one silent")


class SmallFleet(LargeFleet):
    """`LEARNERS` equal learners but for the last; a silent one is connected and answers nothing."""

    def __init__(self, preset: str | None, kind: str, trouble: str):
        given = {"learners": str(LEARNERS), "total_steps": str(10**9), "quorum_timeout_s": "60",
                 "delta_correction": "none"}
        step_s, upload_s = KINDS[kind]
        self.silent = {LEARNERS - 1} if trouble == TROUBLES[2] else set()
        self.pushed = 0
        super().__init__(resolve(given | ({"preset": preset} if preset else {}), {}), FRAGMENTS,
                         step_s, upload_s, 0.05)
        self.upload_ns = upload_s * SECOND * np.exp(self.rng.normal(0, 0.3, LEARNERS))
        self.merge_ns = int(step_s * SECOND / 10)
        if trouble == TROUBLES[1]:
            self.step_ns[-1] *= 4
            self.upload_ns[-1] *= 4

    def answers(self, pull) -> None:
        here = tuple(member for member in pull.members if member[0] not in self.silent)
        if here:
            super().answers(pull._replace(members=here))

    def feed(self, event) -> None:
        self.pushed += isinstance(event, ev.Push)
        super().feed(event)


def row(preset: str | None, kind: str) -> str:
    minutes = MINUTES.get(kind, 10)
    cells = []
    for trouble in TROUBLES:
        fleet = SmallFleet(preset, kind, trouble)
        fleet.run(int(minutes * 60 * SECOND))
        merged = sum(record["sync/responders"] for record in fleet.tape)
        cells.append(f"{len(fleet.tape) / minutes:,.0f} | {merged / max(fleet.pushed, 1):.0%}")
    name = f"`{preset}`" if preset else "none"
    step_s, upload_s = KINDS[kind]
    return (f"| {name} | {step_s * 1000:,.0f} ms, {upload_s * 1000:,.0f} ms | "
            + " | ".join(cells) + " |")


def table() -> str:
    """Commits a minute and the share of pushes that was merged, of each preset and the defaults."""
    lines = ["| preset | step, upload | commits/min | merged | one slow: commits/min | merged | "
             "one silent: commits/min | merged |", "|---" * 8 + "|"]
    for kind in PRESETS:
        lines += [row(kind, kind), row(None, kind)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
