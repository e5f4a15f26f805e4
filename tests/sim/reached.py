"""`python -m tests.sim.reached --seeds N`: which lines of the server the simulated runs execute.

To be run in a tree that was built with SYNCER_COVERAGE=1 (`make sim-coverage`). What counts is in
docs/testing.md. .py files are traced by coverage.py; the C of a .pyx file is counted by gcov, and
the comments that Cython leaves in it say which line each statement of C comes from.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import coverage

from syncer.config import available_cores

ROOT = Path(__file__).resolve().parents[2]
LEAST = 95.0
ROOMS = ("syncer/server", "syncer/core", "syncer/merge")
CHECKPOINT = ("saver", "writer", "resume", "atomic", "marker", "facts", "safetensors", "yeto",
              "reader", "window", "final_state")
LEARNER = ("session", "connection", "final_cut", "tensor_messages")
OUTSIDE = ("syncer/server/system.py", "syncer/server/selector.pyx", "syncer/server/command.py",
           "syncer/server/__main__.py", "syncer/server/unix_place.py")
"""The system calls of the server and its command line: what a simulation replaces."""
OUTSIDE_LINES_MAX = 400
FORMATS = ("syncer/checkpoint/safetensors.py", "syncer/checkpoint/yeto.py")
"""Of these what writes, the part in front of `parse`: what a malformed file may hold is shown by
tests/checkpoint/test_hostile.py."""
DOCS = ("syncer/core/run/tape_keys.py",)
"""Tables that docs and tests are made from; no run reads them."""
IMPOSSIBLE = re.compile(r"^\s*raise (InvariantViolation|NotImplementedError)\b|# impossible: \w")
"""A statement for a defect of the program itself, of a port that was left out, or one that says why
it is never reached."""
MARKER = re.compile(r'^\s*/\* "([^"]+\.pyx)":(\d+)$')
HEADER = re.compile(r"^(\s*)(?:def|cpdef|cdef|async def|class|cdef class|cdef enum|cdef extern)\b")
FUNCTION = re.compile(r"^\s*(?:async\s+)?(?:def|cpdef|cdef)\b[^=]*\(.*")


def sources() -> list[Path]:
    """The files that count, in order."""
    found = [path for room in ROOMS for kind in ("py", "pyx")
             for path in (ROOT / room).rglob(f"*.{kind}")]
    found += [ROOT / f"syncer/checkpoint/{name}.py" for name in CHECKPOINT]
    found += [ROOT / f"syncer/learner/{name}.py" for name in LEARNER]
    return sorted(path for path in found if path.exists()
                  and str(path.relative_to(ROOT)) not in (*OUTSIDE, *DOCS))


def code_lines(path: Path) -> int:
    """Lines with code on them, for the budget of what is outside."""
    text = re.sub(r'"""(?:.|\n)*?"""', "", path.read_text())
    return sum(1 for line in text.splitlines() if line.strip() and not line.strip().startswith("#"))


# ---- .py -----------------------------------------------------------------------------------------

def python_bodies(path: Path) -> set[int]:
    """First lines of the statements inside of functions: what runs because somebody calls it."""
    lines: set[int] = set()
    tree = ast.parse(path.read_text())
    parse = next((node.lineno for node in tree.body if getattr(node, "name", "") == "parse"), 0)
    end = parse if str(path.relative_to(ROOT)) in FORMATS else sys.maxsize
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.lineno < end and node.name != "__repr__":
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            lines |= {inner.lineno for statement in body for inner in ast.walk(statement)
                      if isinstance(inner, ast.stmt)}
    return lines


def python_lines(path: Path, data: coverage.Coverage) -> dict[int, bool]:
    _, statements, _, missing, _ = data.analysis2(str(path))
    bodies = python_bodies(path)
    return {line: line not in missing for line in statements if line in bodies}


# ---- .pyx ----------------------------------------------------------------------------------------

def cython_bodies(text: list[str]) -> set[int]:
    """Numbers of the lines inside of functions, by indentation; headers are not in them."""
    lines: set[int] = set()
    within: list[tuple[int, bool]] = []           # (indentation, is a function) of open headers
    open_brackets = 0
    for number, line in enumerate(text, 1):
        if open_brackets > 0:                     # a header that goes on
            open_brackets += line.count("(") - line.count(")")
            continue
        if not line.strip() or line.strip().startswith("#"):
            continue
        depth = len(line) - len(line.lstrip())
        while within and depth <= within[-1][0]:
            within.pop()
        if HEADER.match(line) and (FUNCTION.match(line) or "class" in line or "enum" in line):
            is_function = bool(FUNCTION.match(line)) and not any(
                word in line.split("(")[0] for word in ("class", "__repr__"))
            if line.rstrip().endswith(":") or line.count("(") > line.count(")"):
                within.append((depth, is_function))
                open_brackets = line.count("(") - line.count(")")
                continue
        if any(is_function for _, is_function in within):
            lines.add(number)
    return lines


def cython_lines(path: Path, counts: dict[int, int], c_text: list[str]) -> dict[int, bool]:
    """Line of the .pyx -> whether any C of it was executed; lines without C are left out."""
    name = str(path.relative_to(ROOT))
    bodies = cython_bodies(path.read_text().splitlines())
    found: dict[int, bool] = {}
    current: int | None = None
    for number, line in enumerate(c_text, 1):
        marker = MARKER.match(line)
        if marker:
            current = int(marker[2]) if marker[1] == name else None
        elif "/* function exit code */" in line:
            current = None
        elif current is not None and current in bodies and number in counts:
            found[current] = found.get(current, False) or counts[number] > 0
    return found


def gcov(objects: Path) -> Iterator[tuple[str, dict[int, int], list[str]]]:
    """(path of the .pyx, counts by line of its C, the C) of every module that was compiled."""
    for notes in sorted(objects.rglob("*.gcda")):
        if "cython-" not in str(notes):
            continue
        told = subprocess.run(["gcov", "--json-format", "--stdout", str(notes)], cwd=ROOT,
                              capture_output=True, check=True).stdout
        for entry in json.loads(told)["files"]:
            match = re.search(r"build/cython-\w+/(syncer/.+)\.c$", entry["file"])
            if match:
                counts: dict[int, int] = {}
                for line in entry["lines"]:
                    number = line["line_number"]
                    counts[number] = counts.get(number, 0) + line["count"]
                yield f"{match[1]}.pyx", counts, (ROOT / entry["file"]).read_text().splitlines()


# ---- the whole -----------------------------------------------------------------------------------

def play(seeds: int, first: int, jobs: int) -> bool:
    """The runs, each process with its own part; whether all went well. What was reached is known
    either way."""
    share = -(-seeds // jobs)
    command = [sys.executable, "-m", "coverage", "run", "--parallel-mode", "--source=syncer",
               "-m", "tests.sim.run"]
    running = [subprocess.Popen([*command, "--seed", str(first + begin), "--count",
                                 str(min(share, seeds - begin))], cwd=ROOT, stdout=subprocess.PIPE,
                                text=True) for begin in range(0, seeds, share)]
    for process in running:
        told, _ = process.communicate()
        print(told if process.returncode else told.splitlines()[-1], flush=True)
    return not any(process.returncode for process in running)


def is_impossible(text: list[str], line: int) -> bool:
    return bool(IMPOSSIBLE.search(text[line - 1]))


def spans(numbers: list[int]) -> str:
    """Line numbers as ranges."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def report(data: coverage.Coverage) -> float:
    """One line per file; the share of lines that were reached, in percent."""
    compiled = {name: (counts, text) for name, counts, text in gcov(ROOT / "build")}
    reached_in_all = lines_in_all = 0
    for path in sources():
        name = str(path.relative_to(ROOT))
        if path.suffix == ".py":
            lines = python_lines(path, data)
        else:
            lines = cython_lines(path, *compiled[name])
        text = path.read_text().splitlines()
        lines = {line: ran for line, ran in lines.items() if not is_impossible(text, line)}
        if not lines:
            continue
        missed = sorted(line for line, ran in lines.items() if not ran)
        reached_in_all += len(lines) - len(missed)
        lines_in_all += len(lines)
        print(f"{100 * (1 - len(missed) / len(lines)):6.1f} % of {len(lines):4}  {name}"
              + (f"  not: {spans(missed)}" if missed else ""))
    return 100 * reached_in_all / lines_in_all


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.reached", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--jobs", type=int, default=available_cores())
    options = parser.parse_args()
    for old in [*ROOT.glob(".coverage*"), *(ROOT / "build").rglob("*.gcda")]:
        old.unlink()
    os.environ["COVERAGE_FILE"] = str(ROOT / ".coverage")
    went_well = play(options.seeds, options.seed, options.jobs)
    data = coverage.Coverage(data_file=str(ROOT / ".coverage"))
    data.combine()
    share = report(data)
    outside = {name: code_lines(ROOT / name) for name in OUTSIDE}
    print(f"outside of the simulation: {sum(outside.values())} lines ("
          + ", ".join(f"{Path(name).name} {lines}" for name, lines in outside.items())
          + f"), at most {OUTSIDE_LINES_MAX}")
    print(f"production lines reached: {share:.1f} %")
    return 0 if went_well and share >= LEAST and sum(outside.values()) <= OUTSIDE_LINES_MAX else 1


if __name__ == "__main__":
    sys.exit(main())
