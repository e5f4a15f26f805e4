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
from functools import partial

Work = Callable[[], None]

BACKGROUND_NICE = 10
"""Of work that gives way. On two busy cores the longest pause of a merge was 85 ms without it and
50 ms with it, and the write took 1.0 s instead of 0.65 s. Never so nice that it would starve while
it holds the interpreter's lock."""


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
    Raises RuntimeError if there is no thread to be had; later it needs none, and takes one more for
    what gives way.
    """

    def __init__(self, name: str = "syncer-checkpoint"):
        self.name = name
        self.waiting: deque[tuple[Work, bool] | None] = deque()
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.thread.start()

    def submit(self, work: Work, *, gives_way: bool = False) -> None:
        """Run `work` behind everything that was given before; it must raise nothing.

        gives_way: to the rounds that go on meanwhile, and with it all that it runs beside itself.
        """
        self._put((work, gives_way))

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

    def _put(self, given: tuple[Work, bool] | None) -> None:
        with self.changed:
            self.waiting.append(given)
            self.changed.notify()

    def _work(self) -> None:
        while True:
            with self.changed:
                while not self.waiting:
                    self.changed.wait()
                given = self.waiting.popleft()
            if given is None:
                return
            work, gives_way = given
            if gives_way:
                # A thread may not become less nice again, so it is a thread of its own; what it
                # starts begins with its niceness.
                self.beside(partial(self._nicely, work), f"{self.name}-aside")()
            else:
                work()
            del given, work

    def _nicely(self, work: Work) -> None:
        # Elsewhere niceness is that of the whole process.
        if sys.platform == "linux" and threading.current_thread() is not self.thread:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BACKGROUND_NICE)
        work()

