"""What a demo run is to do: the flags of `syncer demo`, and the server's flags that follow.

Arithmetic only; must not start, read or write anything.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from syncer.demo import settings


class RunPlan(NamedTuple):
    """One run. Either the number of merges or a time budget, or both, end it."""

    learners: int = settings.LEARNERS
    steps: int | None = None
    """Outer steps; own steps set their pace."""
    seconds: float | None = None
    """Training time after which the run ends."""
    dtype: str = settings.DTYPE
    seed: int = settings.SEED
    kill_one: bool = False
    baseline: bool = False
    json: str | None = None
    plot: str | None = None
    torch: bool = False
    """Learners train a GPT in PyTorch."""

    @property
    def paced_by_time(self) -> bool:
        """Without a number of steps, merges are spread evenly over the time budget."""
        return self.steps is None

    @property
    def total_steps(self) -> int:
        """Outer steps of the server."""
        if self.steps is not None:
            return self.steps
        return max(settings.MERGES_MIN, round(self.spread_s / settings.MERGE_INTERVAL_S))

    @property
    def spread_s(self) -> float:
        """Seconds that merges are spread over when a time budget sets the pace."""
        return settings.PACED_SHARE * (self.seconds or settings.SECONDS)

    @property
    def merge_interval_ms(self) -> int:
        """Shortest time between two launches; 0 when own steps set the pace."""
        if not self.paced_by_time:
            return 0
        return math.floor(1000 * self.spread_s / self.total_steps)

    @property
    def kill_at(self) -> int:
        """Outer step after which --kill-one kills."""
        return max(1, self.total_steps // 2)

    @property
    def return_at(self) -> int:
        """Outer step after which the killed learner is started again: some go on without it."""
        if self.learners == 1:
            return self.kill_at
        return min(self.total_steps - 1, self.kill_at + math.ceil(self.total_steps / 20))

    def server_arguments(self, final_state: str, event_tape: str) -> list[str]:
        """The command line of the server, on a port that the system chooses."""
        pace = 0 if self.paced_by_time else settings.SYNC_INTERVAL_STEPS
        flags = {
            "host": "127.0.0.1", "port": 0, "learners": self.learners,
            "total-steps": self.total_steps, "preset": settings.DEMO_PRESET,
            "sync-interval-steps": pace,
            "min-round-interval-ms": self.merge_interval_ms,
            "quorum-timeout-s": settings.QUORUM_TIMEOUT_S,
            "final-ack-timeout-s": settings.FINAL_ACK_TIMEOUT_S,
            "outer-lr": settings.OUTER_LR, "outer-momentum": settings.OUTER_MOMENTUM,
            "final-state": final_state, "event-tape": event_tape, "log-level": "info",
            "log-format": "json",
        }
        return [word for name, value in flags.items() for word in (f"--{name}", str(value))]

    def learner_arguments(self, learner: int, port: int, first_step: int) -> list[str]:
        """The command line of a learner that joins the server."""
        return ["--server", f"127.0.0.1:{port}", "--first-step", str(first_step),
                "--dtype", self.dtype, *self._common_arguments(learner)]

    def baseline_arguments(self, steps: int) -> list[str]:
        """The command line of learner 0 as it would be without the others: same text, same seed."""
        return ["--alone", str(steps), *self._common_arguments(0)]

    def _common_arguments(self, learner: int) -> list[str]:
        return ["--id", str(learner), "--shards", str(self.learners), "--seed", str(self.seed),
                "--report", "json", *["--torch"] * self.torch]
