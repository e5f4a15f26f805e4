"""From one file to another: the other format, or a model file with real parameter names.

Must not know the command line. Streams: memory is a few pieces, whatever the size of the state.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from syncer.checkpoint import safetensors
from syncer.checkpoint.atomic import AtomicFile
from syncer.checkpoint.facts import Facts, TensorPlace
from syncer.checkpoint.files import FILES, Files
from syncer.checkpoint.formats import FORMAT_OF
from syncer.checkpoint.reader import Checkpoint
from syncer.errors import CheckpointMismatch
from syncer.kernels import Sha256
from syncer.layout import Layout

Progress = Callable[[int, int], None]


class Parameter(Protocol):
    """A tensor of a model file, as learner.partition makes them."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> Sequence[int]: ...


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
            stream = Sha256()
            for values in source.pieces(part):
                stream.update(values)
                file.append(values)
                if progress is not None:
                    progress(file.size, facts.state_bytes)
            digests[part.name] = stream.hexdigest()
            source.check_digest(part, digests[part.name])
        file.flush()
        if draft.fill is not None:
            file.rewrite(draft.fill(digests), 0)
        file.commit()
        return file.size


def export(source: Checkpoint, path: str | os.PathLike[str],
           fragments: Iterable[tuple[int, Sequence[Parameter]]], *,
           progress: Progress | None = None, files: Files = FILES) -> int:
    """Write the parameters of some fragments under their own names as a plain safetensors file.

    fragments: (index, its tensors in layout order). Returns the bytes written. Raises
    `CheckpointMismatch` when the tensors do not fill their fragment.
    """
    chosen = list(fragments)
    header, total = _model_header(source.facts, chosen)
    with AtomicFile(path, size_bytes=len(header) + total, files=files) as file:
        file.append(header)
        for index, _ in chosen:
            tensor = TensorPlace(index, "params", source.facts.numels[index])
            stream = Sha256()
            for values in source.pieces(tensor):
                stream.update(values)
                file.append(values)
                if progress is not None:
                    progress(file.size - len(header), total)
            source.check_digest(tensor, stream.hexdigest())
        file.commit()
        return file.size


def _model_header(facts: Facts, chosen: Sequence[tuple[int, Sequence[Parameter]]]
                  ) -> tuple[bytes, int]:
    """Everything before the first tensor, and the bytes of all tensors."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", "global_step": str(facts.step)}}
    at = 0
    for index, named in chosen:
        begun = at
        for tensor in named:
            end = at + 4
            for dim in tensor.shape:
                end = at + (end - at) * dim
            entries[tensor.name] = {"dtype": "F32", "shape": list(tensor.shape),
                                    "data_offsets": [at, end]}
            at = end
        if at - begun != 4 * facts.numels[index]:
            raise CheckpointMismatch(f"fragment {index} has {facts.numels[index]} elements, the "
                                     f"layout names {(at - begun) // 4}")
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % safetensors.ALIGN)
    return len(text).to_bytes(8, "little") + text, at
