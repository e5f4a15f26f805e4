"""The training loop of one demo learner, with a server or alone; the heavy half of learner.py.

Must not parse flags or own the process: it is given a report to write to and a `Stop` to obey.
"""

from __future__ import annotations

import hashlib
import os
import resource
import time
from typing import NamedTuple

import numpy as np

from syncer.demo import corpus, settings
from syncer.demo.adamw import AdamW
from syncer.demo.model import NUMEL, ByteModel, even_windows, sample_windows
from syncer.demo.report import JsonReport, ReadableReport
from syncer.demo.stop import Stop
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
    steps: int | None
    """Own steps to take alone."""
    connect_timeout_s: float


class Trainer:
    """Model, optimizer and text of one learner.

    Every learner of a run starts from the same parameters (`seed`) and draws its own batches.
    """

    def __init__(self, task: Task):
        self.shard = task.learner % task.shards
        self.text = corpus.load(self.shard, task.shards)
        self.model = ByteModel(task.seed)
        self.optimizer = AdamW(NUMEL)
        self.step = task.first_step
        self.tokens = 0
        self._rng = np.random.default_rng([task.seed, task.learner, task.first_step])
        self._held_out = even_windows(self.text.held_out, settings.EVALUATION_WINDOWS)
        self._glance = even_windows(self.text.held_out, settings.GLANCE_WINDOWS)

    def train(self) -> float:
        """One own step; returns the bits per byte of its batch before it."""
        self.step += 1
        self.tokens += settings.BATCH
        windows = sample_windows(self.text.shard, settings.BATCH, self._rng)
        bits = self.model.loss_and_gradient(windows)
        rate = settings.learning_rate(self.step)
        self.optimizer.step(self.model.flat, self.model.gradient, rate)
        return bits

    def evaluate(self) -> float:
        """Bits per held-out byte, over the same windows in every learner and every run."""
        return self.model.bits_per_byte(self._held_out)

    def glance(self) -> float:
        """The same over fewer windows, for a point of the curve."""
        return self.model.bits_per_byte(self._glance)


class Pace:
    """Writes a progress record every now and then, and keeps the loss smooth in between."""

    def __init__(self, trainer: Trainer, report: JsonReport | ReadableReport, task: Task,
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


def run(task: Task, report: JsonReport | ReadableReport, stop: Stop) -> int:
    """Trains until the final cut, the given number of steps or a signal; returns the exit status.

    Raises SyncerError when the server refuses, and ConfigError when there is no text to train on.
    """
    trainer = Trainer(task)
    report.write("start", learner=task.learner, pid=os.getpid(), shard=trainer.shard,
                 shards=task.shards, shard_bytes=len(trainer.text.shard), parameters=NUMEL,
                 bits_per_byte=trainer.evaluate())
    if task.server is None:
        train_alone(task, trainer, report, stop)
    else:
        train_together(task, trainer, report, stop)
    return stop.exit_status


def train_alone(task: Task, trainer: Trainer, report, stop: Stop) -> None:
    """The same loop without a server: what one learner reaches by itself."""
    pace = Pace(trainer, report, task, None)
    last = task.first_step + task.steps
    while trainer.step < last and not stop.asked:
        pace.after_step(trainer.train(), None, True)
    report.write(
        "end", **ending(trainer, pace, task, "stopped" if stop.asked else "alone"),
        own=trainer.evaluate(), merged=None, versions=None, sha256=None, **pace.wire())


def train_together(task: Task, trainer: Trainer, report, stop: Stop) -> None:
    """Joins the server, trains until the final cut and takes it over.

    Before its first own step the learner takes over the merged parameters as they are: half of a
    fresh model blended into a trained one would be pushed as a huge step backwards.
    """
    with stop.ends_wait():
        learner = Learner(
            trainer.model.parameters, task.server, learner_id=task.learner, dtype=task.dtype,
            fragments=settings.FRAGMENTS, alpha=settings.ALPHA, num_streams=settings.NUM_STREAMS,
            connect_timeout_s=task.connect_timeout_s)
    with learner:
        report.write("connected", learner=task.learner, server=task.server)
        with stop.ends_wait():
            status = learner.adopt()
        pace = Pace(trainer, report, task, learner)
        while not (status.finished or stop.asked):
            loss = trainer.train()
            status = learner.step(settings.BATCH)
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
            sha256=digest(trainer.model.flat), **pace.wire())


def ending(trainer: Trainer, pace: Pace, task: Task, how: str) -> dict:
    """The part of the last record that every way to end has."""
    return {"learner": task.learner, "how": how, "step": trainer.step, "tokens": trainer.tokens,
            "seconds": pace.seconds,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def digest(flat: np.ndarray) -> str:
    """SHA-256 of all parameters as little-endian f32, in the order of `model.SHAPES`."""
    return hashlib.sha256(flat.astype("<f4", copy=False).tobytes()).hexdigest()
