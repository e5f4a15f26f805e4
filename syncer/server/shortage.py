"""What there is no memory for: done again when there may be some, up to a limit of time.

It must not know what a job computes, nor change what it is given: a job that finds no memory has
changed nothing, so that it can be done again.

rule 7.9. Memory is the machine's, and nobody's fault: a neighbour that grows for a minute must not
    end a run of weeks. What a job needs is still there, so nothing is asked for a second time; the
    round waits as for a slow merge, and the limit is that of any round. Why not without limit:
    where a merge is too large for the machine, a run that ends is looked at, one that waits is not.
    A broadcast is everybody's as a merge is: it waits (`outgoing`) in the same words, as long.
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


class Lack:
    """A want of memory, in the log: when it begins, twice a minute, and when it is over.
    free_spares: gives memory back that nobody uses, before anybody is told to wait."""

    def __init__(self, log: Log, free_spares: Callable[[], None] = lambda: None):
        self.log, self.free_spares = log, free_spares
        self.since_ns: int | None = None
        self.told_ns = 0

    def tell(self, now_ns: int, what: str, error: MemoryError) -> None:
        """For this there is none: it waits."""
        if self.since_ns is None:
            self.free_spares()
            self.since_ns = now_ns
        elif now_ns - self.told_ns < TELL_AGAIN_NS:
            return
        self.told_ns = now_ns
        self.log.warning("no memory: what needs it waits, and the run with it", what=what,
                         error=str(error))

    def lasts_s(self, now_ns: int) -> float:
        """How long there has been none."""
        return 0 if self.since_ns is None else (now_ns - self.since_ns) / 1e9

    def end(self, now_ns: int) -> None:
        """Nothing waits for it any more."""
        if self.since_ns is not None:
            self.log.warning("memory is there again",
                             waited_s=round((now_ns - self.since_ns) / 1e9, 1))
            self.since_ns = None


class Shortage:
    """Workers whose jobs may find no memory. `limit_ns`: from the first time on; then a job has the
    MemoryError for an answer. lack: tells of it."""

    def __init__(self, workers: Workers, loop: Loop, *, limit_ns: int, lack: Lack):
        self.workers, self.loop, self.count = workers, loop, workers.count
        self.limit_ns, self.lack = limit_ns, lack
        self.waiting: dict[Timer, None] = {}
        self.short = 0
        """Jobs that have found no memory yet."""
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
        if now_ns - since_ns >= self.limit_ns:
            self.short -= 1
            job.done(None, error)
            return
        self.lack.tell(now_ns, "a computation", error)
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
            self.lack.end(self.loop.now_ns())

    def close(self) -> None:
        """The run ends: what waits for memory is not waited for."""
        self.closed = True
        for timer in self.waiting:
            timer.cancel()
        self.waiting.clear()
