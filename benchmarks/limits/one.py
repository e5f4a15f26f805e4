"""One row in a process of its own, so that no row meets what another has left. Must not print.

    python -m benchmarks.limits.one ROW FILE [short]

Writes {"figure": [...]} or {"not_here": "why"} to the file.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from benchmarks.lab.network import die_with_parent
from benchmarks.limits.figure import NotHere
from benchmarks.limits.rows import ROWS


def main(name: str, file: str, *short: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what it has started is ended
    die_with_parent(signal.SIGTERM)
    [row] = [row for row in ROWS if row.name == name]
    try:
        said = {"figure": row.measure(bool(short))}
    except (NotHere, pytest.skip.Exception) as error:
        said = {"not_here": str(error)}
    Path(file).write_text(json.dumps(said), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
