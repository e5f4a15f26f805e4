"""What ends a learner, or one connection of it; and what the text of an ERROR frame means.

Must not decide when a connection is tried again: the client does.
"""

from __future__ import annotations

from syncer.errors import SyncerError

REFUSALS = (
    ("session mismatch", "layout_hash_mismatch"),
    ("HELLO syncer semantic profile", "syncer_profile_mismatch"),
    ("HELLO is missing the required syncer semantic profile", "syncer_profile_mismatch"),
    ("HELLO authentication failed", "island_auth_failed"),
)
"""ERROR texts (by their start) that will be the same at every attempt, and their metric."""

OUTAGES = (
    "try again later",
    "unknown learner",
    "duplicate connection generation",
    "duplicate data stream index",
)
"""Parts of ERROR texts about a moment, not about this learner: another attempt may succeed."""


class ConnectionFailed(SyncerError):
    """The server refused this learner, or cannot be reached any more.

    `metric` names a deterministic refusal ("layout_hash_mismatch", "syncer_profile_mismatch",
    "island_auth_failed"), for which the whole island must stop; None for anything else.
    """

    def __init__(self, text: str, metric: str | None = None):
        super().__init__(text)
        self.metric = metric


class RunLost(ConnectionFailed):
    """The server begins anew at step 0, and this learner holds merged values of the run before."""


class RunMismatch(ConnectionFailed):
    """The server that answers is older than the one this learner knows, or no successor of it."""


class TurnedAway(ConnectionFailed):
    """The server could not take this connection now: an outage, after which it is tried again."""


class NotUnderstood(TurnedAway):
    """The server speaks protocol 4 alone: the next connection goes without an introduction."""


def refusal(text: str) -> ConnectionFailed:
    """What an ERROR frame of this text means to a learner."""
    for prefix, metric in REFUSALS:
        if text.startswith(prefix):
            return ConnectionFailed(f"{metric}: {text}", metric)
    if any(part in text for part in OUTAGES):
        return TurnedAway(text)
    return ConnectionFailed(f"syncer connection failed: {text}")
