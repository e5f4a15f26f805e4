"""The worker pool: long work off the loop's thread, results back through the loop.

A worker owns nothing: it computes from what a job was given and must not touch the state of the
server. Kernels release the GIL, so the loop goes on meanwhile.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

from syncer.config import available_cores
from syncer.server.loop import Loop

WORKERS_MAX = 4


class Job(NamedTuple):
    """`run()` on a worker, then `done(result, error)` on the loop's thread; one of both is None.

    When `pair` is set and another job with the same `pair` waits, one worker takes both and calls
    `pair(first, second)` before them: the two then share work that is cheaper together.
    """

    run: Callable[[], Any]
    done: Callable[[Any, BaseException | None], None]
    pair: Callable[[Any, Any], None] | None = None
    subject: Any = None
    """What `pair` is given of each job."""


class Workers:
    """`count` daemon threads over one queue; `close` waits for jobs that have begun."""

    def __init__(self, loop: Loop, count: int | None = None):
        self.loop = loop
        self.count = count or min(WORKERS_MAX, max(2, available_cores()))
        self.jobs: deque[Job] = deque()
        self.taking = threading.Lock()
        self.bells: SimpleQueue[None] = SimpleQueue()
        """Rung once per job: half the cost of a condition variable, which matters per push."""
        self.closing = False
        self.threads = [
            threading.Thread(target=self._work, name=f"syncer-worker-{i}", daemon=True)
            for i in range(self.count)
        ]
        for thread in self.threads:
            thread.start()

    def submit(self, job: Job) -> None:
        with self.taking:
            self.jobs.append(job)
        self.bells.put(None)

    def close(self) -> None:
        """Drop what has not begun, wait for what has."""
        self.closing = True
        with self.taking:
            self.jobs.clear()
        for _ in self.threads:
            self.bells.put(None)
        for thread in self.threads:
            thread.join()

    def _take(self) -> tuple[Job, ...]:
        """The next job, or two that pair; nothing once the pool is closing."""
        while True:
            self.bells.get()
            with self.taking:
                if self.closing:
                    return ()
                if not self.jobs:
                    continue  # it was taken as the second of a pair
                first = self.jobs.popleft()
                if first.pair is not None:
                    for index, other in enumerate(self.jobs):
                        if other.pair == first.pair:
                            del self.jobs[index]
                            return first, other
                return (first,)

    def _work(self) -> None:
        while jobs := self._take():
            if len(jobs) == 2:
                self._run_pair(*jobs)
            else:
                self._run(jobs[0])
            del jobs  # a waiting worker must not keep the last job's buffers alive

    def _run_pair(self, first: Job, second: Job) -> None:
        try:
            first.pair(first.subject, second.subject)
        except BaseException as error:
            self.loop.post(first.done, None, error)
            self.loop.post(second.done, None, error)
            return
        self._run(first)
        self._run(second)

    def _run(self, job: Job) -> None:
        # Every failure travels to the loop's thread: a worker that died in silence would leave a
        # round waiting for ever.
        try:
            result = job.run()
        except BaseException as error:
            self.loop.post(job.done, None, error)
        else:
            self.loop.post(job.done, result, None)
