"""A learner that is through before the run is: when it leaves the rounds, and when it looks again.

Must not wait, send or know a clock. Such a learner can answer no pull: it makes no step any more on
the anchors that come (wire 3.3: `c_steps` is at least one). While rounds close without it, it stays
where the final cut will be sent: nobody else knows when that is, and who is away then is not
expected. A round that cannot close without it would be launched again and again, each time dropping
what the others have answered; so it goes, and comes back from time to time to see whether the run
has ended. Where the server has said that a quorum is everybody, there is nothing to find out: no
round closes without it, and it goes as soon as it is asked.
"""

from __future__ import annotations

from collections.abc import Iterable

from syncer.wire.messages import Pull

WAITED_FOR = 5.0
"""Expected round times without a merge, with a pull open here: the run waits for this learner."""
WAITED_FOR_MIN_S = 5.0
AWAY_MIN_S, AWAY_MAX_S = 5.0, 30.0
"""How long it stays away: twice as long every time. The longest is well below the time for which a
server with a final cut waits for acknowledgements."""


class EarlyEnd:
    """One `finish` that was called early; now: monotonic seconds."""

    def __init__(self) -> None:
        self._attempts: dict[tuple[int, int], int] = {}
        """(connection, step) of pulls that cannot be answered -> the attempt that was first seen"""
        self._again: list[int] = []
        """Steps of them that were asked for again, as a new attempt."""
        self._since: float | None = None
        self._step = 0
        self.everybody = False
        """No round closes without all learners."""
        self.away_s = AWAY_MIN_S
        """For how many seconds it leaves the next time."""

    def look(self, now: float, connection: int, owed: Iterable[Pull]) -> None:
        """The pulls that are open here and cannot be answered, on this connection (generation)."""
        steps = {(connection, pull.step): pull.attempt for pull in owed}
        self._attempts = {key: self._attempts.get(key, steps[key]) for key in steps}
        self._again = [step for (_, step), attempt in steps.items()
                       if attempt > self._attempts[connection, step]]
        oldest = min((step for _, step in steps), default=None)
        if oldest is None:
            self._since = None
        elif self._since is None or oldest != self._step:
            self._since, self._step = now, oldest

    def due(self, news: float, expected_s: float | None) -> float | None:
        """When the run will have waited too long for this learner; `news`: the last merge."""
        if self._since is None or self.everybody:
            return self._since
        return max(self._since, news) + max(WAITED_FOR * (expected_s or 0.0), WAITED_FOR_MIN_S)

    def reason(self, now: float, news: float, expected_s: float | None) -> str | None:
        """Why it is to leave now, if it is."""
        due = self.due(news, expected_s)
        if due is None:
            return None
        if self._again:
            return f"step {self._again[0]} was launched again for want of its answer"
        if self.everybody:
            return f"step {self._step} needs the answer of everybody"
        if now >= due:
            return f"step {self._step} waits for its answer"
        return None

    def left(self) -> None:
        """It has left, for `away_s` seconds; the next time for twice as long."""
        self.away_s = min(2 * self.away_s, AWAY_MAX_S)
        self._since = None
