"""The longest time between two broadcasts while a checkpoint is written in the background, against
as many without one, of the same run.

    python -m benchmarks.background_gap [--mib 512] [--learners 1] [flags of the server ...]

A real server, learners in processes of their own that answer every pull at once, and saves far
enough apart that as many broadcasts as one takes come after it without any. Must not be run beside
other work on the disk.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.limits.figure import Figure
from syncer.errors import SyncerError
from syncer.layout import RDA, FragmentLayout, Layout
from syncer.protocol import DTYPE_BF16, Msg
from syncer.wire import encode
from syncer.wire.messages import Bcast, Manifest, Pull, Push
from tests.e2e.scripted import ScriptedLearner, ServerProcess, to_wire

ROOT = Path(__file__).resolve().parents[1]
FRAGMENTS = 8
EVERY = 144
"""Steps between two saves."""


class Gaps(NamedTuple):
    """Of each write: seconds it took, and the longest gaps during it and after it."""

    write_s: list[float]
    during_s: list[float]
    after_s: list[float]

    @property
    def ratio(self) -> float:
        """Of the medians."""
        return statistics.median(self.during_s) / statistics.median(self.after_s)

    @property
    def worst(self) -> float:
        """Of the longest ones of the whole run."""
        return max(self.during_s) / max(self.after_s)

    def __str__(self) -> str:
        return (f"longest gap between broadcasts {statistics.median(self.during_s):.3f} s during a "
                f"background write of {statistics.median(self.write_s):.2f} s, "
                f"{statistics.median(self.after_s):.3f} s after it: {self.ratio:.2f} x (medians of "
                f"{len(self.write_s)}), {self.worst:.2f} x (longest)")


def layout_of(mib: int) -> Layout:
    """Fragments whose parameters and momentum are so many MiB."""
    return Layout((FragmentLayout(RDA, (mib * 2**20 // 8 // FRAGMENTS,)),) * FRAGMENTS)


def learn(port: int, learner_id: int, mib: int) -> None:
    """A learner: answers every pull at once, and prints when each broadcast was whole."""
    layout = layout_of(mib)
    numel = layout.fragments[0].numel
    values = np.random.default_rng(2).standard_normal(numel, dtype=np.float32)
    delta = to_wire(values * 1e-3, DTYPE_BF16)
    seen: list[float] = []
    with ScriptedLearner(port, learner_id, layout, dtype=DTYPE_BF16) as learner:
        if learner_id == 0:
            learner.send_init([values] * FRAGMENTS)
        while not isinstance(message := learner.next(), Manifest):
            if isinstance(message, Bcast) and message.version:
                seen.append(time.time())
            elif isinstance(message, Pull):
                head = encode.push_head(Push(
                    learner_id, message.fragment, message.step, message.attempt,
                    learner.versions[message.fragment], message.step, 1, 1, memoryview(b"")))
                learner.send_bulk(Msg.PUSH_FRAGMENT, head, delta)
            learner.seen.clear()
        while len(learner.final) < FRAGMENTS:
            learner.next()
        learner.acknowledge(message.step)
    print(json.dumps(seen))


def measure(*flags: str, mib: int = 512, learners: int = 1, saves: int = 5,
            every: int = EVERY) -> Gaps:
    """Plays a run with so many periodic saves, and some steps after the last one."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(
            tempfile.TemporaryDirectory(prefix="background-gap-", dir=ROOT)))
        server = stack.enter_context(ServerProcess(
            place, "--checkpoint-path", str(place / "run"), "--checkpoint-every", str(every),
            "--background-checkpoint", "--pipeline", "2", *flags, learners=learners,
            steps=every * (saves + 1) + 1, environment={"SYNCER_CHECK": "0"}))
        others = [stack.enter_context(subprocess.Popen(
            [sys.executable, "-m", "benchmarks.background_gap", "--learn", str(server.port),
             str(learner), str(mib)], cwd=ROOT, stdout=subprocess.PIPE, text=True))
            for learner in range(learners)]
        told = [other.communicate()[0] for other in others]
        status = server.wait()
        if status:
            raise SyncerError(f"the server ended with {status}: {server.log.text()[-2000:]}")
        return gaps_of(json.loads(told[0]), server.log.lines())


def figure(short: bool) -> Figure:
    """How much of twice the longest gap without a write the longest one beside one takes."""
    found = measure(mib=16 if short else 512, saves=2 if short else 6)
    return Figure(2 / found.ratio)


def gaps_of(seen: list[float], log: list[dict]) -> Gaps:
    """seen: when each broadcast came."""
    writes = []
    for line in log:
        if line["message"] == "checkpoint written" and line["kind"] != "final":
            end = datetime.fromisoformat(line["time"]).timestamp()
            writes.append((end - line["seconds"], end))
    found = Gaps([], [], [])
    for (begin, end), (following, _) in pairwise(writes):
        during = [b - a for a, b in pairwise(seen) if b > begin and a < end]
        after = [b - a for a, b in pairwise(seen) if a >= end and b <= following][: len(during)]
        if during and after:
            found.write_s.append(end - begin)
            found.during_s.append(max(during))
            found.after_s.append(max(after))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--learners", type=int, default=1)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--learn", nargs=3, type=int, help=argparse.SUPPRESS)
    given, flags = parser.parse_known_args()
    if given.learn:
        learn(*given.learn)
        return
    found = measure(*flags, mib=given.mib, learners=given.learners, saves=given.saves)
    for name, values in found._asdict().items():
        print(f"{name:8}", *(f"{value:6.3f}" for value in values))
    print(found)


if __name__ == "__main__":
    main()
