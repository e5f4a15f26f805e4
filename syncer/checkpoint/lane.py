"""Where and when a saver's work runs: a thread of its own here, simulated time in the simulator.

Must not know what the work is.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

Work = Callable[[], None]

BACKGROUND_NICE = 10
"""By how much the thread is nicer that says when others have left some time."""
ASKED_AGAIN_S = 0.02
"""So long after somebody has begun to wait, work that gives way knows it at the latest."""


def beside(work: Work, name: str) -> Work:
    """Run `work` at the same time on another thread; the answer waits for its end. `work` must
    raise nothing. Where no thread can be had, work is done at once: late, but not left undone."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # what Python makes of EAGAIN
        work()
        return lambda: None
    return thread.join


class Lane:
    """Runs what it is given on one thread, one after the other, in the order it was given.

    It is also the clock of that work: whoever replaces the thread replaces the time with it.
    Raises RuntimeError if there is no thread to be had; later it needs none.
    """

    def __init__(self, name: str = "syncer-checkpoint"):
        self.name = name
        self.waiting: deque[Work | None] = deque()
        self.changed = threading.Condition()
        self.usher: Usher | None = None
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.thread.start()

    def submit(self, work: Work) -> None:
        """Run `work` behind everything that was given before; it must raise nothing."""
        self._put(work)

    def give_way(self, hastened: Callable[[], bool]) -> None:
        """Return when the processors have time to spare, or soon after `hastened()`. For work on
        the lane and beside it; where no thread can be had, at once."""
        with self.changed:
            if self.usher is None:
                with suppress(RuntimeError):  # what Python makes of EAGAIN
                    self.usher = Usher(f"{self.name}-usher")
        if self.usher is not None:
            self.usher.give_way(hastened)

    def beside(self, work: Work, name: str) -> Work:
        """`beside`, for work on the lane."""
        return beside(work, name)

    def now_s(self) -> float:
        """Seconds from any beginning."""
        return time.monotonic()

    def pause(self, seconds: float) -> None:
        """Let time pass, on the lane."""
        time.sleep(seconds)

    def close(self) -> None:
        """Wait for everything that was given, then end the thread; harmless when repeated."""
        if self.thread.is_alive():
            self._put(None)
            self.thread.join()
        if self.usher is not None:
            self.usher.close()

    def _put(self, given: Work | None) -> None:
        with self.changed:
            self.waiting.append(given)
            self.changed.notify()

    def _work(self) -> None:
        while True:
            with self.changed:
                while not self.waiting:
                    self.changed.wait()
                work = self.waiting.popleft()
            if work is None:
                return
            work()
            del work


class Usher:
    """A thread that is nicer than the others, and does nothing but answer: when it does, they have
    left it some time. Whoever asks is as nice as ever, works when it has the answer, and can go on
    without one. Raises RuntimeError if there is no thread to be had."""

    def __init__(self, name: str):
        self.asked: SimpleQueue[threading.Lock | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._answer, name=name, daemon=True)
        self.thread.start()

    def give_way(self, hastened: Callable[[], bool]) -> None:
        """As of `Lane`."""
        answered = threading.Lock()
        answered.acquire()
        self.asked.put(answered)
        while not hastened() and not answered.acquire(timeout=ASKED_AGAIN_S):
            pass

    def close(self) -> None:
        """Nobody asks any more."""
        self.asked.put(None)
        self.thread.join()

    def _answer(self) -> None:
        if sys.platform == "linux":  # elsewhere niceness is that of the whole process
            with suppress(OSError):
                nice = os.getpriority(os.PRIO_PROCESS, 0)
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice + BACKGROUND_NICE)
        while (answered := self.asked.get()) is not None:
            answered.release()
