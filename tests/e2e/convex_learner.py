"""A learner process for tests: least squares on its own rows of one consistent system.

Every learner has other rows, the solution is the same for all, so merged training has to find it.
Prints one line per event; `--hold FILE` stops stepping at `--hold-at` until the file exists.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from syncer.learner import Learner

from .waiting import until

SHAPES = {"embed": (40,), "layers.0.w": (8, 16), "layers.1.w": (8, 16), "bias": (7,)}
ROWS = 400
RATE = 0.1


def solution() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def distance(parameters) -> float:
    """Relative distance from the solution; 1 for all zeros."""
    goal = solution()
    return float(np.sqrt(sum(np.sum((parameters[n] - goal[n]) ** 2) for n in goal)
                         / sum(np.sum(goal[n] ** 2) for n in goal)))


class Problem:
    """Gradient steps on the rows of one learner, block by block."""

    def __init__(self, learner: int):
        rng = np.random.default_rng(learner)
        goal = solution()
        self.rows = {name: rng.standard_normal((ROWS, values.size)).astype(np.float32)
                     for name, values in goal.items()}
        self.sides = {name: self.rows[name] @ values.reshape(-1) for name, values in goal.items()}

    def step(self, parameters: dict[str, np.ndarray]) -> None:
        for name, values in parameters.items():
            rows = self.rows[name]
            residual = rows @ values.reshape(-1) - self.sides[name]
            gradient = (rows.T @ residual).reshape(values.shape)
            np.subtract(values, np.float32(RATE / ROWS) * gradient, out=values)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--server", required=True)
    parser.add_argument("--id", type=int, required=True)
    parser.add_argument("--dtype", default="f32")
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hold", type=Path)
    parser.add_argument("--hold-at", type=int, default=0)
    args = parser.parse_args()

    problem = Problem(args.id)
    parameters = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    with Learner(parameters, args.server, learner_id=args.id, dtype=args.dtype, fragments=3,
                 num_streams=args.streams, min_steps_per_sync=3) as learner:
        learner.save_layout(args.out.with_suffix(".layout"))
        while True:
            problem.step(parameters)
            status = learner.step(tokens=ROWS)
            if status.finished:
                break
            if args.hold and max(status.versions) >= args.hold_at and not args.hold.exists():
                until(args.hold.exists, "the file that ends the hold")
            time.sleep(0.0005)  # the two cores of a small machine are for everybody
        learner.finish()
        np.savez(args.out, **parameters)
        print(f"finished at step {status.step} on {status.versions}", flush=True)


if __name__ == "__main__":
    main()
