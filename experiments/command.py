"""What every experiment has in common: flags, cells measured one by one, a JSON file, a picture.

Must not know what is measured.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.limits.__main__ import machine

Cell = dict[str, Any]
"""What tells one figure from the others, and, behind `measure`, the figure."""


def measured(measure: Callable[[Cell], Cell], cells: list[Cell], jobs: int) -> Iterable[Cell]:
    if jobs == 1:
        yield from map(measure, cells)
        return
    with multiprocessing.Pool(jobs) as pool:
        yield from pool.imap(measure, cells)


def main(experiment: ModuleType, arguments: list[str] | None = None) -> int:
    """Runs it. It has `cells(quick)`, `measure(cell)` and `table(found)`; experiments/plot.py has a
    function of its name."""
    name = experiment.__name__.rpartition(".")[2] if experiment.__spec__ is None else (
        experiment.__spec__.name.rpartition(".")[2])
    parser = argparse.ArgumentParser(
        prog=f"python -m experiments.{name}", description=experiment.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write what was measured, too")
    parser.add_argument("--png", metavar="FILE", help="draw it, too (needs matplotlib)")
    parser.add_argument("--quick", action="store_true",
                        help="few and short: whether it works, not what comes of it")
    parser.add_argument("--jobs", type=int, default=1, help="processes; the figures are the same")
    options = parser.parse_args(arguments)
    began, cells = time.monotonic(), []
    for cell in measured(experiment.measure, experiment.cells(options.quick), options.jobs):
        print(", ".join(f"{key} {shown(value)}" for key, value in cell.items()), flush=True)
        cells.append(cell)
    found = {"machine": machine().partition(", load")[0], "cells": cells,
             "command": f"python -m experiments.{name}" + " --quick" * options.quick}
    print(f"\n{experiment.table(found)}\n{len(cells)} cells in {time.monotonic() - began:.0f} s")
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")
    if options.png:
        from experiments import plot  # noqa: PLC0415  matplotlib is no dependency

        getattr(plot, name)(found, options.png)
    return 0


def shown(value: Any) -> str:
    if isinstance(value, list | dict):
        return f"of {len(value)}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
