"""A save in the background gives way and has a rate, until somebody waits for it."""

from __future__ import annotations

import os
import queue
import sys
import threading

import pytest

from syncer.checkpoint.files import Files
from syncer.checkpoint.lane import BACKGROUND_NICE, Lane
from syncer.checkpoint.pieces import PIECE_BYTES
from syncer.checkpoint.saver import Saver
from syncer.checkpoint.writer import write_checkpoint
from syncer.layout import FragmentLayout, Layout
from tests.checkpoint.cuts import Cached, copy_of, make_cut
from tests.checkpoint.lanes import SlowWorld

PATIENCE_S = 60.0


@pytest.fixture
def outcomes():
    return queue.Queue()


def test_who_says_that_there_is_time_is_nicer_than_the_others(tmp_path, outcomes):
    """And nobody else: what writes would keep everybody waiting while it holds the lock of the
    interpreter."""
    if sys.platform != "linux":
        pytest.skip("niceness of a single thread is known on Linux only")
    seen = {}

    class Watching(Files):
        def sync(self, descriptor):
            for thread in (saver.lane.thread, saver.lane.usher.thread, threading.current_thread()):
                seen[thread.name] = os.getpriority(os.PRIO_PROCESS, thread.native_id)
            super().sync(descriptor)

    usual = os.getpriority(os.PRIO_PROCESS, 0)
    saver = Saver(tmp_path / "c", files=Watching())
    saver.save("periodic", copy_of(make_cut(8)), outcomes.put, let_go=True)
    assert outcomes.get(timeout=PATIENCE_S).error is None
    assert seen == {"syncer-checkpoint": usual,
                    "syncer-checkpoint-usher": min(19, usual + BACKGROUND_NICE)}
    saver.close()
    assert not saver.lane.thread.is_alive()
    assert not saver.lane.usher.thread.is_alive()


class Busy(Lane):
    """Others leave no time at all: whoever gives way waits until somebody waits for it."""

    def __init__(self):
        super().__init__()
        self.gives_way = threading.Event()

    def give_way(self, hastened):
        self.gives_way.set()
        while not hastened():
            self.pause(0.001)


def test_a_write_that_gives_way_to_all_ends_once_somebody_waits(tmp_path, outcomes):
    lane = Busy()
    saver = Saver(tmp_path / "c", lane=lane)
    saver.save("periodic", copy_of(make_cut(8)), outcomes.put, let_go=True)
    assert lane.gives_way.wait(PATIENCE_S)
    assert outcomes.empty()
    saver.hasten()
    assert outcomes.get(timeout=PATIENCE_S).error is None
    lane.gives_way.clear()
    saver.save("periodic", copy_of(make_cut(9)), outcomes.put, let_go=True)
    assert lane.gives_way.wait(PATIENCE_S), "the next one gives way again"
    saver.hasten()
    assert outcomes.get(timeout=PATIENCE_S).error is None
    saver.close()


class Clocked(SlowWorld):
    """Time passes in pauses alone, and somebody begins to wait at `waits_at_s`."""

    def __init__(self, waits_at_s=float("inf")):
        super().__init__()
        self.waits_at_s = waits_at_s
        self.saver = None

    def pause(self, seconds):
        super().pause(seconds)
        if self.time_s >= self.waits_at_s:
            self.saver.hasten()


RATED = Layout((FragmentLayout(0, (2 * PIECE_BYTES // 8,)),) * 4)
"""State of 64 MiB."""


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize(("given", "least_s", "most_s"), [
    ((8 * 2**20, True, float("inf")), 7.0, 8.1), ((8 * 2**20, True, 3.0), 3.0, 3.1),
    ((8 * 2**20, False, float("inf")), 0.0, 0.0), ((None, True, float("inf")), 0.0, 0.0),
    ((10**15, True, float("inf")), 0.0, 0.01)])
def test_a_write_has_a_rate_until_somebody_waits(tmp_path, given, least_s, most_s, direct):
    """64 MiB, of which the last piece need not be waited for."""
    rate, let_go, waits_at_s = given
    cut, told, lane = make_cut(8, layout=RATED), [], Clocked(waits_at_s)
    lane.saver = saver = Saver(tmp_path / "c", lane=lane, rate=rate, direct=direct, files=Cached())
    saver.save("periodic", copy_of(cut), told.append, let_go=let_go)
    lane.waiting.pop()()
    assert told[0].error is None
    assert least_s <= told[0].seconds <= most_s
    write_checkpoint(tmp_path / "alone", cut)
    assert (tmp_path / "c").read_bytes() == (tmp_path / "alone").read_bytes()
    saver.close()


def test_what_was_hastened_is_not_waited_for_later(tmp_path):
    """The next save begins anew: at its rate, not behind what the last one wrote beyond that."""
    told, lane = [], Clocked(waits_at_s=1.0)
    lane.saver = saver = Saver(tmp_path / "c", lane=lane, rate=PIECE_BYTES)
    for step in (8, 9):
        saver.save("periodic", make_cut(step, layout=RATED), told.append, let_go=True)
        lane.waiting.pop()()
        lane.waits_at_s = float("inf")
    assert [round(outcome.seconds) for outcome in told] == [1, 8]
    saver.close()
