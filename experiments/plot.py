"""Pictures of the experiments. Must not measure."""

from __future__ import annotations

import statistics
from typing import Any

import matplotlib

from experiments.tables import Found, group, mean

matplotlib.use("Agg")
from matplotlib import pyplot

INK, GRID, PALE = "#334155", "#e2e8f0", "#94a3b8"
COLOURS = ("#c2410c", "#0369a1", "#15803d", "#7c3aed", "#a16207", "#be185d", "#0f766e")


def panels(count: int, title: str, found: Found, height: float = 3.6) -> tuple[Any, list[Any]]:
    """One row of panels under a title, and what made them at the foot."""
    figure, axes = pyplot.subplots(1, count, figsize=(1.0 + 4.4 * count, height), squeeze=False)
    figure.suptitle(title, fontsize=12, x=0.01, ha="left", weight="bold")
    figure.text(0.01, 0.01, f"{found['command']}; {found['machine']}", fontsize=7.5, color=PALE)
    for panel in axes[0]:
        panel.grid(color=GRID, linewidth=0.8)
        panel.set_axisbelow(True)
        panel.tick_params(labelsize=8, colors=INK)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    return figure, list(axes[0])


def keep(figure: Any, file: str) -> None:
    figure.tight_layout(rect=(0, 0.035, 1, 0.98))
    figure.savefig(file, dpi=110, facecolor="white")
    pyplot.close(figure)


def with_range(panel: Any, groups: list[tuple[Any, list[float]]], **style: Any) -> None:
    """A line through means, and bars from the lowest to the highest."""
    places = [place for place, _ in groups]
    means = [statistics.fmean(values) for _, values in groups]
    below = [m - min(values) for m, (_, values) in zip(means, groups, strict=True)]
    above = [max(values) - m for m, (_, values) in zip(means, groups, strict=True)]
    panel.errorbar(places, means, yerr=[below, above], capsize=3, marker="o", markersize=4,
                   linewidth=1.6, **style)


def parity(found: Found, file: str) -> None:
    """Loss over learners, a panel a size."""
    sizes = group(found["cells"], "size")
    figure, axes = panels(len(sizes), "A run against synchronous data parallel, equal tokens",
                          found)
    for panel, ((size,), cells) in zip(axes, sizes.items(), strict=True):
        rows = list(group(cells, "learners").items())
        for key, name, colour in (("bound", "DP, gradients at every step", COLOURS[1]),
                                  ("loss", "run, a merge every 24 steps", COLOURS[0])):
            with_range(panel, [(m, [cell[key] for cell in same]) for (m,), same in rows],
                       label=name, color=colour)
        panel.set_xscale("log", base=2)
        panel.set_xticks([m for (m,), _ in rows], [str(m) for (m,), _ in rows])
        panel.minorticks_off()
        panel.set_title(f"{size} model", fontsize=10, loc="left")
        panel.set_xlabel("learners (each reads as many tokens)", fontsize=9)
        panel.set_ylabel("bits per held-out byte", fontsize=9)
        panel.legend(fontsize=8, frameon=False)
    keep(figure, file)


def sweep(found: Found, file: str) -> None:
    """Loss over H, a panel a link, a line a format."""
    links = group(found["cells"], "link")
    figure, axes = panels(len(links), "H and the format on the wire, loss after as many seconds",
                          found)
    for panel, ((link,), cells) in zip(axes, links.items(), strict=True):
        for colour, ((up, down), same) in zip(
                COLOURS, group(cells, "up", "down").items(), strict=False):
            rows = group(same, "h").items()
            panel.plot([h for (h,), _ in rows], [mean(each, "loss") for _, each in rows],
                       marker="o", markersize=4, linewidth=1.6, color=colour,
                       label=f"{up} / {down}")
        panel.set_xscale("log")
        ticks = list(dict.fromkeys(cell["h"] for cell in cells))
        panel.set_xticks(ticks, [str(h) for h in ticks])
        panel.minorticks_off()
        panel.set_title(f"link: {link}", fontsize=10, loc="left")
        panel.set_xlabel("H, own steps between two merges of a fragment", fontsize=9)
        panel.set_ylabel("bits per held-out byte", fontsize=9)
    axes[-1].legend(fontsize=8, frameon=False, title="up / down", title_fontsize=8)
    keep(figure, file)


