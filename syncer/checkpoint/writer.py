"""Writes a cut as one file, digests taken beside the writing; must not know when or why.

The fragment versions are written as they are: immutable, no copy. One thread writes, another one
hashes two tensors at a time, and the safetensors header is filled in last, before the fsync.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from syncer.checkpoint.atomic import AtomicFile, Retire
from syncer.checkpoint.facts import SAFETENSORS, Cut, Draft
from syncer.checkpoint.files import FILES, Files
from syncer.checkpoint.formats import FORMAT_OF
from syncer.checkpoint.lane import Work, beside
from syncer.kernels import sha256, sha256_pair

Progress = Callable[[int, int], None]


class Digests:
    """SHA-256 of the tensors of a cut, two at a time, beside the writing; each version is let go
    when it is done."""

    def __init__(self, cut: Cut, beside: Callable[[Work, str], Work]):
        self.fragments = list(cut.fragments)
        self.state = cut.facts.state
        self.found: dict[str, str] = {}
        self.error: BaseException | None = None
        self.stopping = False
        self.join = beside(self._run, "syncer-checkpoint-digest")

    def _run(self) -> None:
        try:
            for fragment in range(len(self.fragments)):
                if self.stopping:
                    return
                version, self.fragments[fragment] = self.fragments[fragment], None
                self._hash(fragment, version)
        except BaseException as error:  # an error must reach the thread that waits for digests
            self.error = error

    def _hash(self, fragment: int, version: Any) -> None:
        arrays = [("params", version.params), *version.state.items()]
        for first in range(0, len(arrays), 2):
            pair = arrays[first : first + 2]
            found = (sha256_pair(pair[0][1], pair[1][1]) if len(pair) == 2
                     else (sha256(pair[0][1]),))
            for (name, _), digest in zip(pair, found, strict=True):
                self.found[f"fragments.{fragment}.{name}"] = digest.hex()

    def result(self) -> dict[str, str]:
        """Digests in hex by tensor name, once all are there."""
        self.join()
        if self.error is not None:
            raise self.error
        return self.found

    def stop(self) -> None:
        """End soon, the tensors in hand apart."""
        self.stopping = True
        self.join()
        self.fragments.clear()


def write_checkpoint(path: str | os.PathLike[str], cut: Cut, form: str = SAFETENSORS, *,
                     files: Files = FILES, direct: bool = False, let_go: bool = False,
                     progress: Progress | None = None, retire: Retire | None = None,
                     beside: Callable[[Work, str], Work] = beside) -> int:
    """Replace `path` by the cut, whole and durable; returns the bytes of the file.

    let_go: empty `cut.fragments` entry by entry as they are written, so that their memory can be
    used again. retire: as of `AtomicFile`. beside: runs the digests at the same time, as
    `lane.beside` does. Raises `WriteError` with the file that was there untouched,
    `CheckpointError` when the format cannot hold the cut.
    """
    draft = FORMAT_OF[form].draft(cut.facts)
    with AtomicFile(path, size_bytes=draft.size, files=files, direct=direct,
                    retire=retire) as file:
        digests = None if draft.fill is None else Digests(cut, beside)
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
