"""A learner process that trains, with a step every few milliseconds, until it is ended.

    python -m tests.e2e.endless_learner HOST:PORT ID [ROWS]

ROWS: rows of 1,000 parameters that are trained beside a few others.
"""

import sys
import time

import numpy as np

from syncer.learner import Learner


def main() -> None:
    address, learner_id = sys.argv[1], int(sys.argv[2])
    rng = np.random.default_rng(learner_id)
    rows = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    parameters = {"a.weight": np.zeros((rows, 1000), np.float32), "b.bias": np.zeros(9, np.float32)}
    with Learner(parameters, address, learner_id=learner_id, dtype="f32", fragments=1,
                 num_streams=1) as learner:
        while not learner.step(tokens=1).finished:
            for values in parameters.values():
                np.add(values, np.float32(0.01) * rng.standard_normal(values.shape, np.float32),
                       out=values)
            time.sleep(0.01)
        learner.finish()


if __name__ == "__main__":
    main()