def straggler(found: Found, file: str) -> None:
    """Goodput and loss, a bar a policy."""
    rows = [(policy, cells) for (policy,), cells in group(found["cells"], "policy").items()]
    figure, axes = panels(2, "One of four learners is four times slower", found, 4.2)
    bars(axes[0], rows, "goodput", "share of own steps that is merged")
    bars(axes[1], rows, "loss", "bits per held-out byte")
    axes[1].set_yticklabels([])
    low = min(cell["loss"] for cell in found["cells"])
    high = max(cell["loss"] for cell in found["cells"])
    axes[1].set_xlim(low - 0.3 * (high - low), high + 0.1 * (high - low))
    keep(figure, file)


def bars(panel: Any, rows: list[tuple[str, list[Found]]], key: str, label: str) -> None:
    """Means as dots, from the lowest to the highest as lines, named on the left."""
    for place, (_, cells) in enumerate(rows):
        values = [cell[key] for cell in cells]
        panel.plot([min(values), max(values)], [place, place], color=COLOURS[0], linewidth=1.6)
        panel.plot(statistics.fmean(values), place, marker="o", color=COLOURS[0])
    panel.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.set_xlabel(label, fontsize=9)


def chaos(found: Found, file: str) -> None:
    """Goodput, loss and the longest gap over how often learners die, a line a policy."""
    figure, axes = panels(3, "Learners are killed at Poisson times, the server once", found)
    kinds = list(dict.fromkeys(cell["chaos"] for cell in found["cells"]))
    for panel, (key, label) in zip(axes, (
            ("goodput", "merged steps a second of a learner"),
            ("loss", "bits per held-out byte"),
            ("longest_gap_s", "longest time between two commits, s")), strict=True):
        for i, ((policy,), cells) in enumerate(group(found["cells"], "policy").items()):
            with_range(panel, [(kinds.index(kind) + 0.06 * i, [cell[key] for cell in same])
                               for (kind,), same in group(cells, "chaos").items()],
                       label=policy, color=COLOURS[i])
        panel.set_xticks(range(len(kinds)), kinds, fontsize=8)
        panel.set_ylabel(label, fontsize=9)
    axes[0].legend(fontsize=8, frameon=False)
    keep(figure, file)


def staleness(found: Found, file: str) -> None:
    """Loss, a bar a variant, a panel a link."""
    links = group(found["cells"], "link")
    variants(found, file, "Steps of 0.58, 0.75, 1.51 and 3.33 s", 4.0,
             [(f"links: {link}", cells) for (link,), cells in links.items()])


def outer(found: Found, file: str) -> None:
    """Loss, a bar a variant, a panel a fleet."""
    fleets = group(found["cells"], "size", "learners")
    variants(found, file, "The outer step", 4.4,
             [(f"{size} model, {learners} learners", cells)
              for (size, learners), cells in fleets.items()])


def variants(found: Found, file: str, title: str, height: float,
             fields: list[tuple[str, list[Found]]]) -> None:
    """Loss, a bar a variant, in a named panel for the cells of each field."""
    figure, axes = panels(len(fields), title, found, height)
    for panel, (name, cells) in zip(axes, fields, strict=True):
        bars(panel, [(variant, same) for (variant,), same in group(cells, "variant").items()],
             "loss", "bits per held-out byte")
        panel.set_title(name, fontsize=10, loc="left")
    axes[-1].set_yticklabels([])
    keep(figure, file)


def wall_time(found: Found, file: str) -> None:
    """Seconds to the target over links, a line a way."""
    figure, axes = panels(1, "Time to the same loss", found, 4.0)
    figure.set_size_inches(7.5, 4.0)
    links = list(dict.fromkeys(cell["link"] for cell in found["cells"]))
    for colour, ((way,), cells) in zip(COLOURS[1::-1] + COLOURS[2:],
                                       group(found["cells"], "way").items(), strict=False):
        rows = [(links.index(link), [cell["to_target_s"] for cell in same if cell["to_target_s"]])
                for (link,), same in group(cells, "link").items()]
        with_range(axes[0], [row for row in rows if row[1]], label=way, color=colour)
    axes[0].set_yscale("log")
    axes[0].set_xticks(range(len(links)), links)
    axes[0].set_xlabel("link of each learner, for a model of a billion parameters", fontsize=9)
    axes[0].set_ylabel("seconds to 3.3 bits per byte", fontsize=9)
    axes[0].legend(fontsize=8, frameon=False)
    keep(figure, file)
