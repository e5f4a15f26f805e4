"""How long a learner has heard of no merge, and when that is too long; must not know a clock.

A network that drops everything looks like a server that has nothing to say: no error comes for a
minute. So a learner measures how far apart merged steps come, and after five times as long without
one it is worth a line, and another one twice a minute. What a new connection brings first are
versions from before; their pace is that of the network.
"""

from __future__ import annotations

SILENCE = 5.0
"""Expected round times without news that are worth a line."""
SILENCE_MIN_S = 5.0
"""And at least so many seconds: rounds of milliseconds wait for a checkpoint now and then."""
UNKNOWN_S = 10.0
"""The same while nothing is expected yet: the run may be waiting for somebody else to begin."""
NEWS_AGAIN_S = 30.0
"""So long after a line the next one is due, if there is no news still."""
LEAP = 4.0
"""One gap counts for at most so many times the estimate, as in rule 2.6."""


class News:
    """Merged steps as they arrive at one learner; now: monotonic seconds."""

    def __init__(self, fragments: int, now: float):
        self._fragments = fragments
        self._newest = -1
        self.expected_s: float | None = None
        """Seconds from one merged step to the next; None before two have come."""
        self.connected(now)

    def connected(self, now: float) -> None:
        """What a new connection brings first is what was missed, all at once."""
        self._first = self._fragments
        self.last = now
        """When the newest of them came, or the connection."""
        self._said: float | None = None
        """When a line about the silence since then was written last."""

    def heard(self, now: float, version: int) -> float | None:
        """A broadcast came. If the silence before it was said, how long it was."""
        silence = None if self._said is None else now - self.last
        growth = version - self._newest
        if self._first == 0 and growth > 0:
            gap, usual = (now - self.last) / growth, self.expected_s
            self.expected_s = gap if usual is None else 0.75 * usual + 0.25 * min(gap, LEAP * usual)
        self._first = max(self._first - 1, 0)
        self._newest = version
        self.last = now
        self._said = None
        return silence

    def due(self) -> float:
        """When a line is due unless something comes."""
        if self._said is not None:
            return self._said + NEWS_AGAIN_S
        if self.expected_s is None:
            return self.last + UNKNOWN_S
        return self.last + max(SILENCE * self.expected_s, SILENCE_MIN_S)

    def say(self, now: float) -> float:
        """A line is written now: seconds of silence."""
        self._said = now
        return now - self.last
