"""Fuzz targets of what a server reads back: checkpoints of both formats, and what lies beside them.

A file that is read whole, byte by byte or in any pieces gives the same, or the same refusal; what
is accepted can be written again and means the same. The file is in memory: no disk is in the way.
A marker (`.final`) is no target: it is there or not, and nobody reads what is in it.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np

from syncer.checkpoint import safetensors, yeto
from syncer.checkpoint.epoch_file import EpochFile, epoch_path, read_epoch
from syncer.checkpoint.facts import SAFETENSORS, YETO_V3, Cut, TensorPlace
from syncer.checkpoint.files import Files
from syncer.checkpoint.formats import FORMAT_OF
from syncer.checkpoint.reader import Checkpoint
from syncer.errors import CheckpointError
from syncer.kernels import sha256
from syncer.layout import AVG, FragmentLayout, Layout
from tests.checkpoint.cuts import make_cut
from tests.fuzz.mutate import EDGES
from tests.fuzz.target import Target, must
from tests.fuzz.wire_targets import one_line

PATH = "run.ckpt"
READS_MAX = 200
"""A file of more bytes is read in about so many pieces, a shorter one byte by byte."""
TINY = Layout((FragmentLayout(AVG, (3,)), FragmentLayout(AVG, (2, 1))))
LEDGERS: tuple[dict[int, tuple[int, int, int]], ...] = (
    {}, {0: (1, 2, 3)}, {0: (1, 2, 3), 7: (4, 5, 6)})


class OneFile(Files):
    """A file system of one file, whose reads give at most `most` bytes each."""

    def __init__(self, name: str, data: bytes, most: Callable[[], int]):
        self.name, self.data, self.most = name, data, most

    def open(self, path: str) -> int:
        return 3

    def close(self, descriptor: int) -> None:
        pass

    def exists(self, path: str) -> bool:
        return path == self.name

    def status(self, file: str | int) -> os.stat_result:
        return SimpleNamespace(st_mode=stat.S_IFREG, st_size=len(self.data))  # type: ignore

    def read(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        view = memoryview(buffers[0]).cast("B")
        piece = self.data[offset : offset + min(len(view), self.most())]
        view[: len(piece)] = piece
        return len(piece)


def refused(read: Callable[[OneFile], Any], name: str, data: bytes) -> tuple[Any, str | None]:
    """(what was read, None) or (None, the refusal), the same however few bytes a read gives."""
    random = Random(len(data))
    few = max(1, len(data) // READS_MAX)
    found = [_outcome(read, OneFile(name, data, most))
             for most in (lambda: 1 << 30, lambda: few, lambda: random.randrange(1, 400))]
    must(found[0] == found[1], "byte by byte gives something else")
    must(found[0] == found[2], "other pieces give something else")
    return found[0]


def _outcome(read: Callable[[OneFile], Any], files: OneFile) -> tuple[Any, str | None]:
    try:
        return read(files), None
    except CheckpointError as error:
        return None, f"{type(error).__name__}: {one_line(error)}"


# --------------------------------------------------------------------------------- checkpoints
def _loaded(files: OneFile) -> Any:
    """Everything that stands in a checkpoint: its facts, and the bytes of its tensors by place."""
    with Checkpoint(PATH, files) as checkpoint:
        tensors = {}
        for p, one in enumerate(checkpoint.load()):
            for array, values in (("params", one.params), *one.state.items()):
                must(np.isfinite(values).all(), "a value that is not finite is accepted")
                tensors[p, array] = values.tobytes()
        return checkpoint.format, checkpoint.facts, tensors


def file_of(form: str, facts: Any, tensors: dict[tuple[int, str], bytes]) -> bytes:
    """The file of these facts, as a writer makes it."""
    draft = FORMAT_OF[form].draft(facts)
    parts = [part if isinstance(part, bytes) else tensors[part.fragment, part.array]
             for part in draft.parts]
    if draft.fill is not None:
        parts[0] = draft.fill({TensorPlace(p, array, 0).name: sha256(values).hex()
                               for (p, array), values in tensors.items()})
    return b"".join(parts)


def check_checkpoint(data: bytes) -> bool:
    found, refusal = refused(_loaded, PATH, data)
    if refusal is not None:
        must(PATH in refusal, f"a refusal does not name the file: {refusal}")
        return False
    form, facts, tensors = found
    try:
        again = file_of(form, facts, tensors)
    except CheckpointError as error:  # a layout of many fragments, say, with a header too large
        one_line(error)
        return True
    must(_outcome(_loaded, OneFile(PATH, again, lambda: 1 << 30)) == (found, None),
         "a checkpoint does not mean the same once written again")
    return True


def _cut_of(random: Random, form: str) -> tuple[Any, dict[tuple[int, str], bytes]]:
    optimizer = "nesterov" if form == YETO_V3 else random.choice(
        ("sgd", "nesterov", "delayed-nesterov"))
    cut: Cut = make_cut(random.choice((0, 1, 7)), layout=TINY, optimizer=optimizer,
                        ledger=random.choice(LEDGERS))
    tensors = {(p, array): values.tobytes() for p, one in enumerate(cut.fragments)
               for array, values in (("params", one.params), *one.state.items())}
    return cut.facts, tensors


def make_safetensors(random: Random) -> bytes:
    """A file without the padding of its header, which would be most of it."""
    facts, tensors = _cut_of(random, SAFETENSORS)
    if random.random() < 0.3:
        facts = replace(facts, layout=None, profile_hash=None)
    whole = file_of(SAFETENSORS, facts, tensors)
    end = 8 + int.from_bytes(whole[:8], "little")
    text = whole[8:end].rstrip(b" ")
    if random.random() < 0.4:
        text = _another_value(random, json.loads(text))
    return mended(len(text).to_bytes(8, "little") + text + whole[end:])


ANY: tuple[Any, ...] = (None, True, -1, 0, 1.5, 2**64, "", "0", "[]", "{}", "[1,2]", [], {}, [[]],
                        "F32", "a" * 64, "NaN", '{"0":[1,2,3]}', '"nesterov"', "\u0667", "\ud800")


def _another_value(random: Random, header: dict[str, Any]) -> bytes:
    """The header with one value, at any depth, changed, gone or under another name."""
    where: Any = header
    while True:
        key = random.choice(sorted(where))
        if not (isinstance(where[key], dict) and where[key] and random.random() < 0.8):
            break
        where = where[key]
    value = where.pop(key)
    match random.randrange(3):
        case 0:
            where[key] = random.choice(ANY)
        case 1:
            where[random.choice(("", key + "x", "extra", "fragments.9.params"))] = value
        case _:
            pass
    return json.dumps(header, separators=(",", ":")).encode()


def mended(data: bytes) -> bytes:
    """The length and the header's own digest set right, where there is a place for them."""
    key = safetensors.SELF_KEY
    at = data.find(key) + len(key)
    if at < 8 + len(key) or at + 64 > len(data):
        return data
    text = bytearray(data[8 : 8 + int.from_bytes(data[:8], "little")])
    if at - 8 + 64 > len(text):
        return data
    text[at - 8 : at - 8 + 64] = safetensors.ZERO_DIGEST.encode()
    digest = sha256(len(text).to_bytes(8, "little") + text).hex().encode()
    return data[:at] + digest + data[at + 64 :]


def make_yeto(random: Random) -> bytes:
    facts, tensors = _cut_of(random, YETO_V3)
    whole = file_of(YETO_V3, facts, tensors)
    if random.random() < 0.3:  # without a contract
        whole = whole[: -yeto.CONTRACT.size]
    return whole


# ---------------------------------------------------------------------------- beside the file
def make_epoch(random: Random) -> bytes:
    numbers = [random.choice(EDGES) % 2**63 + 1 for _ in range(4)]
    clean = random.choice((None, 0, 17, 2**63))
    return EpochFile(random.randbytes(32), *numbers, clean).text().encode()


def check_epoch(data: bytes) -> bool:
    found, refusal = refused(lambda files: read_epoch(PATH, files), epoch_path(PATH), data)
    if refusal is not None:
        must(epoch_path(PATH) in refusal, f"a refusal does not name the file: {refusal}")
        return False
    must(found.text().encode() == data, "an epoch file does not give its own bytes again")
    return True


TARGETS = {
    "safetensors": Target(make_safetensors, check_checkpoint, mended),
    "yeto": Target(make_yeto, check_checkpoint),
    "epoch": Target(make_epoch, check_epoch),
}
