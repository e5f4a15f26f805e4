"""The merged model of a finished run, read back from the server's final-state file and measured.

Must not trust the file: its shape is checked against the layout of the demo's model.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

from syncer.demo import settings
from syncer.demo.model import corpus
from syncer.demo.model.byte_model import SHAPES, ByteModel, even_windows
from syncer.demo.model.trainer import digest
from syncer.errors import SyncerError
from syncer.learner.partition import build_layout


class Measured(NamedTuple):
    """One set of parameters."""

    bits_per_byte: float
    """Over the same held-out windows that every learner uses."""
    sha256: str
    """As in the `end` record of a learner."""


def read_final_state(path: Path) -> ByteModel:
    """The parameters of a `--final-state` file: u32 fragments, then u64 elements and f32 values.

    Raises SyncerError for a file that does not hold exactly the fragments of the demo's model.
    """
    layout = build_layout(SHAPES, settings.FRAGMENTS)
    data = path.read_bytes()
    expected = struct.pack("<I", len(layout.fragments))
    size = len(expected) + sum(8 + 4 * fragment.numel for fragment in layout.fragments)
    if len(data) != size or not data.startswith(expected):
        raise SyncerError(f"final state {path} has {len(data)} bytes, expected {size} in "
                          f"{len(layout.fragments)} fragments")
    model, offset = ByteModel(seed=0), len(expected)
    for fragment in layout.fragments:
        (numel,) = struct.unpack_from("<Q", data, offset)
        if numel != fragment.numel:
            raise SyncerError(f"final state {path} has a fragment of {numel} elements at byte "
                              f"{offset}, expected {fragment.numel}")
        offset += 8
        for tensor in fragment.tensors:
            values = np.frombuffer(data, "<f4", tensor.numel, offset)
            model.parameters[tensor.name][...] = values.reshape(tensor.shape)
            offset += 4 * tensor.numel
    return model


def measure_final_state(path: Path) -> Measured:
    """Held-out bits per byte and digest of a final-state file."""
    model = read_final_state(path)
    held_out = even_windows(corpus.load(0, 1).held_out, settings.EVALUATION_WINDOWS)
    return Measured(model.bits_per_byte(held_out), digest(model.flat))
