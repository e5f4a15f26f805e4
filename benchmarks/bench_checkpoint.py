"""Checkpoints against the raw disk: writing, loading, and rounds that go on meanwhile.

Every figure is a ratio of two things measured in turns in one run. Files of `GIB` GiB are written
beside this one (SYNCER_BENCH_GIB changes the size), so the figures are those of this disk.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.limits.figure import Figure
from benchmarks.limits.figure import in_turns as figure_of
from syncer.checkpoint.atomic import PIECE_BYTES
from syncer.checkpoint.facts import Cut
from syncer.checkpoint.reader import CHUNK_BYTES, Checkpoint
from syncer.checkpoint.saver import Saver
from syncer.checkpoint.writer import write_checkpoint
from syncer.kernels import sha256_pair
from syncer.layout import RDA, FragmentLayout, Layout
from syncer.merge import FragmentStore
from syncer.protocol import DTYPE_BF16, Msg
from syncer.steps import version_at
from syncer.wire import encode
from syncer.wire.messages import Push
from tests.e2e.scripted import ScriptedLearner, ServerProcess, to_wire

GIB = float(os.environ.get("SYNCER_BENCH_GIB", "2"))
FRAGMENTS = 8
NUMEL = int(GIB * 2**30) // 8 // FRAGMENTS
TURNS = int(os.environ.get("SYNCER_BENCH_TURNS", "5"))


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="bench-checkpoint-", dir=Path(__file__).parent))
    yield place
    shutil.rmtree(place)


def state_of(numel: int) -> list[SimpleNamespace]:
    rng = np.random.default_rng(1)
    return [SimpleNamespace(version=version_at(100, p, FRAGMENTS),
                            params=rng.standard_normal(numel, dtype=np.float32),
                            state={"momentum": rng.standard_normal(numel, dtype=np.float32)})
            for p in range(FRAGMENTS)]


@pytest.fixture(scope="module")
def versions():
    return state_of(NUMEL)


def cut_of(versions, step: int = 100) -> Cut:
    return Cut.of(step, versions, {0: (1, 1, 1)}, fingerprint=bytes(32), contract=bytes(32),
                  layout=None, optimizer={"name": "nesterov"}, profile_hash=bytes(32))


def seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def settled() -> None:
    """Nothing of the last measurement is left for the disk to do."""
    os.sync()


def in_turns(reference: Callable[[], object], ours: Callable[[], object]) -> tuple[float, ...]:
    """Median seconds of both and the median of the ratios reference / ours, over TURNS pairs."""
    pairs = []
    for turn in range(TURNS):
        found = {}
        for side in (0, 1) if turn % 2 == 0 else (1, 0):
            settled()
            found[side] = seconds((reference, ours)[side])
        pairs.append((found[0], found[1]))
    return (statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs),
            statistics.median(a / b for a, b in pairs))


def report(benchmark, text: str, reference_s: float, ours_s: float, ratio: float) -> None:
    benchmark.extra_info["ratio"] = ratio
    benchmark.pedantic(lambda: None)
    size_mb = GIB * 2**30 / 1e6
    print(f"\n{text}: {ratio:.2f} x   ({size_mb / ours_s:.0f} MB/s, reference "
          f"{size_mb / reference_s:.0f} MB/s)")


@contextmanager
def cores(count: int):
    """This process on the first cores only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def raw_write(path: Path, versions) -> None:
    """The same bytes with the same calls and one fsync: no format, digest or check.

    Like ours it replaces a file that stays in the page cache until the end: a raw write into the
    memory that an unlinked file has just given back would be a race against another machine.
    """
    new = path.with_suffix(".new")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    offset = 0
    for version in versions:
        for array in (version.params, version.state["momentum"]):
            view = memoryview(array).cast("B")
            for at in range(0, len(view), PIECE_BYTES):
                offset += os.pwrite(descriptor, view[at : at + PIECE_BYTES], offset)
    os.fsync(descriptor)
    os.close(descriptor)
    os.replace(new, path)


