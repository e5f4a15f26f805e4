"""A learner that trains nothing and answers every pull; a sync is the whole model once."""

from __future__ import annotations

import time

import numpy as np

from benchmarks.peers.part import given, synced
from syncer.learner import Learner

FRAGMENTS = 8
PORT = 29640
STEP_S = 0.001


def main() -> None:
    part = given()
    parameters = {f"w{f}": np.zeros(part.numel // FRAGMENTS, np.float32) for f in range(FRAGMENTS)}
    applied = 0
    with Learner(parameters, f"{part.hub}:{PORT}", learner_id=part.rank,
                 dtype=part.form.partition(" ")[0], fragments=FRAGMENTS) as learner:
        while not (status := learner.step(tokens=1)).finished:
            for _ in status.applied:
                applied += 1
                if applied % FRAGMENTS == 0:
                    synced(part.world)
            time.sleep(STEP_S)


if __name__ == "__main__":
    main()
