"""The smallest driver of a scheduler: each fragment is one number, merges are weighted means.

Carries out what the scheduler says, as the server does, without sockets or threads; the witness of
tests.watch sees every event and action. Merges and catch-ups are answered by the caller.
"""

from __future__ import annotations

from typing import Any

from syncer.config import Config
from syncer.core import actions as act
from syncer.core import events as ev
from syncer.core.run.scheduler import Scheduler
from tests.watch import Payload, Watch

MS = 1_000_000


def toy_config(**given: Any) -> Config:
    """Configuration of the scenarios: no pacing, no correction, short grace, one round at a time,
    unless given."""
    settings = {"learners": 1, "total_steps": 2, "grace_ms": 20, "pipeline": 1,
                "sync_interval_steps": 0.0, "delta_correction": "none", **given}
    return Config(**settings)


class ToyDriver:
    """One run: `feed` hands over an event and carries out the actions.

    Outer step: learning rate 1, no momentum: a fragment moves by the weighted mean of the deltas.
    """

    def __init__(self, config, fragments: int = 1, resumed: ev.Resumed | None = None):
        self.config = config
        self.fragments = fragments
        self.scheduler = Scheduler(config, resumed)
        self.last_step = config.total_steps + (0 if resumed is None else resumed.renumbered)
        self.watch = Watch(
            self.scheduler, -1 if resumed is None or resumed.unsaved else resumed.step,
            0 if resumed is None else resumed.renumbered)
        self.values = [0.0] * fragments
        self.versions = list(self.scheduler.versions) or [0] * fragments
        self.folds: dict[int, list] = {}
        self.to_fold: list[ev.Folded] = []
        self.merging: dict[int, act.StartMerge] = {}
        self.results: dict[int, float] = {}
        self.to_sync: list[int] = []
        self.saving: str | None = None
        self.connections = 0

    @property
    def exit(self) -> act.Exit | None:
        return self.watch.exit

    def feed(self, now_ns: int, event) -> list:
        """One event in, its actions carried out and returned."""
        if isinstance(event, ev.MergeDone) and event.step in self.merging:
            job = self.merging.pop(event.step)
            if event.nothing_left:
                self.folds.pop(event.step, None)
            else:
                self.results[event.step] = self.merge(job, {d.position for d in event.dropped})
        self.watch.event(event)
        actions = self.scheduler.step(now_ns, event)
        for action in actions:
            self.carry_out(action)
        self.watch.actions(actions)
        due = self.scheduler.deadline_ns()
        assert due is None or due > now_ns, f"due at {due} although it is {now_ns}"
        return actions

    def carry_out(self, action):
        if isinstance(action, act.AdoptInit):
            self.values[action.fragment] = action.payload.value
        elif isinstance(action, act.OpenFold):
            self.folds[action.step] = []
        elif isinstance(action, act.Fold):
            self.folds[action.step].append((action.contribution, action.contribution.payload.value))
            self.to_fold.append(ev.Folded(action.step, action.attempt, action.contribution.learner,
                                          action.contribution.carried))
        elif isinstance(action, act.StartMerge):
            self.merging[action.step] = action
        elif isinstance(action, act.Save):
            self.saving = action.kind
        elif isinstance(action, act.Publish):
            self.values[action.fragment] = self.results.pop(action.step)
            self.versions[action.fragment] = action.step
            self.to_sync += [action.step] if action.step < self.last_step else []

    def merge(self, job: act.StartMerge, dropped: set[int]) -> float:
        values = self.folds.pop(job.step, None)
        if values is None:
            values = [(c, c.payload.value) for i, c in enumerate(job.contributions)
                      if i not in dropped]
        total = sum(c.weight for c, _ in values)
        moved = sum(c.weight * value for c, value in values)
        return self.values[job.fragment] + (moved / total if total > 0 else 0.0)

    # ---- events --------------------------------------------------------------------------------

    def hello(self, learner: int, generation: int, kept: tuple[int, ...] = (),
              wants_fates: bool = False) -> ev.Hello:
        self.connections += 1
        return ev.Hello(self.connections, learner, generation, self.fragments, bytes(32), kept,
                        wants_fates)

    def init(self, learner: int, generation: int, fragment: int, value: float) -> ev.Init:
        payload = Payload(f"init {learner}.{generation} p{fragment}", value)
        return ev.Init(learner, generation, fragment, payload)

    def push(self, learner: int, generation: int, step: int, value: float, *,
             attempt: int = 1, base: int | None = None, fragment: int | None = None,
             local_step: int = 1, c_steps: int = 1, c_tokens: int = 1) -> ev.Push:
        """A push of one delta; by default for the step's own fragment at its current version."""
        if fragment is None:
            fragment = (step - 1) % self.fragments
        if base is None:
            base = self.versions[fragment]
        payload = Payload(f"{learner}.{generation}:{value:+g}", value)
        return ev.Push(learner, generation, fragment, step, attempt, base, local_step, c_steps,
                       c_tokens, payload)

    def caught_up(self, learner: int, generation: int) -> ev.CaughtUp:
        return ev.CaughtUp(learner, generation, tuple(self.versions))