@pytest.mark.parametrize("count", [2, 1])
def test_write_against_a_raw_write(benchmark, directory, versions, count):
    if len(os.sched_getaffinity(0)) < count:
        pytest.skip("this machine has one core")
    with cores(count):
        found = in_turns(lambda: raw_write(directory / "raw", versions),
                         lambda: write_checkpoint(directory / "c", cut_of(versions)))
    report(benchmark, f"write {GIB:g} GiB with digests on {count} core(s), against raw write + "
           "fsync", *found)


def test_direct_write_against_a_cached_one(benchmark, directory, versions):
    found = in_turns(
        lambda: write_checkpoint(directory / "c", cut_of(versions)),
        lambda: write_checkpoint(directory / "c", cut_of(versions), direct=True))
    report(benchmark, "--checkpoint-direct, against without", *found)


def raw_load(path: Path, numel: int = NUMEL) -> list[np.ndarray]:
    """Read the file piece by piece and copy it into arrays of its fragments."""
    arrays = []
    with open(path, "rb", buffering=0) as file:
        file.seek(4096)
        buffer = bytearray(CHUNK_BYTES)
        for _ in range(2 * FRAGMENTS):
            array = np.empty(numel, np.float32)
            view = memoryview(array).cast("B")
            at = 0
            while at < len(view):
                count = file.readinto(memoryview(buffer)[: len(view) - at])
                view[at : at + count] = memoryview(buffer)[:count]
                at += count
            arrays.append(array)
    return arrays


def load(path: Path, verify: bool) -> None:
    with Checkpoint(path) as checkpoint:
        checkpoint.load(verify=verify)


def hash_all(versions) -> None:
    for version in versions:
        sha256_pair(version.params, version.state["momentum"])


def test_load_against_a_raw_read_and_copy(benchmark, directory, versions):
    path = directory / "c"
    write_checkpoint(path, cut_of(versions))
    raw_load(path)  # the page cache holds it from here on, for both sides
    found = in_turns(lambda: raw_load(path), lambda: load(path, False))
    report(benchmark, "load without digests (finite values checked), against read + copy", *found)


def test_verified_load_against_the_digests_alone(benchmark, directory, versions):
    path = directory / "c"
    write_checkpoint(path, cut_of(versions))
    raw_load(path)
    found = in_turns(lambda: hash_all(versions), lambda: load(path, True))
    report(benchmark, "verified load, against hashing the same bytes in memory", *found)


