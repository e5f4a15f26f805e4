"""What takes long of a stranger's HELLO: on the workers, one job at a time; must not judge it.

One at a time, whoever sends how many: they take one worker and the memory of one, and the first
that fixes a session is known before the next one is read.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

from syncer.server.workers import Job, Workers


class Reading:
    """Jobs in the order in which they are asked for."""

    def __init__(self, workers: Workers):
        self.workers = workers
        self.waiting: deque[Job] = deque()
        self.under_way = False

    def submit(self, job: Job, *, next_one: bool = False) -> None:
        """`job.done` is called as the workers would. next_one: it goes on with what one has done,
        and comes before the others."""
        if next_one:
            self.waiting.appendleft(job)
        else:
            self.waiting.append(job)
        if not self.under_way:
            self._begin()

    def _begin(self) -> None:
        job = self.waiting.popleft()
        self.under_way = True
        self.workers.submit(job._replace(done=partial(self._done, job)))

    def _done(self, job: Job, result: Any, error: BaseException | None) -> None:
        try:
            job.done(result, error)  # may submit what comes next: it waits until this has returned
        finally:
            self.under_way = False
            if self.waiting:
                self._begin()
