"""When a learner says how many steps it has made; must not send or know a clock.

The server times a learner's steps by the step counts that it hears (rule 2.6), and every count it
hears restarts that clock. So a count that has not grown says "this was no training": it is what
makes a pause a pause, and it must not come in the middle of a step that is merely long. A learner
knows what its steps take. Without a step for four times as long it is in a pause, from where on its
last count is repeated, by a thread that needs no GIL (`Pulse`); until then it is silent.

The count that is repeated is one that was sent before, never a newer one, since that would be a
sample of the steps before the pause with a part of the pause in it.
"""

from __future__ import annotations

HEARTBEAT_S = 1.0
"""Least time between two heartbeats."""
PAUSE = 4.0
"""Without a step for so many times its usual length, it is no step any more."""


class Heartbeats:
    """The beat of one training loop; now: monotonic seconds."""

    def __init__(self, now: float):
        self._boundary = now
        self._step_s: float | None = None
        self._next = 0.0
        self.due, self.every = now + HEARTBEAT_S, HEARTBEAT_S
        """When the last count is to be repeated, and how often from then on."""

    def stepped(self, now: float) -> None:
        """A step was made. Its time moves the estimate as the server's moves: half, at most 4 x."""
        took, usual = now - self._boundary, self._step_s
        self._boundary = now
        self._step_s = took if usual is None else 0.5 * usual + 0.5 * min(took, PAUSE * usual)
        self.due = now + max(HEARTBEAT_S, PAUSE * self._step_s)
        self.every = max(HEARTBEAT_S, self._step_s)

    def is_due(self, now: float) -> bool:
        """Whether a boundary is to send the count now; it is then due again a second later."""
        if now < self._next:
            return False
        self._next = now + HEARTBEAT_S
        return True
