"""Writes a cut as one file, digests taken beside the writing; must not know when or why.

The fragment versions are written as they are: immutable, no copy. One thread writes, others hash
two tensors at a time, and the safetensors header is filled in last, before the fsync.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from syncer.checkpoint.atomic import AtomicFile, Retire
from syncer.checkpoint.facts import SAFETENSORS, Cut, Draft
from syncer.checkpoint.files import FILES, Files
from syncer.checkpoint.formats import FORMAT_OF
from syncer.checkpoint.lane import Work, beside
from syncer.checkpoint.pace import UNHELD, Tempo
from syncer.checkpoint.reader import add_to
from syncer.kernels import Sha256

Progress = Callable[[int, int], None]
HASH_PIECE = 1024 * 1024
"""Elements of each of two tensors that are hashed before the pace is asked again."""


class Digests:
    """SHA-256 of the tensors of a cut, two at a time, beside the writing; each version is let go
    when it is done. The bytes are read where the writer reads them, never from the file.

    threads: so many fragments at once. pace: asked before every piece.
    """

    def __init__(self, cut: Cut, beside: Callable[[Work, str], Work], threads: int = 1,
                 pace: Tempo = UNHELD):
        self.pace = pace
        self.left = deque(enumerate(cut.fragments))
        self.found: dict[str, str] = {}
        self.error: BaseException | None = None
        self.stopping = False
        self.joins = [beside(self._run, "syncer-checkpoint-digest")
                      for _ in range(min(threads, len(self.left)))]

    def _run(self) -> None:
        try:
            while self.left and not self.stopping:
                with suppress(IndexError):  # another thread has taken the last one
                    self._hash(*self.left.popleft())
        except BaseException as error:  # an error must reach the thread that waits for digests
            self.error = error

    def _hash(self, fragment: int, version: Any) -> None:
        arrays = [("params", version.params), *version.state.items()]
        for first in range(0, len(arrays), 2):
            pair = arrays[first : first + 2]
            streams = [Sha256() for _ in pair]
            size = len(pair[0][1])  # all arrays of a fragment have as many elements
            for begin in range(0, size, HASH_PIECE):
                if self.stopping:
                    return
                pieces = [array[begin : begin + HASH_PIECE] for _, array in pair]
                self.pace.hash(sum(piece.nbytes for piece in pieces))
                add_to(streams, pieces)
            for (name, _), stream in zip(pair, streams, strict=True):
                self.found[f"fragments.{fragment}.{name}"] = stream.hexdigest()

    def result(self) -> dict[str, str]:
        """Digests in hex by tensor name, once all are there; what nobody has begun is done here."""
        self._run()
        for join in self.joins:
            join()
        if self.error is not None:
            raise self.error
        return self.found

    def stop(self) -> None:
        """End soon, the pieces in hand apart."""
        self.stopping = True
        for join in self.joins:
            join()
        self.left.clear()


def write_checkpoint(path: str | os.PathLike[str], cut: Cut, form: str = SAFETENSORS, *,
                     files: Files = FILES, direct: bool = False, let_go: bool = False,
                     progress: Progress | None = None, retire: Retire | None = None,
                     beside: Callable[[Work, str], Work] = beside, threads: int = 1,
                     pace: Tempo = UNHELD) -> int:
    """Replace `path` by the cut, whole and durable; returns the bytes of the file.

    let_go: empty `cut.fragments` entry by entry as they are written, so that their memory can be
    used again. retire, pace: as of `AtomicFile`. beside: runs the digests at the same time, on so
    many threads, as `lane.beside` does. Raises `WriteError` with the file that was there untouched,
    `CheckpointError` when the format cannot hold the cut.
    """
    draft = FORMAT_OF[form].draft(cut.facts)
    with AtomicFile(path, size_bytes=draft.size, files=files, direct=direct,
                    retire=retire, beside=beside, pace=pace) as file:
        digests = None if draft.fill is None else Digests(cut, beside, threads, pace)
        try:
            _append_all(file, cut, draft, let_go=let_go, progress=progress)
            if draft.fill is not None and digests is not None:
                file.rewrite(draft.fill(digests.result()), 0)
        finally:
            if digests is not None:
                digests.stop()
        file.commit()
    return draft.size


def _append_all(file: AtomicFile, cut: Cut, draft: Draft, *, let_go: bool,
                progress: Progress | None) -> None:
    version: Any = None
    held = -1
    for part in draft.parts:
        if isinstance(part, bytes):
            file.append(part)
        else:
            if part.fragment != held:
                held, version = part.fragment, cut.fragments[part.fragment]
                if let_go:
                    cut.fragments[held] = None
            file.append(version.params if part.array == "params" else version.state[part.array])
        if progress is not None:
            progress(file.written, draft.size)
    version = None
    file.flush()