@contextmanager
def state_on_disk(mib: int) -> Iterator[tuple[Path, list[SimpleNamespace]]]:
    """A folder beside this file, and a state of so many MiB."""
    place = Path(tempfile.mkdtemp(prefix="bench-checkpoint-", dir=Path(__file__).parent))
    try:
        yield place, state_of(mib * 2**20 // 8 // FRAGMENTS)
    finally:
        shutil.rmtree(place)


def write_figure(mib: int, turns: int) -> Figure:
    """With digests, against a raw write and fsync of the same bytes."""
    with state_on_disk(mib) as (place, state):
        return figure_of(lambda: raw_write(place / "raw", state),
                         lambda: write_checkpoint(place / "c", cut_of(state)),
                         mib * 2**20 / 1e9, turns, before=settled)


def load_figure(mib: int, turns: int) -> Figure:
    """Verified, against the slower of a raw read and copy and the digests alone; what was just
    written is in the page cache for both."""
    with state_on_disk(mib) as (place, state):
        path, numel = place / "c", len(state[0].params)
        write_checkpoint(path, cut_of(state))
        figures = [figure_of(bound, lambda: load(path, True), mib * 2**20 / 1e9, turns)
                   for bound in (lambda: raw_load(path, numel), lambda: hash_all(state))]
    return max(figures, key=lambda figure: figure.ratio)


def outer_steps(log: list[dict]) -> list[float]:
    """When each step was over, in seconds, as the server's log says."""
    return [moment(line) for line in log if line["message"] == "outer step"]


def moment(line: dict) -> float:
    return datetime.fromisoformat(line["time"]).timestamp()


def longest_gaps(log: list[dict]) -> tuple[list[float], list[float]]:
    """Of each write in the background: the longest time between two steps while it went on, and in
    as many steps after it."""
    during, after = [], []
    steps = outer_steps(log)
    gaps = [(b - a, a, b) for a, b in pairwise(steps)]
    for line in log:
        if line["message"] == "checkpoint written" and line["kind"] == "periodic":
            end = moment(line)
            begin = end - line["seconds"]
            inside = [gap for gap, a, b in gaps if b > begin and a < end]
            later = [gap for gap, a, _ in gaps if a >= end][: len(inside)]
            if len(later) == len(inside):
                during.append(max(inside))
                after.append(max(later))
    return during, after


@pytest.mark.parametrize("pace_ms", [500, 0])
@pytest.mark.parametrize("more", [(), ("--checkpoint-direct",)], ids=["cached", "direct"])
def test_rounds_go_on_during_a_background_write(benchmark, directory, more, pace_ms):
    """A real server and a learner that answers at once: the longest time between two outer steps
    while a checkpoint is written in the background, against as many steps without one. With a round
    every half second, which is short for a model of this size, and as fast as it goes."""
    layout = Layout(tuple(FragmentLayout(RDA, (NUMEL,)) for _ in range(FRAGMENTS)))
    every = (2 if pace_ms else 6) * FRAGMENTS
    steps = every * (TURNS + 1)
    values = np.random.default_rng(2).standard_normal(NUMEL, dtype=np.float32)
    with (
        ServerProcess(directory, "--checkpoint-path", str(directory / "run"), "--checkpoint-every",
                      str(every), "--background-checkpoint", "--pipeline", "2", *more,
                      "--min-round-interval-ms", str(pace_ms), steps=steps,
                      environment={"SYNCER_CHECK": "0"}) as server,
        ScriptedLearner(server.port, 0, layout, dtype=DTYPE_BF16) as learner,
    ):
        learner.send_init([values] * FRAGMENTS)
        delta = to_wire(values * 1e-3, DTYPE_BF16)
        for step in range(1, steps + 1):
            pull = learner.pull(step)
            head = encode.push_head(Push(0, pull.fragment, step, pull.attempt,
                                         learner.versions[pull.fragment], step, 1, 1,
                                         memoryview(b"")))
            learner.send_bulk(Msg.PUSH_FRAGMENT, head, delta)
            learner.seen.clear()
        learner.take_cut()
        learner.close()
        server.wait()
        during, after = longest_gaps(server.log.lines())
    ratio = statistics.median(during) / statistics.median(after)
    benchmark.extra_info["ratio"] = ratio
    benchmark.pedantic(lambda: None)
    print(f"\nlongest gap between outer steps during a background write, {pace_ms} ms "
          f"apart {more}, against without: "
          f"{ratio:.2f} x   ({statistics.median(during):.3f} s, {statistics.median(after):.3f} s, "
          f"median of {len(during)})")


def test_memory_of_a_background_write(benchmark, directory):
    """Fragment pairs that are held beyond the current ones, while a write is under way."""
    layout = Layout(tuple(FragmentLayout(RDA, (NUMEL // 8,)) for _ in range(FRAGMENTS)))
    store = FragmentStore(layout, lr=0.7, momentum=0.9, threads=1)
    for p in range(FRAGMENTS):
        store.adopt(p, np.zeros(NUMEL // 8, np.float32))
    gradient = np.ones(NUMEL // 8, np.float32)
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
    benchmark.extra_info["ratio"] = most
    benchmark.pedantic(lambda: None)
    print(f"\nspare fragment pairs per commit during a background write: at most {most:.2f}")
