"""Inputs that are kept: every past finding and what a target should never lose sight of.

`corpus/NAME.txt` has one input of a target on a line, as a Python bytes literal, and above it,
after `#`, what it is about.
"""

from __future__ import annotations

import ast
from pathlib import Path

FOLDER = Path(__file__).parent / "corpus"


def kept(name: str) -> list[bytes]:
    """The inputs of a target, in their order."""
    lines = (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return [ast.literal_eval(line) for line in lines if line and not line.startswith("#")]
