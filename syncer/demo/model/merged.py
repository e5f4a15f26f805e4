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
from syncer.demo.model.student import Student, new_student
from syncer.demo.model.trainer import digest, held_out_windows
from syncer.errors import SyncerError
from syncer.learner.partition import build_layout


class Measured(NamedTuple):
    """One set of parameters."""

    bits_per_byte: float
    """Over the same held-out windows that every learner uses."""
    sha256: str
    """As in the `end` record of a learner."""


def read_final_state(path: Path, torch: bool = False) -> Student:
    """The parameters of a `--final-state` file: u32 fragments, then u64 elements and f32 values.

    Raises SyncerError for a file that does not hold exactly the fragments of the demo's model.
    """
    student = new_student(0, torch)
    layout = build_layout({name: array.shape for name, array in student.parameters.items()},
                          settings.FRAGMENTS)
    data = path.read_bytes()
    expected = struct.pack("<I", len(layout.fragments))
    size = len(expected) + sum(8 + 4 * fragment.numel for fragment in layout.fragments)
    if len(data) != size or not data.startswith(expected):
        raise SyncerError(f"final state {path} has {len(data)} bytes, expected {size} in "
                          f"{len(layout.fragments)} fragments")
    offset = len(expected)
    for fragment in layout.fragments:
        (numel,) = struct.unpack_from("<Q", data, offset)
        if numel != fragment.numel:
            raise SyncerError(f"final state {path} has a fragment of {numel} elements at byte "
                              f"{offset}, expected {fragment.numel}")
        offset += 8
        for tensor in fragment.tensors:
            values = np.frombuffer(data, "<f4", tensor.numel, offset)
            student.parameters[tensor.name][...] = values.reshape(tensor.shape)
            offset += 4 * tensor.numel
    return student


def measure_final_state(path: Path, torch: bool = False) -> Measured:
    """Held-out bits per byte and digest of a final-state file."""
    student = read_final_state(path, torch)
    held_out = held_out_windows(student, corpus.load(0, 1).held_out, settings.EVALUATION_BYTES)
    return Measured(student.bits_per_byte(held_out), digest(student.flat))
