"""Checkpoints against the raw disk: writing, loading, and rounds that go on meanwhile.

Every figure is a ratio of two things measured in turns in one run. State of `GIB` GiB is written
beside this one (SYNCER_BENCH_GIB changes the size), so the figures are those of this disk.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from benchmarks import background_gap
from benchmarks.limits import disk
from syncer.checkpoint.facts import Cut
from syncer.checkpoint.saver import Saver
from syncer.layout import RDA, FragmentLayout, Layout
from syncer.merge import FragmentStore

GIB = float(os.environ.get("SYNCER_BENCH_GIB", "2"))
FRAGMENTS = 8
TURNS = int(os.environ.get("SYNCER_BENCH_TURNS", "5"))


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-",
                                     dir=Path(__file__).parent) as place:
        yield Path(place)


@contextmanager
def cores(count: int) -> Iterator[None]:
    """This process on the first cores only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def report(benchmark, text: str, ratio: float) -> None:
    benchmark.extra_info["ratio"] = ratio
    benchmark.pedantic(lambda: None)
    print(f"\n{text}")


@pytest.mark.parametrize("count", [2, 1])
@pytest.mark.parametrize("what", ["write", "write, direct", "load"])
def test_checkpoints_against_disk_and_digest(benchmark, what, count):
    if len(os.sched_getaffinity(0)) < count:
        pytest.skip("this machine has one core")
    mib = int(GIB * 1024)
    with cores(count):
        found = disk.load(mib, TURNS) if what == "load" else disk.write(mib, TURNS, "," in what)
    report(benchmark, f"{what}, {GIB:g} GiB with digests on {count} core(s), against the same "
           f"bytes alone: {found.ratio:.2f} x   ({found.ours:.2f} GB/s, bound {found.bound:.2f})",
           found.ratio)


@pytest.mark.parametrize("pace_ms", [500, 0])
@pytest.mark.parametrize("more", [(), ("--checkpoint-direct",)], ids=["cached", "direct"])
def test_rounds_go_on_during_a_background_write(benchmark, more, pace_ms):
    """With a round every half second, which is short for a model of this size, and as fast as it
    goes."""
    found = background_gap.measure(
        *more, "--min-round-interval-ms", str(pace_ms), mib=int(GIB * 1024), saves=TURNS,
        every=(4 if pace_ms else 18) * background_gap.FRAGMENTS)
    report(benchmark, f"rounds {pace_ms} ms apart {' '.join(more)}: {found}", found.ratio)


def test_memory_of_a_background_write(benchmark, directory):
    """Fragment pairs that are held beyond the current ones, while a write is under way."""
    numel = int(GIB * 2**30) // 8 // FRAGMENTS // 8
    layout = Layout(tuple(FragmentLayout(RDA, (numel,)) for _ in range(FRAGMENTS)))
    store = FragmentStore(layout, lr=0.7, momentum=0.9, threads=1)
    for p in range(FRAGMENTS):
        store.adopt(p, np.zeros(numel, np.float32))
    gradient = np.ones(numel, np.float32)
    before = store.live_buffers
    saver = Saver(directory / "background")
    done = threading.Event()
    cut = Cut.of(0, [store.current(p) for p in range(FRAGMENTS)], {}, fingerprint=bytes(32),
                 contract=bytes(32), layout=None, optimizer={"name": "nesterov"},
                 profile_hash=bytes(32))
    saver.save("periodic", cut, lambda outcome: done.set(), let_go=True)
    del cut
    step, most = 0, 0.0
    while not done.is_set() or step < FRAGMENTS:
        step += 1
        store.publish(store.prepare((step - 1) % FRAGMENTS, step, [(0, 1, 1.0, gradient)]))
        extra = (store.live_buffers - before) / 2
        most = max(most, extra / step)
    saver.close()
    report(benchmark, "spare fragment pairs per commit during a background write: at most "
           f"{most:.2f}", most)
