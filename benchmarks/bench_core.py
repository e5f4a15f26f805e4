"""Scheduler steps per second for fleets of 1 to 10,000 learners with up to 64 open rounds.

A fleet answers its pulls without any work in between, so that a run of events is nothing but the
round logic: pushes, heartbeats, merges that end, commits, launches. The reference of each figure is
a dictionary that stores the same events in the same loop: what Python charges for an event that
nothing is decided about. Times are CPU times: the scheduler waits for nothing, and other programs
should not count. Also checked: the cost of an event does not grow with the steps done.
"""

from __future__ import annotations

from collections import deque
from time import process_time, process_time_ns

import pytest

from syncer.config import Config
from syncer.core import actions as act
from syncer.core import events as ev
from syncer.core.run.scheduler import Scheduler

FRAGMENTS = 64
pytestmark = pytest.mark.benchmark(timer=process_time)
FIRST_NS = 1_000_000


class Fleet:
    """Learners that answer every pull at once; merges that end as soon as they begin.

    `quorum` of all must answer a round; everybody does, so every round closes with the whole fleet.
    """

    def __init__(self, learners: int, pipeline: int = FRAGMENTS):
        self.scheduler = Scheduler(Config(
            learners=learners, quorum=learners, total_steps=10**9, pipeline=pipeline, grace_ms=0,
            sync_interval_steps=0.0))
        self.now_ns = FIRST_NS
        self.waiting: deque = deque()
        for learner in range(learners):
            self.give(ev.Hello(learner, learner, 1, FRAGMENTS))
        for fragment in range(FRAGMENTS):
            self.give(ev.Init(0, 1, fragment, None))

    def give(self, event):
        for action in self.scheduler.step(self.now_ns, event):
            kind = type(action)
            if kind is act.Pull:
                base = self.scheduler.versions[action.fragment]
                self.waiting.extend(
                    ev.Push(learner, generation, action.fragment, action.step, action.attempt,
                            base, 1, 1, 100, None)
                    for learner, generation in action.members)
            elif kind is act.StartMerge:
                self.waiting.append(ev.MergeDone(action.step, 1000, 1.0))
            elif kind is act.Publish:
                self.waiting.append(ev.Synced(action.step, 1000))

    def run(self, events: int):
        """Play this many events; the clock moves by 1 us each."""
        waiting, step = self.waiting, self.scheduler.step
        for _ in range(events):
            self.now_ns += 1000
            event = waiting.popleft()
            for action in step(self.now_ns, event):
                kind = type(action)
                if kind is act.Pull:
                    base = self.scheduler.versions[action.fragment]
                    for learner, generation in action.members:
                        waiting.append(ev.Push(learner, generation, action.fragment, action.step,
                                               action.attempt, base, 1, 1, 100, None))
                elif kind is act.StartMerge:
                    waiting.append(ev.MergeDone(action.step, 1000, 1.0))
                elif kind is act.Publish:
                    waiting.append(ev.Synced(action.step, 1000))


def store_only(events: int):
    """The same loop with nothing decided: an event is made, taken from a queue and stored."""
    waiting, stored = deque(), {}
    waiting.append(ev.Push(0, 1, 0, 1, 1, 0, 1, 1, 100, None))
    for number in range(events):
        event = waiting.popleft()
        stored[event.learner, number & 1023] = event
        waiting.append(ev.Push(number, 1, 0, 1, 1, 0, 1, 1, 100, None))


def ns_per_call(call, events: int) -> float:
    start = process_time_ns()
    call(events)
    return (process_time_ns() - start) / events


@pytest.mark.parametrize("learners", [1, 10, 100, 1000, 10_000])
def test_steps_per_second(benchmark, learners):
    """Amortised over whole rounds: launching and closing cost what the fleet is large."""
    fleet = Fleet(learners)
    events = max(20_000, 3 * learners)
    fleet.run(events)
    benchmark.pedantic(fleet.run, (events,), rounds=5)
    reference_ns = min(ns_per_call(store_only, 20_000) for _ in range(5))
    if benchmark.stats:
        step_ns = benchmark.stats.stats.min / events * 1e9
        benchmark.extra_info["us_per_step"] = round(step_ns / 1000, 3)
        benchmark.extra_info["steps_per_s"] = round(1e9 / step_ns)
        benchmark.extra_info["ratio_to_storing"] = round(reference_ns / step_ns, 3)
        print(f"\n{learners} learners: {step_ns / 1000:.2f} us per step, "
              f"{1e9 / step_ns:,.0f} steps/s, {step_ns / reference_ns:.1f} x storing the event")
        assert step_ns < 50_000


def test_cost_does_not_grow_with_steps_done(benchmark):
    """Interleaved runs of a young and an old scheduler: the old one takes at most 1.5 x."""
    old, young = Fleet(10), Fleet(10)
    old.run(400_000)
    young.run(4_000)
    assert old.scheduler.global_step > 20 * young.scheduler.global_step
    times = [(ns_per_call(young.run, 4_000), ns_per_call(old.run, 4_000)) for _ in range(15)]
    ratio = min(t for _, t in times) / min(t for t, _ in times)
    benchmark.pedantic(old.run, (4_000,), rounds=3)
    benchmark.extra_info["old_to_young"] = round(ratio, 3)
    assert ratio < 1.5


def test_launch_of_a_large_fleet(benchmark):
    """One relaunch of 64 open rounds to 1,000 learners, the largest single step there is."""
    def setup():
        return (Fleet(1000),), {}

    def relaunch(fleet):
        fleet.scheduler.step(fleet.now_ns + 10**12, ev.Tick())
        assert all(round.attempt == 2 for round in fleet.scheduler.gathering)

    benchmark.pedantic(relaunch, setup=setup, rounds=3)
