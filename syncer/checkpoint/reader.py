"""Opens a checkpoint of either format, proves it whole, and streams its tensors.

Must not change anything, and takes no memory for a length that was not compared with the file.
Opening reads the header alone; `load` and `scan` read the tensors, each byte once.
"""

from __future__ import annotations

import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import numpy as np

from syncer.checkpoint.facts import Parsed, TensorPlace, check_contiguous
from syncer.checkpoint.files import FILES, Files
from syncer.checkpoint.formats import FORMAT_OF, format_of_file
from syncer.checkpoint.window import Window, read_all
from syncer.errors import CheckpointError, CheckpointFormatError, CheckpointMismatch
from syncer.kernels import Sha256, first_nonfinite, sha256_update_pair
from syncer.machine import cores

CHUNK_BYTES = 4 * 1024 * 1024
"""What is read at once: small enough to be hashed and checked while it is in the cache."""
THREADS_AHEAD = 2
THREADS_MAX = 16
"""Of a load; as many as there are cores, if fewer, and two on one: one reads while one hashes."""
T = TypeVar("T")
Room = Callable[[TensorPlace, int, int], np.ndarray]
Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)."""
Piece = tuple[TensorPlace, int, np.ndarray]
"""(tensor, first element, values)."""


class Loaded(NamedTuple):
    """One fragment out of a checkpoint; the arrays belong to whoever holds them."""

    version: int
    params: np.ndarray
    state: Mapping[str, np.ndarray]


def new_array(numel: int) -> np.ndarray:
    return np.empty(numel, np.float32)


class Checkpoint:
    """An open checkpoint whose structure was verified; `with` closes it.

    Raises `CheckpointError` when the file cannot be read, `CheckpointFormatError` (naming field
    and offset) when it is no complete checkpoint, `CheckpointMismatch` when its versions are not
    those of one cut.
    """

    def __init__(self, path: str | os.PathLike[str], files: Files = FILES):
        self.path, self.files = os.fspath(path), files
        self.descriptor = self._open()
        try:
            self.size = files.status(self.descriptor).st_size
            self.format, (self.facts, self.places, self.digests) = self._parse()
            check_contiguous(self.facts)
        except OSError as error:
            self.close()
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from None
        except CheckpointMismatch as problem:
            self.close()
            raise CheckpointMismatch(f"{self.path}: {problem}") from None
        except BaseException:
            self.close()
            raise

    def _open(self) -> int:
        descriptor = -1
        try:
            descriptor = self.files.open(self.path)
            if stat.S_ISREG(self.files.status(descriptor).st_mode):
                return descriptor
            why = "is no regular file"
        except OSError as error:
            why = f"cannot be read: {error.strerror}"
        if descriptor >= 0:
            with suppress(OSError):
                self.files.close(descriptor)
        raise CheckpointError(f"{self.path} {why}")

    def _parse(self) -> tuple[str, Parsed]:
        begin = bytearray(8)
        read_all(self.files, self.descriptor, begin, 0)
        form = format_of_file(bytes(begin))
        return form, FORMAT_OF[form].parse(
            Window(self.path, self.descriptor, self.size, self.files))

    def close(self) -> None:
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            with suppress(OSError):  # nothing was written
                self.files.close(descriptor)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -------------------------------------------------------------------------------- reading
    def load(self, *, verify: bool = True, threads: int | None = None,
             progress: Progress | None = None,
             empty: Callable[[int], np.ndarray] = new_array) -> list[Loaded]:
        """Every fragment, read straight into arrays of its size, and proven: see `prove`.

        Memory: the state itself, in arrays of so many f32 elements as `empty` makes them.
        """
        arrays = {(tensor.fragment, tensor.array): empty(tensor.numel)
                  for tensor in self.facts.tensors}
        self.prove(lambda tensor, begin, end: arrays[tensor.fragment, tensor.array][begin:end],
                   verify=verify, threads=threads, progress=progress)
        return [Loaded(version, arrays[p, "params"],
                       {name: arrays[p, name] for name in self.facts.state})
                for p, version in enumerate(self.facts.versions)]

    def prove(self, room: Room | None = None, *, verify: bool = True, threads: int | None = None,
              progress: Progress | None = None) -> None:
        """Reads everything once: values are finite, and with `verify` digests those in the file
        (yeto-v3 has none). So many fragments at the same time: each thread reads, checks and hashes
        its own, piece by piece, while a piece is in the cache.

        room: where elements begin to end of a tensor go; by default they are dropped. Raises
        `CheckpointFormatError` naming tensor and offset, of the first fragment that has one.
        """
        threads = threads or min(THREADS_MAX, max(2, cores()))
        if self.facts.state_bytes <= CHUNK_BYTES:
            threads = 1
        proof = Proof(self, room, verify, progress)
        if threads == 1:
            for unit in self._units(1):
                proof.take(unit)
            return
        with ThreadPoolExecutor(threads, "syncer-checkpoint-read") as pool:
            try:
                for part in [self._ahead(pool, proof.take, unit) for unit in self._units(threads)]:
                    part.result()
            except BaseException:
                proof.stopping = True
                pool.shutdown(cancel_futures=True)
                raise

    def _units(self, threads: int) -> Iterator[list[TensorPlace]]:
        """Tensors of one size that are read together: those of a fragment, whose digests take less
        in pairs; each alone if there would be nothing to do for some threads."""
        for fragment, numel in enumerate(self.facts.numels):
            unit = [TensorPlace(fragment, name, numel) for name in ("params", *self.facts.state)]
            yield from [unit] if len(self.facts.numels) >= threads else [[one] for one in unit]

    def scan(self, *, verify: bool = True, threads: int = THREADS_AHEAD,
             progress: Progress | None = None, finite: bool = True) -> Iterator[Piece]:
        """All tensors piece by piece: (tensor, first element, f32 values), each tensor's pieces in
        order, the arrays of one fragment taking turns, each piece in memory of its own.

        Raises as `prove`; a tensor is known to be intact once its last piece has been handed out
        and the next one is asked for.
        """
        done, total = 0, self.facts.state_bytes
        for pieces in self._turns(threads, finite):
            if verify and self.digests:
                if pieces[0][1] == 0:
                    streams = [Sha256() for _ in pieces]
                add_to(streams, [values for _, _, values in pieces])
                if pieces[0][1] + len(pieces[0][2]) == pieces[0][0].numel:
                    self.check_digests([tensor for tensor, _, _ in pieces], streams)
            for tensor, begin, values in pieces:
                yield tensor, begin, values
                done += values.nbytes
            if progress is not None:
                progress(done, total)

    def _turns(self, threads: int, finite: bool) -> Iterator[list[Piece]]:
        """The pieces of all arrays of a fragment at the same place, read ahead by a few turns."""
        def piece(tensor: TensorPlace, begin: int, end: int) -> Piece:
            return tensor, begin, self.read(tensor, begin, np.empty(end - begin, np.float32),
                                            finite)

        if self.facts.state_bytes <= CHUNK_BYTES or threads <= 1:
            for places in self._places():
                yield [piece(*place) for place in places]
            return
        ahead: deque[list[Future[Piece]]] = deque()
        with ThreadPoolExecutor(threads, "syncer-checkpoint-read") as pool:
            for places in self._places():
                ahead.append([self._ahead(pool, piece, *place) for place in places])
                if len(ahead) > 2 * threads:
                    yield [future.result() for future in ahead.popleft()]
            while ahead:
                yield [future.result() for future in ahead.popleft()]

    def _ahead(self, pool: ThreadPoolExecutor, work: Callable[..., T], *given: Any) -> Future[T]:
        try:
            return pool.submit(work, *given)
        except RuntimeError:  # what Python makes of EAGAIN: another thread cannot be had
            done: Future[T] = Future()
            done.set_result(work(*given))
            return done

    def _places(self) -> Iterator[list[tuple[TensorPlace, int, int]]]:
        chunk = CHUNK_BYTES // 4
        for fragment, numel in enumerate(self.facts.numels):
            for begin in range(0, numel, chunk):
                yield [(TensorPlace(fragment, name, numel), begin, min(begin + chunk, numel))
                       for name in ("params", *self.facts.state)]

    def read(self, tensor: TensorPlace, begin: int, target: np.ndarray,
             finite: bool = True) -> np.ndarray:
        """Fills `target` with the elements of a tensor from `begin` on, and returns it."""
        offset = self.places[tensor.fragment, tensor.array] + 4 * begin
        view, at = target.data.cast("B"), 0
        while at < len(view):
            try:
                count = self.files.read(self.descriptor, [view[at:]], offset + at)
            except OSError as error:
                raise CheckpointError(f"{self.path}: tensor {tensor.name} at offset {offset + at} "
                                      f"cannot be read: {error.strerror}") from None
            if count == 0:
                raise CheckpointFormatError(
                    f"{self.path}: tensor {tensor.name} at offset {offset + at}: expected "
                    f"{len(view) - at} bytes, found the end; the file shrank while it was read")
            at += count
        if finite and (bad := first_nonfinite(target)) >= 0:
            raise CheckpointFormatError(
                f"{self.path}: tensor {tensor.name} at offset {offset + 4 * bad}: expected finite "
                f"values, found {target[bad]} at element {begin + bad}")
        return target

    def check_digests(self, tensors: Sequence[TensorPlace], streams: Sequence[Sha256]) -> None:
        """`check_digest` of each of them."""
        for tensor, stream in zip(tensors, streams, strict=True):
            self.check_digest(tensor, stream.hexdigest())

    def check_digest(self, tensor: TensorPlace, found: str) -> None:
        """Compares with what the file states, if it does. Raises `CheckpointFormatError`."""
        expected = self.digests.get(tensor.name, found)
        if found != expected:
            at = self.places[tensor.fragment, tensor.array]
            raise CheckpointFormatError(
                f"{self.path}: tensor {tensor.name} at offset {at} ({4 * tensor.numel} bytes): "
                f"expected SHA-256 {expected}, found {found}; its bytes were changed after "
                "they were written")

    def pieces(self, tensor: TensorPlace) -> Iterator[np.ndarray]:
        """One tensor in order, f32, each piece in memory of its own; checked to be finite."""
        for begin in range(0, tensor.numel, CHUNK_BYTES // 4):
            end = min(begin + CHUNK_BYTES // 4, tensor.numel)
            yield self.read(tensor, begin, np.empty(end - begin, np.float32))


class Proof:
    """One reading of a checkpoint by several threads, each of which takes whole tensors."""

    def __init__(self, checkpoint: Checkpoint, room: Room | None, verify: bool,
                 progress: Progress | None):
        self.checkpoint, self.room, self.progress = checkpoint, room, progress
        self.verify = verify and bool(checkpoint.digests)
        self.done, self.telling = 0, threading.Lock()
        self.stopping = False

    def take(self, unit: Sequence[TensorPlace]) -> None:
        """Reads and proves tensors of one size. Raises as `Checkpoint.prove`."""
        streams = [Sha256() for _ in unit] if self.verify else []
        room = self.room or self._dropped(unit)
        for begin in range(0, unit[0].numel, CHUNK_BYTES // 4):
            if self.stopping:
                return
            end = min(begin + CHUNK_BYTES // 4, unit[0].numel)
            values = [self.checkpoint.read(tensor, begin, room(tensor, begin, end))
                      for tensor in unit]
            if self.verify:
                add_to(streams, values)
            if self.progress is not None:
                with self.telling:
                    self.done += sum(array.nbytes for array in values)
                    self.progress(self.done, self.checkpoint.facts.state_bytes)
        if self.verify:
            self.checkpoint.check_digests(unit, streams)

    def _dropped(self, unit: Sequence[TensorPlace]) -> Room:
        """The same memory for every piece."""
        arrays = {tensor.array: np.empty(min(tensor.numel, CHUNK_BYTES // 4), np.float32)
                  for tensor in unit}
        return lambda tensor, begin, end: arrays[tensor.array][: end - begin]


def add_to(streams: Sequence[Sha256], values: Sequence[np.ndarray]) -> None:
    """Hashes one array into each stream, the first two together."""
    if len(values) >= 2:
        sha256_update_pair(streams[0], values[0], streams[1], values[1])
    for stream, rest in list(zip(streams, values, strict=True))[2 if len(values) >= 2 else 0:]:
        stream.update(rest)
