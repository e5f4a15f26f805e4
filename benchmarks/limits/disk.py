"""Checkpoints at their bound: writing with digests, and loading with digests, against the disk and
the hash alone. Must not know the table.

The bounds are the same bytes with the fastest calls that were found, and nothing else: no format,
no digest, no check, no second name. Files lie beside this one. Best with two free cores.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.limits.figure import Figure, NotHere, in_turns
from syncer.checkpoint.atomic import WriteError
from syncer.checkpoint.facts import Cut
from syncer.checkpoint.pieces import CALL_BYTES, PIECE_BYTES
from syncer.checkpoint.reader import Checkpoint
from syncer.checkpoint.writer import write_checkpoint
from syncer.kernels import sha256_pair
from syncer.steps import version_at

FRAGMENTS = 8
HEADER_BYTES = 4096


def versions_of(mib: int) -> list[Any]:
    """Fragments of parameters and momentum, so many MiB in all, in memory as a server has it."""
    numel = mib * 2**20 // 8 // FRAGMENTS
    rng = np.random.default_rng(1)

    def values() -> np.ndarray:
        array = np.frombuffer(mmap.mmap(-1, 4 * numel), np.float32)
        rng.standard_normal(out=array, dtype=np.float32)
        return array

    return [SimpleNamespace(version=version_at(100, p, FRAGMENTS), params=values(),
                            state={"momentum": values()}) for p in range(FRAGMENTS)]


def cut_of(versions: list[Any], step: int = 100) -> Cut:
    """They as a cut."""
    return Cut.of(step, versions, {0: (1, 1, 1)}, fingerprint=bytes(32), contract=bytes(32),
                  layout=None, optimizer={"name": "nesterov"}, profile_hash=bytes(32))


def raw_write(path: Path, versions: list[Any], direct: bool) -> None:
    """The same bytes and one fsync.

    Like ours it replaces a file that stays until the end: a raw write into the memory that an
    unlinked file has just given back would be a race against another machine.
    """
    new = path.with_suffix(".new")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                         | (os.O_DIRECT if direct else 0))
    offset, call = 0, PIECE_BYTES if direct else CALL_BYTES
    for version in versions:
        for array in (version.params, version.state["momentum"]):
            view = memoryview(array).cast("B")
            for at in range(0, len(view), call):
                offset += os.pwrite(descriptor, view[at : at + call], offset)
                if not direct and offset % PIECE_BYTES == 0:
                    os.posix_fadvise(descriptor, offset - PIECE_BYTES, PIECE_BYTES,
                                     os.POSIX_FADV_DONTNEED)
    os.fsync(descriptor)
    os.close(descriptor)
    os.replace(new, path)


def raw_load(path: Path, like: list[Any]) -> list[np.ndarray]:
    """Reads the file into new arrays."""
    descriptor, offset, arrays = os.open(path, os.O_RDONLY), HEADER_BYTES, []
    for version in like:
        for _ in range(2):
            arrays.append(np.empty_like(version.params))
            view = memoryview(arrays[-1]).cast("B")
            for at in range(0, len(view), CALL_BYTES):
                offset += os.preadv(descriptor, [view[at : at + CALL_BYTES]], offset)
    os.close(descriptor)
    return arrays


def hash_all(versions: list[Any]) -> None:
    """Two streams at a time, on one thread."""
    for version in versions:
        sha256_pair(version.params, version.state["momentum"])


@contextmanager
def state_on_disk(mib: int) -> Iterator[tuple[Path, list[Any]]]:
    """A folder beside this file, and a state of so many MiB."""
    with tempfile.TemporaryDirectory(prefix="limits-disk-", dir=Path(__file__).parent) as place:
        yield Path(place), versions_of(mib)


def settled() -> None:
    """Nothing is left to be written, or to be freed beside us."""
    for thread in threading.enumerate():
        if thread.name == "syncer-checkpoint-free":
            thread.join()
    os.sync()


def write(mib: int, turns: int, direct: bool = False) -> Figure:
    """With digests, against the same bytes alone."""
    with state_on_disk(mib) as (place, state):
        try:
            write_checkpoint(place / "c", cut_of(state), direct=direct)
        except WriteError as error:
            raise NotHere(str(error)) from None
        return in_turns(lambda: raw_write(place / "raw", state, direct),
                        lambda: write_checkpoint(place / "c", cut_of(state), direct=direct),
                        mib * 2**20 / 1e9, turns, before=settled)


def load(mib: int, turns: int) -> Figure:
    """Verified, against the slower of reading and the digests; the page cache has it for both."""
    def ours() -> None:
        with Checkpoint(place / "c") as checkpoint:
            checkpoint.load()

    with state_on_disk(mib) as (place, state):
        write_checkpoint(place / "c", cut_of(state))
        figures = [in_turns(bound, ours, mib * 2**20 / 1e9, turns)
                   for bound in (lambda: raw_load(place / "c", state), lambda: hash_all(state))]
    return max(figures, key=lambda figure: figure.ratio)
