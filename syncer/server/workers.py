"""Long work off the loop's thread: which job comes next, and how its answer comes back.

A worker owns nothing: it computes from what a job was given and must not touch the state of the
server. No thread is made here: `system.ThreadWorkers` has them, a simulation has simulated ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

INLINE_ELEMENTS_MAX = 131_072
"""Work on at most this many elements is done on the spot: it takes about 10 µs (vector kernels) to
130 µs (portable ones), and a worker and back costs as much in thread switches."""


class Job(NamedTuple):
    """`run()` on a worker, then `done(result, error)` on the loop's thread; one of both is None."""

    run: Callable[[], Any]
    done: Callable[[Any, BaseException | None], object]


class Workers(Protocol):
    """The port: somewhere to run jobs. `close` drops what has not begun, and waits for nothing: the
    rest answers to nobody. `count`: how many jobs run at a time."""

    count: int

    def submit(self, job: Job) -> None: ...

    def close(self) -> None: ...


class JobQueue:
    """Jobs in the order in which they were submitted; not locked, its owner is."""

    def __init__(self) -> None:
        self.jobs: deque[Job] = deque()

    def put(self, job: Job) -> None:
        self.jobs.append(job)

    def take(self) -> Job | None:
        """The next job; None if none waits."""
        return self.jobs.popleft() if self.jobs else None

    def clear(self) -> None:
        self.jobs.clear()


def run_job(job: Job, post: Callable[..., object]) -> None:
    """Run what `take` gave, and post what became of it.

    Every failure travels to the loop's thread: a worker that died in silence would leave a round
    waiting for ever.
    """
    try:
        result = job.run()
    except BaseException as error:
        post(job.done, None, error)
    else:
        post(job.done, result, None)
