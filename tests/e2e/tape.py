"""Reads a server's event tape; every record must fit the tables of the docs."""

from __future__ import annotations

import json
from pathlib import Path

from syncer.core.run.tape_keys import misfit


def records(path: Path, skip: int = 0) -> list[dict]:
    """The records after the first `skip` lines, which may be of anybody."""
    found = [json.loads(line) for line in path.read_text().splitlines()[skip:]]
    assert [problem for record in found if (problem := misfit(record)) is not None] == []
    return found
