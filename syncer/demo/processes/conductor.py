"""`syncer demo` from start to end: the processes, the clock, the loss on purpose, the baseline.

Decides and acts; what is known stands in show/watch.py, how it looks in the rest of show/.
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from syncer.demo.processes.fleet import Child, Exited, Fleet
from syncer.demo.processes.stop import Stopped, StopRequest
from syncer.demo.run_plan import RunPlan
from syncer.demo.show import closing_table
from syncer.demo.show import outcome as outcomes
from syncer.demo.show.outcome import Loss, RunOutcome
from syncer.demo.show.screen import open_screen
from syncer.demo.show.watch import FAILED, KILLED, LearnerView, RunWatch, TapeReader, parse
from syncer.errors import ConfigError, SyncerError
from syncer.exits import Exit

POLL_S = 0.1
START_TIMEOUT_S = 120.0
"""Longest time until all learners have joined; a machine under load takes a few seconds."""
CLOSING_TIMEOUT_S = 60.0
"""Longest time for learners to measure themselves after the server has ended."""
STOP_TIMEOUT_S = 10.0

FINAL_CUT, TIME_BUDGET, INTERRUPTED = "final cut", "time budget", "interrupted"


class DemoFailed(SyncerError):
    """A process of the run ended in a way that leaves nothing to show."""


def run(plan: RunPlan) -> int:
    """Runs the whole demo; returns the exit status: 0 done, 1 failed, 130/143/129 stopped.

    Raises DemoFailed or ConfigError with one sentence when there is nothing to show.
    """
    stop = StopRequest(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    try:
        with tempfile.TemporaryDirectory(prefix="syncer-demo-") as scratch, Fleet() as fleet:
            return Conductor(plan, fleet, Path(scratch), stop).run()
    except Stopped:
        return stop.exit_status
    finally:
        stop.restore()


class Conductor:
    """One run. `scratch` is a directory of its own for the tape and the final state."""

    def __init__(self, plan: RunPlan, fleet: Fleet, scratch: Path, stop: StopRequest):
        self.plan, self.fleet, self.stop = plan, fleet, stop
        self.watch = RunWatch(plan.learners, plan.total_steps)
        self.final_state = scratch / "final.state"
        self.tape = TapeReader(scratch / "events.jsonl")
        self.screen = open_screen()
        self.server: Child | None = None
        self.learners: dict[int, Child] = {}
        self.loss: Loss | None = None
        self.baseline: Child | None = None

    def run(self) -> int:
        """Train, measure, show."""
        try:
            ended = self._train()
            outcome = outcomes.collect(self.plan, self.watch, self.final_state, ended, self.loss)
            if self.plan.baseline and ended != INTERRUPTED:
                self._train_alone(outcome)
        finally:
            self.screen.close()
        print(closing_table.render(outcome), flush=True)
        if self.plan.json:
            outcomes.write_json(self.plan.json, outcome)
        if self.plan.plot:
            from syncer.demo.show import plot  # noqa: PLC0415  needs matplotlib

            plot.draw(self.plan.plot, outcome)
        return self.stop.exit_status or int(outcome.failed)

    # ---------------------------------------------------------------------------------- training
    def _train(self) -> str:
        """From the first process to the last record; returns how it ended."""
        words = self.plan.server_arguments(str(self.final_state), str(self.tape.path))
        server = self.server = self.fleet.start("server", "syncer.server", words)
        begun_s = time.monotonic()
        while server.alive:
            self._pump()
            if self.stop.asked:
                return self._stop_all(server, INTERRUPTED)
            if self.watch.port is not None and not self.learners:
                for learner in range(self.plan.learners):
                    self._start_learner(learner)
            if not self.watch.training and time.monotonic() - begun_s > START_TIMEOUT_S:
                raise DemoFailed(f"the learners did not all join within {START_TIMEOUT_S:.0f} s")
            if self._budget_is_used_up():
                return self._stop_all(server, TIME_BUDGET)
            if self.plan.kill_one:
                self._kill_and_return()
            self._check_learners()
        if server.status != Exit.DONE:
            raise DemoFailed(f"the server ended with status {server.status}: "
                             f"{last_words(self.watch.complaints)}")
        for learner, child in self.learners.items():
            if learner not in self.watch.finalized:  # it would go on looking for the server
                child.send(signal.SIGTERM)
        self._pump_until(lambda: not any(c.alive for c in self.learners.values()),
                         CLOSING_TIMEOUT_S)
        return INTERRUPTED if self.stop.asked else FINAL_CUT

    def _start_learner(self, learner: int) -> None:
        view = self.watch.learners[learner]
        view.started()
        assert self.watch.port is not None  # nobody is started before the server listens
        self.learners[learner] = self.fleet.start(
            "learner", "syncer.demo.learner",
            self.plan.learner_arguments(learner, self.watch.port, view.step), learner)

    def _budget_is_used_up(self) -> bool:
        """Whether the time is over although merges are still to come."""
        watch, seconds = self.watch, self.plan.seconds
        merging = watch.training and watch.outer_step < watch.total_steps
        return seconds is not None and merging and watch.training_s >= seconds

    def _kill_and_return(self) -> None:
        """--kill-one: SIGKILL for the last learner half-way, a new process a few merges later."""
        watch = self.watch
        victim = self.plan.learners - 1
        loss = self.loss
        if loss is None:
            if watch.outer_step < self.plan.kill_at:
                return
            self.learners[victim].send(signal.SIGKILL)
            watch.learners[victim].lost()
            self.loss = Loss(victim, watch.outer_step, watch.now_s())
            watch.happened("loss", f"learner {victim} killed (SIGKILL) after outer step "
                           f"{watch.outer_step}", victim)
        elif (loss.return_s is None and watch.outer_step >= self.plan.return_at
                and not self.learners[victim].alive):
            self.loss = loss._replace(return_step=watch.outer_step, return_s=watch.now_s())
            watch.happened("note", f"learner {victim} started again after outer step "
                           f"{watch.outer_step}", victim)
            self._start_learner(victim)

    def _check_learners(self) -> None:
        """A run goes on without a lost learner, but not without any, and not before the start."""
        failed = [v for v in self.watch.learners if v.state == FAILED]
        if failed and (not self.watch.training or len(failed) == self.plan.learners):
            child = self.learners[failed[0].learner]
            error = ConfigError if child.status == Exit.UNUSABLE else DemoFailed
            text = last_words(child.complaints)
            raise error(text if error is ConfigError else
                        f"learner {child.learner} ended with status {child.status}: {text}")

    def _stop_all(self, server: Child, how: str) -> str:
        """Ends the run before its last merge: learners measure what they hold, then the server."""
        self.watch.end_training()
        for child in self.learners.values():
            child.send(signal.SIGTERM)
        self._pump_until(lambda: not any(c.alive for c in self.learners.values()), STOP_TIMEOUT_S)
        server.send(signal.SIGTERM)
        self._pump_until(lambda: not server.alive, STOP_TIMEOUT_S)
        return how

    # ---------------------------------------------------------------------------------- baseline
    def _train_alone(self, outcome: RunOutcome) -> None:
        """One learner with as many own steps as the busiest of the run, and no server."""
        steps = max(row.steps for row in outcome.learners)
        view = self.watch.baseline = LearnerView(0)
        self.watch.happened("note", f"one learner alone now takes the same {steps:,} own steps")
        alone = self.baseline = self.fleet.start("baseline", "syncer.demo.learner",
                                                 self.plan.baseline_arguments(steps), 0)
        while alone.alive and not self.stop.asked:
            self._pump()
        if self.stop.asked:
            return
        if alone.status != Exit.DONE or not outcomes.add_baseline(outcome, self.watch, view):
            raise DemoFailed(f"the baseline ended with status {alone.status}: "
                             f"{last_words(alone.complaints)}")

    # ------------------------------------------------------------------------------------- pump
    def _pump(self) -> None:
        """Takes in what the processes said, waiting a tenth of a second at most."""
        for happened in self.fleet.poll(POLL_S):
            if isinstance(happened, Exited):
                self._exited(happened)
            elif happened.child is self.server:
                self.watch.server_line(happened.text)
            elif happened.stream == "stdout" and happened.child is self.baseline:
                self.watch.baseline_line(happened.text)
            elif happened.stream == "stdout" and happened.child.learner is not None:
                self.watch.learner_line(happened.child.learner, happened.text)
        for record in self.tape.read():
            self.watch.tape_record(record)
        self.screen.show(self.watch)

    def _pump_until(self, reached: Callable[[], bool], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not reached() and time.monotonic() < deadline_s:
            self._pump()

    def _exited(self, exited: Exited) -> None:
        child, learner = exited.child, exited.child.learner
        if child.role != "learner" or learner is None or self.learners.get(learner) is not child:
            return
        view = self.watch.learners[learner]
        asked = self.stop.asked or exited.status == Exit.TERMINATED
        if view.end is None and view.state != KILLED and not asked:
            view.state = FAILED
            self.watch.happened("loss", f"learner {learner} ended unexpectedly with status "
                                f"{exited.status}: {last_words(child.complaints)}", learner)


def last_words(lines: Sequence[str]) -> str:
    """The last thing a process complained about, as one sentence."""
    if not lines:
        return "it said nothing"
    record = parse(lines[-1])
    text = lines[-1] if record is None else str(record.get("message", lines[-1]))
    return text.removeprefix("syncer: ")
