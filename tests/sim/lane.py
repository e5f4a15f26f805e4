"""Lines of work beside the server's loop, in simulated time: what a thread of its own is elsewhere.

The code that runs on one calls, and returns; between two calls of the file system time passes and
everything else goes on. So each line is a thread here, too, but one that runs only while the world
waits for it: there is never more than one that does anything, and the order is the world's.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from syncer.checkpoint.lane import Lane, Work
from tests.sim.clock import MS, SECOND, World


class Killed(BaseException):
    """The process that this code runs in is gone. No `except Exception` may see it."""


class Strand:
    """Work that lets time pass. `resume` runs it up to its next `pause`, or to its end."""

    def __init__(self, world: World, work: Work, ended: Callable[[], None]):
        self.world, self.work, self.ended = world, work, ended
        self.error: BaseException | None = None
        self.killed = False
        self.over = False
        self.go, self.back = threading.Lock(), threading.Lock()
        self.go.acquire()
        self.back.acquire()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.go.acquire()
        try:
            if not self.killed:
                self.work()
        except BaseException as error:
            if not self.killed:
                self.error = error
        self.over = True
        self.back.release()

    def resume(self) -> None:
        """In the world."""
        if self.over:
            return                                # killed meanwhile
        self.go.release()
        self.back.acquire()
        if not self.over:
            return
        self.thread.join()
        if self.error is not None:
            raise self.error
        if not self.killed:
            self.ended()

    def pause(self, delay_ns: float) -> None:
        """On the strand: let time pass."""
        if not self.killed:
            self.world.after(delay_ns, self.resume)
        self.park()

    def park(self) -> None:
        """On the strand: wait until somebody resumes it."""
        if not self.killed:
            self.back.release()
            self.go.acquire()
        if self.killed:
            raise Killed

    def kill(self) -> None:
        """In the world: whatever it does next does not happen."""
        if not self.over:
            self.killed = True
            if threading.current_thread() is not self.thread:
                self.resume()                     # otherwise it hears of it by itself


class SimLane(Lane):
    """Runs what it is given one after the other, and is its clock. `begun()` before each work."""

    def __init__(self, world: World, begun: Callable[[], None]):
        self.world, self.begun = world, begun
        self.works: deque[Work] = deque()
        self.strand: Strand | None = None
        self.dead = False

    def submit(self, work: Work) -> None:
        self.works.append(work)
        if self.strand is None:
            self._next()

    def _next(self) -> None:
        self.strand = None
        if self.works and not self.dead:
            self.begun()
            self.strand = Strand(self.world, self.works.popleft(), self._next)
            self.world.after(0, self.strand.resume)

    def beside(self, work: Work, name: str) -> Work:
        """Done now, or not before somebody needs it."""
        if self.world.chance(0.5):
            work()
            return lambda: None
        left = [work]
        return lambda: left.pop()() if left else None

    def give_way(self, hastened: Callable[[], bool]) -> None:
        """Others are slow to leave time, until somebody waits."""
        for _ in range(self.world.rng.randrange(4)):
            if not hastened():
                self.passes(self.world.between(0, 20) * MS)

    def now_s(self) -> float:
        return self.world.now_ns / SECOND

    def pause(self, seconds: float) -> None:
        self.passes(seconds * SECOND)

    def passes(self, delay_ns: float) -> None:
        """Time goes by for whoever runs on the lane; for others this is nothing."""
        if self.strand is not None and threading.current_thread() is self.strand.thread:
            self.strand.pause(delay_ns)

    def close(self) -> None:
        self.world.wait(lambda: self.strand is None or self.dead)
        if self.dead:
            raise Killed

    def kill(self) -> None:
        self.dead = True
        self.works.clear()
        if self.strand is not None:
            self.strand.kill()
            self.strand = None
