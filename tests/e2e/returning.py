"""Real learners of a 64 MiB model that come back: after a drop, and to a server that was restarted.

Measures for a test and a benchmark; must not judge.
"""

import math
import signal
import threading
from typing import NamedTuple

import numpy as np

from syncer.learner import Learner

from .forgetful import ForgetfulProxy
from .scripted import ServerProcess
from .waiting import until

LEARNERS, FRAGMENTS, NUMEL, STEPS = 4, 8, 1 << 21, 6
MODEL_BYTES = 4 * FRAGMENTS * NUMEL


class Bytes(NamedTuple):
    """What learners received."""

    whole: int
    """One that has nothing: a catch-up."""
    drop: int
    """One whose link was away."""
    restart: int
    """The one that received most, of all, when the server was started again."""


def model() -> dict[str, np.ndarray]:
    return {f"layer.{i}.weight": np.zeros(NUMEL, np.float32) for i in range(FRAGMENTS)}


def join(port: int, learner: int) -> Learner:
    return Learner(model(), f"127.0.0.1:{port}", learner_id=learner, dtype="f32", run="blue",
                   fragments=FRAGMENTS, num_streams=2)


def train(learners: list[Learner], step: int) -> None:
    """Until every learner has answered the pull of a step, and none a later one."""
    left = list(learners)

    def answered(learner: Learner) -> bool:
        return any(found == step for _, found in learner.step(1).answered)

    def all_answered() -> bool:
        left[:] = [each for each in left if not answered(each)]
        return not left

    until(all_answered, f"step {step}")


def settled(learners: list[Learner]) -> list[int]:
    """Bytes received so far, once nothing more comes: all wait for steps, which nobody makes."""
    def same() -> bool:  # a pull may overtake the broadcast that it is about
        asked = {max((pull.step for pull in each._session.pulls), default=0) for each in learners}
        newest = {max(seen[0] for seen in each._session.accepted if seen) for each in learners}
        return len(asked) == len(newest) == 1 and asked == {newest.pop() + 1}

    until(same, "the same pull and the step before it at every learner")
    return [each.bytes_received for each in learners]


def generations(learners: list[Learner]) -> list[int | None]:
    return [each._session.last_generation if each._client.connected else None for each in learners]


def returned(learners: list[Learner], before: list[int | None]) -> None:
    """Every one of them is connected anew, and asked again for what is still missing."""
    until(lambda: all(now not in (None, old) for now, old in zip(
        generations(learners), before, strict=True)), "new connections")
    settled(learners)


def measured(directory, away_s: float) -> Bytes:
    """Four learners that all are waited for; the link of one of them is away for a while."""
    flags = ("--checkpoint-path", str(directory / "c"), "--checkpoint-every", "1", "--quorum",
             str(LEARNERS), "--sync-interval-steps", "0", "--pipeline", "1", "--run", "blue")
    with (ServerProcess(directory, *flags, learners=LEARNERS, steps=STEPS) as server,
          ForgetfulProxy(server.port, idle_s=math.inf, notice_s=math.inf, every_s=math.inf,
                         seed=0) as link):
        learners = [join(link.port if learner == 2 else server.port, learner)
                    for learner in range(LEARNERS)]
        train(learners, 3)
        before, old = settled(learners), generations(learners)
        link.away = True
        until(lambda: not learners[2]._client.connected, "the drop")
        threading.Event().wait(away_s)
        link.away = False
        returned([learners[2]], [old[2]])
        drop = learners[2].bytes_received - before[2]
        before, old = settled(learners), generations(learners)
        server.signal(signal.SIGTERM)
        assert server.wait() == 128 + signal.SIGTERM
        with ServerProcess(directory, *flags, "--resume", "--port", str(server.port),
                           learners=LEARNERS, steps=STEPS) as second:
            returned(learners, old)
            restart = max(each.bytes_received - was
                          for each, was in zip(learners, before, strict=True))
            with join(second.port, 3) as late:  # one that has nothing
                late.adopt()
                whole = late.bytes_received
            for each in learners:
                each.close()
    return Bytes(whole, drop, restart)
