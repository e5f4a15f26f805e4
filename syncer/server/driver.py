"""The pump: an event in, and what the scheduler decides goes to whoever carries it out.

It must decide nothing and carry nothing out itself. Everything here runs on the loop's thread; long
work goes to the workers and comes back as an event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from syncer.core import actions, events, invariants
from syncer.core.run.scheduler import Scheduler
from syncer.server.loop import Loop

Owners = Mapping[type, Callable[[Any], object]]
"""Type of an action -> who carries it out."""


class RunEnd(NamedTuple):
    """How the run ends: exit status, and the sentence that says why."""

    status: int
    text: str


class Watch(Protocol):
    """Sees every event before the scheduler does, and what it led to. Must not change anything."""

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


class Driver:
    """Events in their order, each one's actions carried out before the next event is looked at.

    `owners` carry out actions; a session brings more with `add_owners`. `ending` is set once the
    scheduler has said `Exit`; from then on events are ignored. `carried_out` is called behind every
    event that led to something, when that is done.
    """

    def __init__(self, scheduler: Scheduler, loop: Loop, owners: Owners,
                 watch: Watch | None = None):
        self.scheduler, self.loop, self.watch = scheduler, loop, watch
        self.ending: RunEnd | None = None
        self.carry_out: dict[type, Callable[[Any], object]] = {actions.Exit: self._exit, **owners}
        self.waiting: deque[events.Event] = deque()
        self.stepping = False
        self.given: list[actions.Action] = []
        """Of the event that is being carried out, up to its end."""
        self.at = 0
        self.carried_out: Callable[[], object] = lambda: None
        if watch is not None:
            watch.begin(scheduler)

    def add_owners(self, owners: Owners) -> None:
        """Who carries out these actions from now on."""
        self.carry_out.update(owners)

    def handle(self, event: events.Event) -> None:
        """Give the scheduler an event and carry out the answer; what that causes comes after it."""
        waiting = self.waiting
        if self.stepping or waiting:
            waiting.append(event)
            if self.stepping:
                return
            event = waiting.popleft()
        self.stepping = True
        try:
            self._step(event)
            while waiting:
                self._step(waiting.popleft())
        finally:
            self.stepping = False

    def publish_undone(self) -> None:
        """Something raised while an event was carried out. A step that it has committed is
        published all the same, so that the fragments are the cut that the scheduler speaks of."""
        undone, self.given = self.given[self.at:], []
        for action in undone:
            if type(action) is actions.Publish:
                self.carry_out[actions.Publish](action)

    def broken(self, text: str) -> None:
        """Something raised while an event was carried out: what waited behind it is void."""
        self.waiting.clear()
        self.handle(events.Broken(text))

    def _step(self, event: events.Event) -> None:
        if self.ending is not None:
            if isinstance(event, events.Push | events.Init):
                event.payload.release()           # decoded when everything had ended
            return
        if self.watch is not None:
            self.watch.before(event)
        given = self.scheduler.step(self.loop.now_ns(), event)
        if given:
            self.given, carry_out = given, self.carry_out
            for self.at, action in enumerate(given):
                carry_out[type(action)](action)
            self.given = []
        if type(event) is events.Push:
            event.payload.settle()
        if self.watch is not None:
            self.watch.after(event, given)
        if given:
            self.carried_out()

    def deadline_ns(self) -> int | None:
        """When `tick_if_due` is due at the latest; None if only an event can change anything."""
        return self.scheduler.deadline_ns()

    def tick_if_due(self) -> None:
        """Tell the scheduler that its deadline has passed."""
        deadline_ns = self.scheduler.deadline_ns()
        if deadline_ns is not None and self.loop.now_ns() >= deadline_ns:
            self.handle(events.Tick())

    def _exit(self, action: actions.Exit) -> None:
        if self.ending is None:
            self.ending = RunEnd(action.status, action.text)
