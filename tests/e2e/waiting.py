"""Waiting for something observable, with a generous deadline; never for an amount of time."""

from __future__ import annotations

import time

DEADLINE_S = 60.0


def until(condition, what: str):
    """The first true value of `condition()`."""
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {DEADLINE_S} s"
        time.sleep(0.001)
    return value


def step_until(learner, condition, *, tokens: int = 1):
    """Steps a learner until `condition(status)` holds; that status."""
    found = []

    def step() -> bool:
        found[:] = [learner.step(tokens)]
        return condition(found[0])

    until(step, "the awaited step")
    return found[0]
