"""Lanes whose time is the test's, and savers on them. Not a test itself."""

from __future__ import annotations

from syncer.checkpoint.lane import Lane


class SlowWorld(Lane):
    """No thread and no clock: work runs when the test says, and time passes only in pauses."""

    def __init__(self):
        self.waiting = []
        self.time_s = 0.0
        self.besides = []
        self.gave_way = 0

    def submit(self, work):
        self.waiting.append(work)

    def give_way(self, hastened):
        self.gave_way += 1

    def beside(self, work, name):
        self.besides.append(name)
        work()
        return lambda: None

    def now_s(self):
        return self.time_s

    def pause(self, seconds):
        self.time_s += seconds

    def close(self):
        assert not self.waiting
