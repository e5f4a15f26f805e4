"""Writes the generated parts of the docs again: tables that come from code, never from memory.

A part stands between `<!-- generated: NAME -->` and `<!-- end -->`; `PARTS` names the function that
makes it. `--check` writes nothing and names the files that are out of date.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))
PARTS = {
    "flags": "syncer.flags:markdown_table",
    "flag-needs": "syncer.flags:needs_table",
    "presets": "syncer.config.presets:markdown_table",
    "preset-figures": "tests.sim.presets:table",
    "profile-hash": "syncer.flags:profile_table",
    "exit-statuses": "syncer.exits:markdown_table",
    "wire-constants": "syncer.wire.describe:constants_table",
    "wire-messages": "syncer.wire.describe:messages_table",
    "phase-table": "tests.rules:phase_table",
    "timeline-grace": "tests.scenarios.timeline:grace",
    "timeline-relaunch": "tests.scenarios.timeline:relaunch",
    "timeline-deferred": "tests.scenarios.timeline:deferred",
    "timeline-rebind": "tests.scenarios.timeline:rebind",
    "timeline-late-join": "tests.scenarios.timeline:late_join",
    "timeline-fixed": "tests.scenarios.timeline:fixed",
    "log-messages": "docs.log_messages:table",
    "log-endings": "docs.log_messages:endings",
    "tape-keys": "syncer.core.run.tape_keys:markdown_table",
    "room-table": "docs.rooms:room_table",
    "room-map": "docs.rooms:room_map",
    "modules": "docs.rooms:module_tables",
    "timeouts": "docs.timeouts:table",
    "walk": "docs.walk:table",
    "numpy-line": "docs.generate:numpy_line",
    "torch-line": "docs.generate:torch_line",
    "merge-figures": "docs.generate:merge_figures",
    "merge-times": "benchmarks.merge_round:times_table",
    "merge-passes": "benchmarks.merge_round:passes_table",
    "rule-table": "tests.rules:table",
    "limits": "docs.measured:limits",
    "peers": "docs.measured:peers",
    "peers-killed": "docs.measured:peers_killed",
    "parity": "experiments.tables:parity_in_docs",
    "straggler": "experiments.tables:straggler_in_docs",
    "chaos": "experiments.tables:chaos_in_docs",
    "sweep": "experiments.tables:sweep_in_docs",
    "wall_time": "experiments.tables:wall_time_in_docs",
    "outer": "experiments.tables:outer_in_docs",
    "staleness": "experiments.tables:staleness_in_docs",
    "predictions": "docs.predictions:table",
    "mutation-table": "tests.rules:mutation_table",
}
MARKED = re.compile(r"(<!-- generated: ([a-z_-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def example(name: str) -> str:
    """An example program as it is."""
    program = (DOCS.parent / "examples" / name).read_text(encoding="utf-8")
    return f"```python\n{program}```\n"


def numpy_line() -> str:
    return example("numpy_line.py")


def torch_line() -> str:
    return example("torch_line.py")


def merge_figures() -> str:
    """Of the class that makes them; its room needs torch, so it is read as text."""
    source = (DOCS.parent / "syncer/torch/trackers.py").read_text(encoding="utf-8")
    rows = re.findall(r"^ +(\|.*\|)$", source, re.MULTILINE)
    return "\n".join(rows) + "\n"


def generated(name: str) -> str:
    """The text of one part, ending in a newline."""
    module, function = PARTS[name].split(":")
    return str(getattr(importlib.import_module(module), function)())


def refreshed(text: str) -> str:
    """The document with every marked part made again."""
    return MARKED.sub(lambda match: match[1] + generated(match[2]) + match[3], text)


def main() -> int:
    """Writes, or with `--check` only compares; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail if out of date")
    check = parser.parse_args().check
    stale = []
    for path in sorted([*DOCS.glob("*.md"), DOCS.parent / "README.md"]):
        text = path.read_text(encoding="utf-8")
        fresh = refreshed(text)
        if fresh != text:
            stale.append(path.name)
            if not check:
                path.write_text(fresh, encoding="utf-8")
    print(f"{'out of date' if check else 'written'}: {', '.join(stale) or 'nothing'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
