"""Opens a checkpoint of either format, proves it whole, and streams its tensors.

Must not change anything, and takes no memory for a length that was not compared with the file.
Opening reads the header alone; `load` and `scan` read the tensors, each byte once.
"""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from syncer.checkpoint.facts import Parsed, TensorPlace, check_contiguous
from syncer.checkpoint.files import FILES, Files
from syncer.checkpoint.formats import FORMAT_OF, format_of_file
from syncer.checkpoint.window import Window, read_all
from syncer.errors import CheckpointError, CheckpointFormatError, CheckpointMismatch
from syncer.kernels import Sha256, first_nonfinite, sha256_update_pair

CHUNK_BYTES = 4 * 1024 * 1024
"""What is read at once: small enough to be hashed and checked while it is in the cache."""
THREADS = 2
Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)."""
Piece = tuple[TensorPlace, int, np.ndarray]
"""(tensor, first element, values)."""


class Loaded(NamedTuple):
    """One fragment out of a checkpoint; the arrays belong to whoever holds them."""

    version: int
    params: np.ndarray
    state: Mapping[str, np.ndarray]


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
    def load(self, *, verify: bool = True, threads: int = THREADS,
             progress: Progress | None = None) -> list[Loaded]:
        """Every fragment, read straight into arrays of its size; finite, and with `verify` of the
        digests in the file (yeto-v3 has none).

        Memory: the state itself. Raises `CheckpointFormatError` naming tensor and offset.
        """
        arrays: dict[tuple[int, str], np.ndarray] = {}

        def room(tensor: TensorPlace, begin: int, end: int) -> np.ndarray:
            if begin == 0:
                arrays[tensor.fragment, tensor.array] = np.empty(tensor.numel, np.float32)
            return arrays[tensor.fragment, tensor.array][begin:end]

        for _ in self.scan(room, verify=verify, threads=threads, progress=progress):
            pass
        return [Loaded(version, arrays[p, "params"],
                       {name: arrays[p, name] for name in self.facts.state})
                for p, version in enumerate(self.facts.versions)]

    def scan(self, room: Callable[[TensorPlace, int, int], np.ndarray] | None = None, *,
             verify: bool = True, threads: int = THREADS, progress: Progress | None = None,
             finite: bool = True) -> Iterator[Piece]:
        """All tensors piece by piece: (tensor, first element, f32 values), each tensor's pieces in
        order, the arrays of one fragment taking turns.

        room: where elements begin to end of a tensor go; asked for in order. By default new
        memory, of which the caller keeps what it wants. Raises as `load`; a tensor is known to be
        intact once its last piece has been handed out and the next one is asked for.
        """
        room = room or (lambda tensor, begin, end: np.empty(end - begin, np.float32))
        done, total = 0, self.facts.state_bytes
        for pieces in self._turns(room, threads, finite):
            if verify and self.digests:
                self._hash(pieces)
            for tensor, begin, values in pieces:
                yield tensor, begin, values
                done += values.nbytes
            if progress is not None:
                progress(done, total)

    def _turns(self, room: Any, threads: int, finite: bool) -> Iterator[list[Piece]]:
        """The pieces of all arrays of a fragment at the same place, read ahead by a few turns."""
        if self.facts.state_bytes <= CHUNK_BYTES or threads <= 1:
            for places in self._places():
                yield [self._read(tensor, begin, room(tensor, begin, end), finite)
                       for tensor, begin, end in places]
            return
        ahead: deque[list[Future[Piece]]] = deque()
        with ThreadPoolExecutor(threads, "syncer-checkpoint-read") as pool:
            for places in self._places():
                ahead.append([self._ahead(pool, tensor, begin, room(tensor, begin, end), finite)
                              for tensor, begin, end in places])
                if len(ahead) > 2 * threads:
                    yield [future.result() for future in ahead.popleft()]
            while ahead:
                yield [future.result() for future in ahead.popleft()]

    def _ahead(self, pool: ThreadPoolExecutor, *piece: Any) -> Future[Piece]:
        try:
            return pool.submit(self._read, *piece)
        except RuntimeError:  # what Python makes of EAGAIN: another thread cannot be had
            read: Future[Piece] = Future()
            read.set_result(self._read(*piece))
            return read

    def _places(self) -> Iterator[list[tuple[TensorPlace, int, int]]]:
        chunk = CHUNK_BYTES // 4
        for fragment, numel in enumerate(self.facts.numels):
            for begin in range(0, numel, chunk):
                yield [(TensorPlace(fragment, name, numel), begin, min(begin + chunk, numel))
                       for name in ("params", *self.facts.state)]

    def _read(self, tensor: TensorPlace, begin: int, target: np.ndarray,
              finite: bool) -> Piece:
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
        return tensor, begin, target

    def _hash(self, pieces: list[Piece]) -> None:
        if pieces[0][1] == 0:
            self._streams = [Sha256() for _ in pieces]
        values = [piece[2] for piece in pieces]
        if len(pieces) >= 2:
            sha256_update_pair(self._streams[0], values[0], self._streams[1], values[1])
        for stream, rest in list(zip(self._streams, values, strict=True))[
                2 if len(pieces) >= 2 else 0:]:
            stream.update(rest)
        tensor, begin, last = pieces[0]
        if begin + len(last) < tensor.numel:
            return
        for (tensor, _, _), stream in zip(pieces, self._streams, strict=True):
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
            yield self._read(tensor, begin, np.empty(end - begin, np.float32), True)[2]
