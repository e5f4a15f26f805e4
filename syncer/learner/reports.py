"""What a learner reports of its training (wire 19.8): the newest figures, at most once a second.

Must not send: whoever has a connection asks what is due.
"""

from __future__ import annotations

from syncer.wire.extended import LearnerReport, encode_report

FIGURES_S = 1.0
"""A server may drop one that comes sooner after the one before."""


class TrainingFigures:
    """The figures that were not sent yet; now: monotonic seconds."""

    def __init__(self) -> None:
        self.waiting: LearnerReport | None = None
        self._sent = float("-inf")

    def put(self, report: LearnerReport) -> None:
        """The newest figures; those that wait are forgotten, but where the newest has none."""
        old = self.waiting or LearnerReport()
        self.waiting = LearnerReport(*(
            before if value is None else value for before, value in zip(old, report, strict=True)))

    def due(self, now: float) -> bytes | None:
        """The REPORT frame to be sent now, if there is one; it counts as sent."""
        if self.waiting is None or now < self._sent + FIGURES_S:
            return None
        frame = encode_report(self.waiting)
        self.waiting, self._sent = None, now
        return frame
