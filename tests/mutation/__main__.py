"""`python -m tests.mutation [number…]`: breaks the rules one line at a time and runs its tests.

Works on a copy of the tree, builds it after every mutation, and says which test noticed. What
nothing notices is a rule that is not tested; exit status 1 if there is any. It takes some minutes
and is not part of the test suite; docs/testing.md has the mistakes by number.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mutation.catalogue import MUTATIONS
from tests.mutation.mistake import Mutation

ROOT = Path(__file__).resolve().parents[2]
TESTS = ["tests/scenarios", "tests/unit/test_core_formulas.py", "tests/unit/test_core_record.py",
         "tests/unit/test_wire_hello.py", "tests/unit/test_server_outbox.py",
         "tests/unit/test_server_catchups.py", "tests/unit/test_server_introductions.py",
         "tests/e2e/test_server_introductions.py",
         "tests/e2e/test_server_readers.py",
         "tests/checkpoint/test_renumbering.py",
         "tests/property/test_scheduler.py", "tests/sim"]
PATIENCE_S = 600
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".hypothesis", ".pytest_cache",
                                  "*.egg-info")


def build(tree: Path) -> str | None:
    """Build the mutated tree; the compiler's words if it does not build."""
    done = subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=tree,
                          capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else done.stdout + done.stderr


def verdict(tree: Path) -> str | None:
    """The first test that fails, or None if all pass."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *TESTS],
            cwd=tree, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        return f"tests that do not end within {PATIENCE_S} s"
    if done.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return found[1] if found else f"pytest ended with status {done.returncode}"


def apply(tree: Path, mutation: Mutation) -> str:
    """Put the mistake in; returns the file as it was."""
    path = tree / mutation.file
    text = path.read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1, f"{mutation.file}: {mutation.old!r} must stand there once"
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("numbers", nargs="*", type=int, help="only these mutations")
    chosen = parser.parse_args().numbers or range(1, len(MUTATIONS) + 1)
    missed = 0
    with tempfile.TemporaryDirectory(prefix="mutation-") as scratch:
        tree = Path(scratch) / "tree"
        shutil.copytree(ROOT, tree, ignore=LEFT_OUT)
        assert (broken := build(tree)) is None, broken
        assert (failing := verdict(tree)) is None, f"{failing} fails without any mutation"
        for number in chosen:
            mutation = MUTATIONS[number - 1]
            before = apply(tree, mutation)
            if (broken := build(tree)) is not None:
                print(broken)
                raise SystemExit(f"mutation {number} does not build")
            noticed = verdict(tree)
            missed += noticed is None
            print(f"| {number} | {mutation.rules} | {mutation.file} | {mutation.mistake} | "
                  f"{noticed or 'NOTHING'} |", flush=True)
            (tree / mutation.file).write_text(before, encoding="utf-8")
    print(f"{len(chosen)} mutations, {missed} not noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
