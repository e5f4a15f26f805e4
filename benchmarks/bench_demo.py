"""Round rate of the demo: real server, real learner, real TCP, against the learner training alone.

Without pacing the server launches a round as soon as the pipeline has room, and a learner answers
at its next step boundary: own steps per round say how much a whole round (pull, push, merge, outer
step, broadcast) costs beside one training step. The second figure is what taking part costs: own
steps per second in a run at the demo's pace, against the same learner without a server.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import pytest

from syncer.demo.processes.fleet import Fleet
from syncer.demo.run_plan import RunPlan
from syncer.demo.show.watch import RunWatch, TapeReader

STEPS_ALONE = 400
DEADLINE_S = 300.0


def train_alone() -> float:
    """Own steps per second of one learner without a server."""
    watch = RunWatch(1, 1)
    watch.baseline = watch.learners[0]
    with Fleet() as fleet:
        child = fleet.start("learner", "syncer.demo.learner",
                            RunPlan(learners=1).baseline_arguments(STEPS_ALONE), 0)
        pump(fleet, lambda line: watch.baseline_line(line.text), lambda: not child.alive)
    return watch.baseline.end["step"] / watch.baseline.end["seconds"]


def train_together(rounds: int, extra: dict[str, object]) -> tuple[float, float]:
    """(rounds per second, own steps per second) of one learner and a server."""
    plan = RunPlan(learners=1, steps=rounds)
    watch = RunWatch(1, rounds)
    with tempfile.TemporaryDirectory() as scratch, Fleet() as fleet:
        tape = TapeReader(Path(scratch, "tape"))
        words = plan.server_arguments(str(Path(scratch, "final")), str(tape.path))
        words += [word for name, value in extra.items() for word in (f"--{name}", str(value))]
        server = fleet.start("server", "syncer.server", words)

        def heard(line) -> None:
            if line.child is server:
                watch.server_line(line.text)
            elif line.stream == "stdout":
                watch.learner_line(0, line.text)

        pump(fleet, heard, lambda: watch.port is not None)
        watch.learners[0].started()
        learner = fleet.start("learner", "syncer.demo.learner",
                              plan.learner_arguments(0, watch.port, 0), 0)
        pump(fleet, heard, lambda: not (server.alive or learner.alive))
        assert (server.status, learner.status) == (0, 0), server.complaints
        assert [record["step"] for record in tape.read() if "step" in record][-1] == rounds
    end = watch.learners[0].end
    return rounds / end["seconds"], end["step"] / end["seconds"]


def pump(fleet: Fleet, heard, reached) -> None:
    """Hands lines to `heard` until `reached()`."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < deadline_s, f"not within {DEADLINE_S} s"
        for happened in fleet.poll(0.05):
            if hasattr(happened, "text"):
                heard(happened)


@pytest.mark.parametrize(("pace", "rounds", "extra"), [
    ("unpaced", 200, {"sync-interval-steps": 0}), ("demo pace", 30, {}),
])  # fmt: skip
def test_demo_round_rate(benchmark, pace, rounds, extra):
    """One run together between two runs alone, so that a drift of the machine shows less."""
    before = train_alone()
    rounds_per_s, steps_per_s = benchmark.pedantic(train_together, (rounds, extra), rounds=1)
    alone = (before + train_alone()) / 2
    benchmark.extra_info.update(
        rounds_per_s=rounds_per_s, own_steps_per_round=steps_per_s / rounds_per_s,
        own_steps_alone_per_s=alone, ratio_to_training_alone=steps_per_s / alone)
    print(f"\ndemo, {pace}: {rounds_per_s:.1f} rounds/s, {steps_per_s / rounds_per_s:.2f} own "
          f"steps per round; training goes on at {steps_per_s / alone:.2f} of its speed alone "
          f"({alone:.0f} steps/s)")
