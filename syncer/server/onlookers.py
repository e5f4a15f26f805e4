"""Whoever looks on while the driver works, and what that may be. Must not change anything."""

from __future__ import annotations

from typing import Protocol

from syncer.core import actions, events, invariants
from syncer.core.run.scheduler import Scheduler


class Watch(Protocol):
    """Sees every event before the scheduler does, and what it led to."""

    def begin(self, scheduler: Scheduler) -> None: ...

    def before(self, event: events.Event) -> None: ...

    def after(self, event: events.Event, given: list[actions.Action]) -> None: ...


class InvariantsWatch:
    """Checks the scheduler's state after every event; costs a pass over members and rounds."""

    def begin(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    def before(self, event: events.Event) -> None:
        pass

    def after(self, event: events.Event, given: list[actions.Action]) -> None:
        invariants.check(self.scheduler)
