"""Every path beside its bound, in one table: `make bench-limits`.

    python -m benchmarks.limits                             # all rows, in under 25 minutes
    python -m benchmarks.limits --only push --only merge    # rows whose name begins so
    python -m benchmarks.limits --json limits.json

Each ratio is of one run, ours and its bound in turns, with the other ends of sockets in processes
of their own; a row runs in a process of its own. `!` marks a row below its bound, and is no
failure: status 1 when a row cannot be measured or, with --strict, is below its bound.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.limits.figure import Figure, Row
from benchmarks.limits.rows import ROWS
from syncer.kernels import describe

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 600.0
"""A row that is not through by then cannot be measured."""
ENDING_S = 20.0
"""What a row that is to end has for ending its processes."""
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Of what measures, so that a library does not choose; a server has the threads it is told."""


def machine() -> str:
    """Its class, the date and the load, in one line."""
    features = " ".join(describe()["cpu"]) or "no extensions"
    return (f"{datetime.now(UTC):%Y-%m-%d}, {len(os.sched_getaffinity(0))} cores, "
            f"{platform.machine()} ({features}), load {os.getloadavg()[0]:.1f}")


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3g}"


HEAD = (f"{'':29}{'ours':>7}{'CPU':>7}{'bound':>8}{'CPU':>7} {'':7}{'ratio':>6}{'at':>6}\n"
        f"{'':29}{'':>7}{'s/GB':>7}{'':>8}{'s/GB':>7} {'':7}{'':>6}{'least':>6}")


def line(row: Row, figure: Figure) -> str:
    """At most 80 columns."""
    missed = " !" if figure.ratio < row.at_least else ""
    return (f"{row.path:29}{number(figure.ours):>7}{number(figure.ours_cpu):>7}"
            f"{number(figure.bound):>8}{number(figure.bound_cpu):>7} "
            f"{figure.unit if figure.ours is not None else '':7}{figure.ratio:6.2f}"
            f"{row.at_least:6.2f}{missed}")


def measured(row: Row, short: bool) -> Figure | str:
    """The figure, or why there is none. Raises RuntimeError when there should be one."""
    with tempfile.TemporaryDirectory(prefix="syncer-limits") as folder:
        file, log = Path(folder) / "said", Path(folder) / "log"
        command = [sys.executable, "-m", "benchmarks.limits.one", row.name, str(file)]
        with log.open("w") as output:
            process = subprocess.Popen(command + ["short"] * short, cwd=ROOT, stdout=output,
                                       stderr=output, stdin=subprocess.DEVNULL,
                                       env=os.environ | THREADS, start_new_session=True)
            try:
                status: int | str = process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                status = f"not through after {PATIENCE_S:.0f} s"
            finally:
                end(process)
        if status != 0 or not file.exists():
            said = log.read_text(errors="replace").strip().splitlines() or ["nothing said"]
            raise RuntimeError(f"{row.name}: {status}: {said[-1][:300]}")
        found = json.loads(file.read_text(encoding="utf-8"))
    return Figure(*found["figure"]) if "figure" in found else str(found["not_here"])


def end(process: subprocess.Popen[bytes]) -> None:
    """The row, which ends what it has started, and then whatever of it may be left."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def keep(file: Path, row: Row, figure: Figure) -> None:
    """A row takes the place of what the file has of it."""
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else {}
    rows[row.name] = {"path": row.path, "at_least": row.at_least, **figure._asdict(),
                      "load": round(os.getloadavg()[0], 1)}
    rows = {known.name: rows[known.name] for known in ROWS if known.name in rows}
    file.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n",
                    encoding="utf-8")


def run(rows: list[Row], options: argparse.Namespace) -> int:
    print(f"{machine()}\n\n{HEAD}", flush=True)
    found: dict[str, dict[str, float]] = {}
    without, missed, began = [], [], time.monotonic()
    for row in rows:
        try:
            figure = measured(row, options.short)
        except RuntimeError as error:
            print(f"{row.path:29} cannot be measured", flush=True)
            without.append(str(error))
            continue
        if isinstance(figure, str):
            print(f"{row.path:29} not here: {figure}", flush=True)
            continue
        print(line(row, figure), flush=True)
        if options.figures:
            keep(Path(options.figures), row, figure)
        found[row.name] = {"ratio": round(figure.ratio, 4), "at_least": row.at_least}
        missed += [row.name] * (figure.ratio < row.at_least)
    print(f"\n{len(found)} rows in {time.monotonic() - began:.0f} s, load "
          f"{os.getloadavg()[0]:.1f}; below their bound: {', '.join(missed) or 'none'}")
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(*(f"benchmarks.limits: {each}" for each in without), sep="\n", file=sys.stderr,
          end="\n" if without else "")
    return 1 if without or (options.strict and missed) else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.limits", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME",
                        help="only rows whose name begins so; may be repeated")
    parser.add_argument("--json", metavar="FILE", help='write {row: {"ratio", "at_least"}}, too')
    parser.add_argument("--figures", metavar="FILE",
                        help="put whole figures into a file, docs/limits.json for the docs")
    parser.add_argument("--short", action="store_true",
                        help="small and few: whether it works, not how fast")
    parser.add_argument("--strict", action="store_true", help="a row below its bound is a failure")
    parser.add_argument("--list", action="store_true", help="say the names of the rows")
    options = parser.parse_args(arguments)
    rows = [row for row in ROWS
            if not options.only or row.name.startswith(tuple(options.only))]
    if options.list or not rows:
        print(*(row.name for row in rows or ROWS), sep="\n")
        if not rows:
            parser.error(f"no row begins with {' or '.join(options.only)}; above are all")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run(rows, options)
    except KeyboardInterrupt:
        print("benchmarks.limits: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
