"""`python -m tests.sim.large`: the scheduler alone under a fleet of thousands, with empty payloads.

A plan for fleets that no test machine can run: how many rounds a second the policies reach, how
long rounds wait for their quorum, who is left out, and what the round logic costs. Learners answer
a pull after their next optimizer step and their own upload time; nobody fails.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import sys
from time import process_time

import numpy as np

from syncer.core import actions as act
from syncer.core import events as ev
from syncer.core.run.scheduler import Scheduler
from tests.toy_driver import toy_config

SECOND = 1_000_000_000


class LargeFleet:
    """One policy at work. Step times are log-normal around `step_s`, uploads around `upload_s`."""

    def __init__(self, config, fragments: int, step_s: float, upload_s: float, spread: float):
        rng = np.random.default_rng(1)
        self.rng = rng
        self.config = config
        self.merge_ns = SECOND // 20
        self.step_ns = step_s * SECOND * rng.lognormal(0, spread, config.learners)
        self.upload_ns = upload_s * SECOND * rng.lognormal(0, 1, config.learners)
        self.scheduler = Scheduler(config)
        self.now_ns = 1
        self.heap: list = []
        self.events = 0
        self.idle_ns = 0
        self.last_ns = 0
        self.tape: list[dict] = []
        self.count = 0
        for learner in range(config.learners):
            self.feed(ev.Hello(learner, learner, 1, fragments))
        for fragment in range(fragments):
            self.feed(ev.Init(0, 1, fragment, None))

    def push_later(self, due_ns: int, item) -> None:
        self.count += 1
        heapq.heappush(self.heap, (due_ns, self.count, item))

    def feed(self, event) -> None:
        """Idle is the time in which no round gathers: learners train, nobody is asked."""
        self.events += 1
        if not self.scheduler.gathering:
            self.idle_ns += self.now_ns - self.last_ns
        self.last_ns = self.now_ns
        for action in self.scheduler.step(self.now_ns, event):
            kind = type(action)
            if kind is act.Pull:
                self.answers(action)
            elif kind is act.StartMerge:
                self.push_later(self.now_ns + self.merge_ns,
                                ev.MergeDone(action.step, self.merge_ns // 5, 1.0))
            elif kind is act.Publish:
                self.push_later(self.now_ns, ev.Synced(action.step, 10**7))
            elif kind is act.Record and "step" in action.fields and "ms" in action.fields:
                self.tape.append({key: action.fields[key] for key in (
                    "ms", "quorum_ms", "grace_ms", "sync/responders")}
                    | {"expected": len(action.fields["expected"])})

    def answers(self, pull) -> None:
        """Each member's push arrives after the step that it is in, and its upload."""
        ids = np.array([member[0] for member in pull.members])
        moments = (self.now_ns + self.rng.random(ids.size) * self.step_ns[ids]
                   + self.upload_ns[ids]).astype(np.int64)
        order = np.argsort(moments, kind="stable")
        base = self.scheduler.versions[pull.fragment]
        arrivals = iter(zip(moments[order].tolist(), ids[order].tolist(), strict=True))
        self.next_arrival((pull.fragment, pull.step, pull.attempt, base), arrivals)

    def next_arrival(self, pull: tuple, arrivals) -> None:
        following = next(arrivals, None)
        if following is not None:
            self.push_later(following[0], (pull, following[1], arrivals))

    def run(self, until_ns: int) -> None:
        while True:
            due = self.scheduler.deadline_ns()
            moment = self.heap[0][0] if self.heap else until_ns
            if due is not None and due <= moment:
                self.now_ns = max(self.now_ns, due)
                event = ev.Tick()
            elif moment < until_ns:
                self.now_ns, _, item = heapq.heappop(self.heap)
                event = item
                if type(item) is tuple:
                    pull, learner, arrivals = item
                    self.next_arrival(pull, arrivals)
                    step = int(self.now_ns / self.step_ns[learner])
                    event = ev.Push(learner, 1, pull[0], pull[1], pull[2], pull[3], step, 24, 24,
                                    None)
            if self.now_ns >= until_ns or (moment >= until_ns and (due is None or due > moment)):
                return
            self.feed(event)

    def report(self, name: str, simulated_s: float, cpu_s: float) -> str:
        tape = self.tape
        waits = [r["quorum_ms"] for r in tape if r["quorum_ms"] is not None]
        graces = [r["grace_ms"] for r in tape if r["grace_ms"] is not None]
        merged = sum(r["sync/responders"] for r in tape) / sum(r["expected"] for r in tape)
        return (f"| {name} | {len(tape) / simulated_s:.2f} | {np.mean(waits) / 1e3:.1f} | "
                f"{np.max(waits) / 1e3:.1f} | {np.mean(graces) / 1e3:.1f} | {merged:.1%} | "
                f"{self.idle_ns / 1e9 / simulated_s:.1%} | {self.events / 1e6:.2f} | "
                f"{cpu_s / self.events * 1e6:.1f} | {cpu_s:.0f} |")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.large", description=__doc__)
    parser.add_argument("--learners", type=int, default=10_000)
    parser.add_argument("--fragments", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=3600, help="simulated")
    parser.add_argument("--step-s", type=float, default=30, help="typical optimizer step")
    parser.add_argument("--upload-s", type=float, default=5, help="typical upload of a fragment")
    parser.add_argument("--spread", type=float, default=0.2, help="of the step times' logarithm")
    parser.add_argument("--pipeline", type=int, default=64)
    options = parser.parse_args()
    learners = options.learners
    print("| policy | rounds/s | to quorum s | longest | grace s | merged of expected | "
          "idle | million events | us CPU per event | s of CPU |\n"
          "|---|---|---|---|---|---|---|---|---|---|")
    gc.disable()                                  # nothing here is in a cycle
    for name, quorum, grace_ms in (("all", learners, 1000), ("90 %", learners * 9 // 10, 10_000),
                                   ("half", learners // 2, 10_000)):
        config = toy_config(learners=learners, quorum=quorum, grace_ms=grace_ms,
                            pipeline=options.pipeline, sync_interval_steps=24.0,
                            total_steps=10**6, quorum_timeout_s=900)
        fleet = LargeFleet(config, options.fragments, options.step_s, options.upload_s,
                           options.spread)
        start = process_time()
        fleet.run(int(options.seconds * SECOND))
        print(fleet.report(name, options.seconds, process_time() - start), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
