"""The training loop of one demo learner, with a server or alone; the heavy half of learner.py.

Must not parse flags or own the process: it is given a report to write to and a `StopRequest` to
obey.
"""

from __future__ import annotations

import os
import resource
import time
from typing import NamedTuple

from syncer.demo import settings
from syncer.demo.model.trainer import Trainer, digest
from syncer.demo.processes.report import Report
from syncer.demo.processes.stop import StopRequest
from syncer.learner import Learner


class Task(NamedTuple):
    """What one learner is to do; the flags of learner.py."""

    learner: int
    shards: int
    seed: int
    first_step: int
    """Own steps a lost predecessor had taken: its learning-rate schedule goes on from there."""
    dtype: str
    server: str | None
    """"host:port", or None to train alone."""
    steps: int
    """Own steps to take alone; without a meaning when there is a server."""
    connect_timeout_s: float
    tls: str | None = None
    """PEM file of this learner."""
    torch: bool = False
    """The GPT in PyTorch in place of the model in NumPy."""


class Pace:
    """Writes a progress record every now and then, and keeps the loss smooth in between."""

    def __init__(self, trainer: Trainer, report: Report, task: Task,
                 learner: Learner | None):
        self.trainer, self.report, self.task, self.learner = trainer, report, task, learner
        self.start = time.monotonic()
        self._next_report = self.start + report.interval_s
        self._next_glance = self.start + settings.GLANCE_FIRST_S
        self._losses: list[float] = []

    def after_step(self, loss: float, outer_step: int | None, connected: bool) -> None:
        self._losses.append(loss)
        now = time.monotonic()
        if now < self._next_report:
            return
        self._next_report = now + self.report.interval_s
        held_out = None
        if now >= self._next_glance:
            self._next_glance = now + min(now - self.start, settings.GLANCE_INTERVAL_S)
            held_out = self.trainer.glance()
        self.report.write(
            "progress", learner=self.task.learner, seconds=self.seconds, step=self.trainer.step,
            tokens=self.trainer.tokens, loss=sum(self._losses) / len(self._losses),
            held_out=held_out, outer_step=outer_step, connected=connected, **self.wire())
        self._losses.clear()

    def wire(self) -> dict[str, int]:
        """Bytes of this process on the network so far."""
        learner = self.learner
        return {"bytes_sent": 0 if learner is None else learner.bytes_sent,
                "bytes_received": 0 if learner is None else learner.bytes_received}

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start


def run(task: Task, report: Report, stop: StopRequest) -> int:
    """Trains until the final cut, the given number of steps or a signal; returns the exit status.

    Raises SyncerError when the server refuses, and ConfigError when there is no text to train on.
    """
    trainer = Trainer(learner=task.learner, shards=task.shards, seed=task.seed,
                      first_step=task.first_step, torch=task.torch)
    report.write("start", learner=task.learner, pid=os.getpid(), shard=trainer.shard,
                 shards=task.shards, shard_bytes=len(trainer.text.shard),
                 parameters=trainer.student.flat.size, bits_per_byte=trainer.evaluate())
    if task.server is None:
        train_alone(task, trainer, report, stop)
    else:
        train_together(task, task.server, trainer, report, stop)
    return stop.exit_status


def train_alone(task: Task, trainer: Trainer, report: Report, stop: StopRequest) -> None:
    """The same loop without a server: what one learner reaches by itself."""
    pace = Pace(trainer, report, task, None)
    last = task.first_step + task.steps
    while trainer.step < last and not stop.asked:
        pace.after_step(trainer.train(), None, True)
    report.write(
        "end", **ending(trainer, pace, task, "stopped" if stop.asked else "alone"),
        own=trainer.evaluate(), merged=None, versions=None, sha256=None, **pace.wire())


def train_together(task: Task, server: str, trainer: Trainer, report: Report,
                   stop: StopRequest) -> None:
    """Joins the server, trains until the final cut and takes it over.

    Before its first own step the learner takes over the merged parameters as they are: half of a
    fresh model blended into a trained one would be pushed as a huge step backwards.
    """
    with stop.ends_wait():
        learner = Learner(
            trainer.student.held, server, learner_id=task.learner, dtype=task.dtype,
            fragments=settings.FRAGMENTS, alpha=settings.ALPHA, num_streams=settings.NUM_STREAMS,
            connect_timeout_s=task.connect_timeout_s, tls=task.tls)
    with learner:
        report.write("connected", learner=task.learner, server=server)
        with stop.ends_wait():
            status = learner.adopt()
        pace = Pace(trainer, report, task, learner)
        while not (status.finished or stop.asked):
            loss = trainer.train()
            status = learner.step(trainer.tokens_per_step)
            pace.after_step(loss, max(status.versions), status.connected)
        own, how = trainer.evaluate(), "final cut" if status.finished else "stopped"
        last = ending(trainer, pace, task, how)
        if status.finished:
            with stop.ends_wait():
                status = learner.finish()
        else:
            learner.adopt(0.0)
        report.write(
            "end", **last, own=own, merged=trainer.evaluate(), versions=status.versions,
            sha256=digest(trainer.student.flat), **pace.wire())


def ending(trainer: Trainer, pace: Pace, task: Task, how: str) -> dict[str, object]:
    """The part of the last record that every way to end has."""
    return {"learner": task.learner, "how": how, "step": trainer.step, "tokens": trainer.tokens,
            "seconds": pace.seconds,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
