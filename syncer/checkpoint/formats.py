"""The formats of a checkpoint file, by name; must not read or write one."""

from __future__ import annotations

from typing import Protocol

from syncer.checkpoint import safetensors, yeto
from syncer.checkpoint.facts import SAFETENSORS, YETO_V3, Draft, Facts, Parsed
from syncer.checkpoint.window import Window


class Format(Protocol):
    """What the module of a format has."""

    def draft(self, facts: Facts) -> Draft:
        """The file of these facts. Raises `CheckpointError` when the format cannot hold them."""

    def parse(self, window: Window) -> Parsed:
        """Reads everything but the tensors. Raises `CheckpointFormatError`."""


FORMAT_OF: dict[str, Format] = {SAFETENSORS: safetensors, YETO_V3: yeto}


def format_of_file(begin: bytes) -> str:
    """The format of a file by its first bytes; what is not known is taken for safetensors."""
    return YETO_V3 if begin.startswith(yeto.YETO_MAGIC_BYTES) else SAFETENSORS
