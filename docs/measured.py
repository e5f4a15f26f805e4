"""Tables of what was measured, from the files that the measuring has written. Must not measure.

    python -m benchmarks.limits --json limits.json --figures docs/limits.json
    python -m benchmarks.peers ... --json docs/peers.json --png docs/peers.png
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCS / name).read_text(encoding="utf-8"))
    return found


def number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.{digits}g}"


def limits() -> str:
    """Every path beside its bound."""
    found = read("limits.json")
    lines = [f"{found['machine'].partition(', load')[0]}; the load stands with each row:", "",
             "| path | ours | CPU s/GB | bound | CPU s/GB | | ratio | at least | load |",
             "|---|---|---|---|---|---|---|---|---|"]
    for row in found["rows"].values():
        missed = " **below**" if row["ratio"] < row["at_least"] else ""
        lines.append(
            f"| {row['path']} | {number(row['ours'])} | {number(row['ours_cpu'])} | "
            f"{number(row['bound'])} | {number(row['bound_cpu'])} | "
            f"{row['unit'] if row['ours'] is not None else ''} | {row['ratio']:.2f}{missed} | "
            f"{row['at_least']:.2f} | {row['load']:.0f} |")
    return "\n".join(lines) + "\n"


def said_of_peers(found: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    loads = [cell["load"] for cell in found["syncs"]]
    return (f"{found['when'][:10]}, {found['machine']}, load {min(loads):.0f} to {max(loads):.0f}; "
            f"{versions}.")


def peers() -> str:
    """Median seconds of a sync, a column for each place and number of participants."""
    found = read("peers.json")
    columns = list(dict.fromkeys((cell["place"], cell["participants"]) for cell in found["syncs"]))
    rows: dict[tuple[str, str], dict[tuple[str, int], str]] = {}
    for cell in found["syncs"]:
        said = f"{cell['seconds']:.2f}" if "seconds" in cell else "did not run"
        rows.setdefault((cell["peer"], cell["form"]), {})[
            cell["place"], cell["participants"]] = said
    lines = [said_of_peers(found), "",
             "| | on the wire | " + " | ".join(f"{place}, {n}" for place, n in columns) + " |",
             "|---|---|" + "---|" * len(columns)]
    for (peer, form), row in rows.items():
        lines.append(f"| {peer} | {form} | " + " | ".join(row.get(column, "") for column in columns)
                     + " |")
    return "\n".join([*lines, *failures(found["syncs"], "failed")]) + "\n"


def failures(cells: list[dict[str, Any]], key: str) -> Iterator[str]:
    """Why something did not run."""
    said = {f"- {cell['peer']}: {cell[key]}" for cell in cells if key in cell}
    if said:
        yield ""
        yield from sorted(said)


def peers_killed() -> str:
    found = read("peers.json")
    lines = ["| participants | | a sync takes | the others have one after | syncs of theirs that "
             "came to nothing |", "|---|---|---|---|---|"]
    for cell in found["losses"]:
        if "failed_to_run" in cell:
            continue
        after = "never" if cell["others_s"] is None else f"{cell['others_s']:.2f} s"
        if cell["ended"]:
            after = "they end, too"
        lines.append(f"| {cell['participants']} | {cell['peer']} | {cell['usual_s']:.2f} s | "
                     f"{after} | {cell['failed']} |")
    return "\n".join([*lines, *failures(found["losses"], "failed_to_run")]) + "\n"
