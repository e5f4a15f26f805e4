"""A learner of the lab: it trains nothing, answers every pull, and says when what arrived.

    python -m benchmarks.lab.learner ADDRESS ID DTYPE FRAGMENTS NUMEL

Prints one JSON list at the end: [monotonic seconds, fragment, version] of each broadcast applied.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from syncer.learner import Learner

STEP_S = 0.001


def main(address: str, learner_id: str, dtype: str, fragments: str, numel: str) -> None:
    parameters = {f"w{f}": np.zeros(int(numel), np.float32) for f in range(int(fragments))}
    applied = []
    with Learner(parameters, address, learner_id=int(learner_id), dtype=dtype,
                 fragments=int(fragments)) as learner:
        while True:
            status = learner.step(tokens=1)
            applied += [(time.monotonic(), *each) for each in status.applied]
            if status.finished:
                break
            time.sleep(STEP_S)
        learner.finish()
    print(json.dumps(applied))


if __name__ == "__main__":
    main(*sys.argv[1:])
