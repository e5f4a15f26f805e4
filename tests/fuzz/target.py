"""What a fuzz target is: it makes inputs that are nearly right, and judges any bytes at all."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple


class Target(NamedTuple):
    """One parser of foreign bytes, and what must hold of it."""

    make: Callable[[Random], bytes]
    """An input that is right, or wrong where chance had it so; most are mutated afterwards."""
    check: Callable[[bytes], bool]
    """Whether these bytes are accepted. A refusal is one of those that are documented, in one line;
    anything else that is raised is a finding."""
    mend: Callable[[bytes], bytes] = bytes
    """Checksums set right again, so that what they protect is judged as well."""


def must(holds: object, what: str) -> None:
    """An assertion that Python's -O leaves in."""
    if not holds:
        raise AssertionError(what)
