"""How training goes on the learners, as they report it (rule 17.4).

It is for people; must not become part of a decision.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from syncer.server.group import Group
from syncer.server.loop import Loop
from syncer.wire.extended import LearnerReport

REPORT_PAUSE_NS = 10**9
"""Of two reports within this time the second one is dropped."""


class Reported(NamedTuple):
    """The newest report of a learner."""

    group: Group
    at_ns: int
    report: LearnerReport


class ReportBook:
    """The newest report of each learner that is connected."""

    def __init__(self, loop: Loop):
        self.loop = loop
        self.newest: dict[int, Reported] = {}
        self.fresh = False
        """Somebody has reported since the last record."""

    # rule 17.4
    def take(self, group: Group, report: LearnerReport) -> None:
        """A report has come; one that comes too soon changes nothing."""
        now_ns, last = self.loop.now_ns(), self.newest.get(group.learner)
        if last is None or now_ns - last.at_ns >= REPORT_PAUSE_NS:
            self.newest[group.learner] = Reported(group, now_ns, report)
            self.fresh = True

    def leave(self, group: Group) -> None:
        """The group has ended, and what it reported is of the past."""
        last = self.newest.get(group.learner)
        if last is not None and last.group is group:
            del self.newest[group.learner]

    def since_last(self) -> list[dict[str, Any]]:
        """The newest reports by id, as the tape has them; none if nobody has reported since."""
        fresh, self.fresh = self.fresh, False
        return [{"id": learner, **self.newest[learner].report._asdict()}
                for learner in sorted(self.newest)] if fresh else []
