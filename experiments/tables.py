"""Tables of the experiments, from what they have found. Must not measure.

docs/experiments/NAME.json is what `python -m experiments.NAME --json` has written.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs" / "experiments"
Found = dict[str, Any]


def read(name: str) -> Found:
    found: Found = json.loads((DOCS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def markdown(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def said(found: Found, text: str) -> str:
    """A table with what it was made by."""
    return f"`{found['command']}`, {found['machine']}:\n\n{text}"


def spread(values: list[float], digits: int = 3) -> str:
    """The mean, and how far the lowest and the highest are from it at most."""
    mean = statistics.fmean(values)
    return f"{mean:.{digits}f} ± {max(abs(value - mean) for value in values):.{digits}f}"


def percent(value: float) -> str:
    return f"{100 * value:+.1f} %"


def group(cells: list[Found], *keys: str) -> dict[tuple[Any, ...], list[Found]]:
    """By the values of these keys, in order of appearance."""
    groups: dict[tuple[Any, ...], list[Found]] = {}
    for cell in cells:
        groups.setdefault(tuple(cell[key] for key in keys), []).append(cell)
    return groups


def mean(cells: list[Found], key: str) -> float:
    return statistics.fmean(cell[key] for cell in cells)


def parity(found: Found) -> str:
    """A row a size and number of learners; gaps of means."""
    groups = group(found["cells"], "size", "learners")
    rows = []
    for (size, learners), cells in groups.items():
        loss, bound = mean(cells, "loss"), mean(cells, "bound")
        half = groups.get((size, learners // 2))
        rows.append([
            size, str(learners), spread([cell["loss"] for cell in cells]),
            spread([cell["bound"] for cell in cells]), percent(loss / bound - 1),
            percent(loss / mean(half, "bound") - 1) if half else ""])
    return said(found, markdown(
        ["model", "learners", "run", "DP, as many", "against it", "against DP, half as many"],
        rows))


def in_docs(name: str) -> Callable[[], str]:
    return lambda: globals()[name](read(name))


parity_in_docs = in_docs("parity")


def rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def sweep(found: Found) -> str:
    """A row an H and format: traffic, loss against f32 with the same H, and time to the target."""
    cells = found["cells"]
    links = list(dict.fromkeys(cell["link"] for cell in cells))
    rows = []
    for (h, up, down), same in group(cells, "h", "up", "down").items():
        free, f32 = ([cell for cell in of if cell["link"] == links[0]] for of in (
            same, [cell for cell in cells if cell["h"] == h and cell["up"] == cells[0]["up"]]))
        sizes = (mean(free, key) / free[0]["seconds"] for key in ("up_bytes", "down_bytes"))
        rows.append([
            str(h), up, down, " / ".join(rounded(1000 * size) for size in sizes),
            spread([cell["loss"] for cell in free]),
            percent(mean(free, "loss") / mean(f32, "loss") - 1)])
        for link in links:
            limited = [cell for cell in same if cell["link"] == link][:1]
            rows[-1] += [f"{limited[0]['loss']:.3f}"] * (link != links[0]) if limited else [""]
            rows[-1] += [f"{cell['to_target_s']:.0f}" if cell["to_target_s"] else
                         f"> {2 * cell['seconds']}" for cell in limited] or [""]
    head = ["H", "up", "down", "MB/s up / down", "loss, " + links[0], "against f32",
            "s to target"] + [f"{what}, {link}" for link in links[1:]
                              for what in ("loss", "s to target")]
    return said(found, markdown(head, rows))


sweep_in_docs = in_docs("sweep")


def straggler(found: Found) -> str:
    """A row a policy."""
    return said(found, markdown(
        ["", "merged steps a second", "goodput", "of the last learner", "commits", "loss"],
        [[policy, f"{mean(cells, 'steps_a_second'):.2f}", share(mean(cells, "goodput")),
          share(mean(cells, "last_goodput")), f"{mean(cells, 'commits'):.0f}",
          spread([cell["loss"] for cell in cells])]
         for (policy,), cells in group(found["cells"], "policy").items()]))


def share(value: float) -> str:
    return f"{100 * value:.0f} %"


def chaos(found: Found) -> str:
    """A row a policy and mean life; goodput and loss beside the calm run of the policy."""
    groups = group(found["cells"], "policy", "chaos")
    rows = []
    for (policy, kind), cells in groups.items():
        calm = next(same for (other, _), same in groups.items() if other == policy)
        rows.append([
            policy, kind, f"{mean(cells, 'kills'):.0f}",
            share(mean(cells, "goodput") / mean(calm, "goodput")),
            f"{mean(cells, 'commits'):.0f}", f"{max(c['longest_gap_s'] for c in cells):.1f}",
            spread([cell["loss"] for cell in cells]),
            percent(mean(cells, "loss") / mean(calm, "loss") - 1)])
    return said(found, markdown(
        ["", "killed", "times", "goodput of the calm run", "commits", "longest gap, s", "loss",
         "against calm"], rows))


straggler_in_docs = in_docs("straggler")
chaos_in_docs = in_docs("chaos")


def staleness(found: Found) -> str:
    """A row a variant; for each link its loss, against the first one with the same seeds."""
    links = list(dict.fromkeys(cell["link"] for cell in found["cells"]))
    groups = group(found["cells"], "variant", "link")
    first = found["cells"][0]["variant"]
    rows = []
    for (variant,), _ in group(found["cells"], "variant").items():
        row = [variant]
        for link in links:
            cells, default = groups[variant, link], groups[first, link]
            row += [share(mean(cells, "goodput")), spread([cell["loss"] for cell in cells]),
                    against(cells, default)]
        rows.append(row)
    return said(found, markdown(
        ["", *(f"{what}, {link}" for link in links
               for what in ("goodput", "loss", "against the first"))], rows))


def against(cells: list[Found], others: list[Found]) -> str:
    """The difference of losses seed by seed: its mean, lowest and highest."""
    gaps = [a["loss"] / b["loss"] - 1 for a, b in zip(cells, others, strict=True)]
    return f"{percent(statistics.fmean(gaps))} ({percent(min(gaps))} to {percent(max(gaps))})"


staleness_in_docs = in_docs("staleness")


def outer(found: Found) -> str:
    """A row a variant; for each fleet its loss, against the first one with the same seeds."""
    fleets = group(found["cells"], "size", "learners")
    groups = group(found["cells"], "variant", "size")
    first = found["cells"][0]["variant"]
    rows = []
    for (variant,), _ in group(found["cells"], "variant").items():
        row = [variant]
        for size, _ in fleets:
            cells = groups[variant, size]
            row += [spread([cell["loss"] for cell in cells]), against(cells, groups[first, size])]
        rows.append(row)
    names = [f"{size}, {learners} learners" for size, learners in fleets]
    return said(found, markdown(
        ["outer learning rate", *(text for name in names for text in (
            name, "against the first"))], rows))


outer_in_docs = in_docs("outer")


def wall_time(found: Found) -> str:
    """A row a way, a column a link; of the seeds that have come there."""
    groups = group(found["cells"], "way", "link")
    links = list(dict.fromkeys(cell["link"] for cell in found["cells"]))
    rows = []
    for (way,), _ in group(found["cells"], "way").items():
        row = [way]
        for link in links:
            times = [cell["to_target_s"] for cell in groups[way, link]]
            there = [seconds for seconds in times if seconds is not None]
            row.append(f"{statistics.fmean(there):,.0f}" if len(there) == len(times) else
                       f"{len(there)} of {len(times)} in time")
        rows.append(row)
    return said(found, markdown(["s to target", *links], rows))


wall_time_in_docs = in_docs("wall_time")
