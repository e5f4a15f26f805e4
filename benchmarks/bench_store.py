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
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from syncer.core.layout import RDA, FragmentLayout, Layout
from syncer.kernels import sha256_pair
from syncer.merge import FragmentStore
from syncer.store.atomic import PIECE_BYTES
from syncer.store.facts import Cut, expected_version
from syncer.store.reader import CHUNK_BYTES, Checkpoint
from syncer.store.saver import Saver
from syncer.store.writer import write_checkpoint

GIB = float(os.environ.get("SYNCER_BENCH_GIB", "2"))
FRAGMENTS = 8
NUMEL = int(GIB * 2**30) // 8 // FRAGMENTS
TURNS = int(os.environ.get("SYNCER_BENCH_TURNS", "5"))


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="bench-store-", dir=Path(__file__).parent))
    yield place
    shutil.rmtree(place)


@pytest.fixture(scope="module")
def versions():
    rng = np.random.default_rng(1)
    return [SimpleNamespace(version=expected_version(100, p, FRAGMENTS),
                            params=rng.standard_normal(NUMEL, dtype=np.float32),
                            state={"momentum": rng.standard_normal(NUMEL, dtype=np.float32)})
            for p in range(FRAGMENTS)]


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


def raw_write(path: Path, versions, direct: bool = False) -> None:
    """The same bytes with the same calls and one fsync: no format, digest, rename or check."""
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | (os.O_DIRECT if direct else 0)
    descriptor = os.open(path, flags)
    offset = 0
    for version in versions:
        for array in (version.params, version.state["momentum"]):
            view = memoryview(array).cast("B")
            for at in range(0, len(view), PIECE_BYTES):
                offset += os.pwrite(descriptor, view[at : at + PIECE_BYTES], offset)
    os.fsync(descriptor)
    os.close(descriptor)


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


def raw_load(path: Path) -> list[np.ndarray]:
    """Read the file piece by piece and copy it into arrays of its fragments."""
    arrays = []
    with open(path, "rb", buffering=0) as file:
        file.seek(4096)
        buffer = bytearray(CHUNK_BYTES)
        for _ in range(2 * FRAGMENTS):
            array = np.empty(NUMEL, np.float32)
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


def gaps_s(store: FragmentStore, gradient: np.ndarray, first: int, running) -> tuple[float, float]:
    """Commits fragment after fragment while `running()`: the longest time between two commits, and
    the 95th percentile of these times."""
    gaps, step, last = [], first, time.perf_counter()
    while running() or len(gaps) < 2 * FRAGMENTS:
        fragment = (step - 1) % FRAGMENTS
        store.publish(store.prepare(fragment, step, [(0, 1, 1.0, gradient)]))
        now = time.perf_counter()
        gaps.append(now - last)
        last, step = now, step + 1
    return max(gaps), statistics.quantiles(gaps, n=20)[-1]


def test_rounds_go_on_during_a_background_write(benchmark, directory):
    """The gap between commits with a write under way, against without."""
    layout = Layout(tuple(FragmentLayout(RDA, (NUMEL,)) for _ in range(FRAGMENTS)))
    store = FragmentStore(layout, lr=0.7, momentum=0.9, threads=1)
    rng = np.random.default_rng(2)
    for p in range(FRAGMENTS):
        store.adopt(p, rng.standard_normal(NUMEL, dtype=np.float32))
    gradient = rng.standard_normal(NUMEL, dtype=np.float32)
    gaps_s(store, gradient, 1, lambda: False)
    saver = Saver(directory / "background")
    pairs, spares = [], []
    for turn in range(TURNS):
        first = 1 + (turn + 1) * 100 * FRAGMENTS
        settled()
        alone = gaps_s(store, gradient, first, lambda: False)
        settled()
        done = threading.Event()
        cut = Cut.of(first - 1 - (first - 1) % FRAGMENTS, [
            SimpleNamespace(version=v, params=store.current(p).params, state=store.current(p).state)
            for p in range(FRAGMENTS)
            for v in [expected_version(first - 1 - (first - 1) % FRAGMENTS, p, FRAGMENTS)]
        ], {}, fingerprint=bytes(32), contract=bytes(32), layout=None,
            optimizer={"name": "nesterov"}, profile_hash=bytes(32))
        before = store.live_bytes
        saver.save("periodic", cut, lambda outcome, done=done: done.set(), let_go=True)
        del cut
        during = gaps_s(store, gradient, first, lambda done=done: not done.is_set())
        assert done.wait(600)
        pairs.append((during[0] / alone[0], during[1] / alone[1]))
        spares.append((store.live_bytes - before) / (8 * NUMEL))
    saver.close()
    ratio, most = (statistics.median(column) for column in zip(*pairs, strict=True))
    benchmark.extra_info["ratio"] = ratio
    benchmark.pedantic(lambda: None)
    print(f"\ngap between commits while a checkpoint is written, against without: longest "
          f"{ratio:.2f} x, 95th percentile {most:.2f} x; fragment pairs "
          f"still held afterwards: {max(spares):.1f}")
