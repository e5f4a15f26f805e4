"""Jobs for which there is no memory: done again when there may be some, up to a limit of time.

It must not know what a job computes, nor change what it is given: a job that finds no memory has
changed nothing, so that it can be done again.

rule 7.9. Memory is the machine's, and nobody's fault: a neighbour that grows for a minute must not
    end a run of weeks. What a job needs is still there, so nothing is asked for a second time; the
    round waits as for a slow merge, and the limit is that of any round. Why not without limit:
    where a merge is too large for the machine, a run that ends is looked at, one that waits is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from syncer.server.log import Log
from syncer.server.loop import Loop, Timer
from syncer.server.workers import Job, Workers

FIRST_PAUSE_NS = 100 * 10**6
"""How soon a job is tried again; then after twice as long each time, up to"""
PAUSE_MAX_NS = 5 * 10**9
"""which costs a large merge that fails at its end little."""
TELL_AGAIN_NS = 30 * 10**9
"""How often a wait for memory is told."""


class Shortage:
    """Workers whose jobs may find no memory. `limit_ns`: from the first time on; then a job has the
    MemoryError for an answer. free_spares: gives memory back that nobody uses."""

    def __init__(self, workers: Workers, loop: Loop, log: Log, *, limit_ns: int,
                 free_spares: Callable[[], None] = lambda: None):
        self.workers, self.loop, self.log = workers, loop, log
        self.count = workers.count
        self.limit_ns, self.free_spares = limit_ns, free_spares
        self.waiting: dict[Timer, None] = {}
        self.short = 0
        """Jobs that have found no memory yet, and"""
        self.short_ns = self.told_ns = 0
        """since when there are any; when it was told last."""
        self.closed = False

    def submit(self, job: Job) -> None:
        self._submit(job, None, FIRST_PAUSE_NS)

    def _submit(self, job: Job, since_ns: int | None, pause_ns: int) -> None:
        def done(result: Any, error: BaseException | None) -> None:
            if isinstance(error, MemoryError):
                self._lacks(job, error, since_ns, pause_ns)
                return
            if since_ns is not None:
                self._is_over()
            job.done(result, error)

        self.workers.submit(job._replace(done=done))

    # rule 7.9
    def _lacks(self, job: Job, error: MemoryError, since_ns: int | None, pause_ns: int) -> None:
        """It is tried again later, or has waited long enough."""
        now_ns = self.loop.now_ns()
        if since_ns is None:
            since_ns = now_ns
            self.short += 1
            self.free_spares()
        if now_ns - since_ns >= self.limit_ns:
            self.short -= 1
            job.done(None, error)
            return
        if self.short_ns == 0 or now_ns - self.told_ns >= TELL_AGAIN_NS:
            self.told_ns = now_ns
            self.short_ns = self.short_ns or now_ns
            self.log.warning("no memory for a computation: it waits, and its round with it",
                             error=str(error))
        if self.closed:
            return

        def again() -> None:
            del self.waiting[timer]
            self._submit(job, since_ns, min(2 * pause_ns, PAUSE_MAX_NS))

        timer = self.loop.call_at(now_ns + pause_ns, again)
        self.waiting[timer] = None

    def _is_over(self) -> None:
        """A job has found its memory."""
        self.short -= 1
        if not self.short:
            self.log.warning("memory for computations is there again", waited_s=round(
                (self.loop.now_ns() - self.short_ns) / 1e9, 1))
            self.short_ns = 0

    def close(self) -> None:
        """The run ends: what waits for memory is not waited for."""
        self.closed = True
        for timer in self.waiting:
            timer.cancel()
        self.waiting.clear()
