"""From one file to another: the other format, or a model file with real parameter names.

Must not know the command line. Streams: memory is a few pieces, whatever the size of the state.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable

from syncer.checkpoint.atomic import AtomicFile
from syncer.checkpoint.facts import NamedDims, TensorPlace
from syncer.checkpoint.files import FILES, Files
from syncer.checkpoint.formats import FORMAT_OF
from syncer.checkpoint.model_file import check_filled, model_head
from syncer.checkpoint.reader import Checkpoint
from syncer.checkpoint.safetensors import F32_BYTES
from syncer.errors import CheckpointMismatch
from syncer.kernels import Sha256
from syncer.layout import Layout
from syncer.protocol import DTYPE_F32

Progress = Callable[[int, int], None]


def convert(source: Checkpoint, path: str | os.PathLike[str], form: str, *,
            layout: Layout | None = None, progress: Progress | None = None,
            files: Files = FILES) -> int:
    """Write `source` as `form` to `path`; returns the bytes written.

    layout: put into a safetensors file whose source has none; its sizes must be those of the
    source. The digests of the source are verified on the way. Raises `CheckpointError`.
    """
    facts = source.facts
    if layout is not None and facts.layout is None:
        facts = dataclasses.replace(facts, layout=layout)
    numels = None if facts.layout is None else [f.numel for f in facts.layout.fragments]
    if numels is not None and numels != list(facts.numels):
        raise CheckpointMismatch(f"{source.path}: the layout has fragments of {numels} elements, "
                                 f"the checkpoint has {list(facts.numels)}")
    digests: dict[str, str] = {}
    draft = FORMAT_OF[form].draft(facts)
    with AtomicFile(path, size_bytes=draft.size, files=files) as file:
        for part in draft.parts:
            if isinstance(part, bytes):
                file.append(part)
                continue
            digests[part.name] = _copied(source, part, file, progress, facts.state_bytes)
        file.flush()
        if draft.fill is not None:
            file.rewrite(draft.fill(digests), 0)
        file.commit()
        return file.size


def export(source: Checkpoint, path: str | os.PathLike[str],
           fragments: Iterable[tuple[int, NamedDims]], *,
           progress: Progress | None = None, files: Files = FILES) -> int:
    """Write the parameters of some fragments under their own names as a plain safetensors file.

    fragments: (index, names and dimensions of its tensors in layout order). Returns the bytes
    written. Raises `CheckpointMismatch` when the tensors do not fill their fragment.
    """
    chosen = list(fragments)
    numels = source.facts.numels
    for index, named in chosen:
        check_filled(index, numels[index], named)
    head = model_head([named for _, named in chosen], DTYPE_F32,
                      {"global_step": str(source.facts.step)})
    total = F32_BYTES * sum(numels[index] for index, _ in chosen)
    with AtomicFile(path, size_bytes=len(head) + total, files=files) as file:
        file.append(head)
        for index, _ in chosen:
            tensor = TensorPlace(index, "params", numels[index])
            _copied(source, tensor, file, progress, total, head=len(head))
        file.commit()
        return file.size


def _copied(source: Checkpoint, tensor: TensorPlace, file: AtomicFile, progress: Progress | None,
            total: int, *, head: int = 0) -> str:
    """A tensor of the source goes into the file, verified on its way; its digest. head: bytes of
    the file that are no progress."""
    stream = Sha256()
    for values in source.pieces(tensor):
        stream.update(values)
        file.append(values)
        if progress is not None:
            progress(file.size - head, total)
    digest = stream.hexdigest()
    source.check_digest(tensor, digest)
    return digest
