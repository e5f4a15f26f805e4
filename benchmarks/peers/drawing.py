"""The table of peers as a picture. Must not measure."""

from __future__ import annotations

import statistics
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

OURS, F32, SMALL = "#c2410c", "#64748b", "#a3b1c2"
OURS_NAME = "syncer"
TOO_LONG = 4.0
"""A bar above so many times the median of its panel is cut, hatched, and says so."""


def draw(found: dict[str, Any], file: str) -> None:
    """A panel for each place and number of participants: a bar a peer and format, from zero."""
    cells = found["syncs"]
    places = list(dict.fromkeys(cell["place"] for cell in cells))
    worlds = list(dict.fromkeys(cell["participants"] for cell in cells))
    bars = list(dict.fromkeys((cell["peer"], cell["form"]) for cell in cells))
    figure, panels = pyplot.subplots(
        len(worlds), len(places), squeeze=False, sharey=True,
        figsize=(2.2 + 3.4 * len(places), 1.2 + (0.6 + 0.27 * len(bars)) * len(worlds)))
    for row, world in zip(panels, worlds, strict=True):
        for panel, place in zip(row, places, strict=True):
            one_panel(panel, bars, [cell for cell in cells if (
                cell["place"], cell["participants"]) == (place, world)])
            panel.set_title(f"{place}, {world} participants", fontsize=10, loc="left")
    for panel in panels[-1]:
        panel.set_xlabel("seconds for one sync (less is better)", fontsize=9)
    said = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    figure.suptitle(f"One sync of {found['mib']} MiB of f32 parameters", fontsize=12, x=0.01,
                    ha="left", weight="bold")
    loads = [cell["load"] for cell in cells]
    figure.text(0.01, 0.005, f"{found['when'][:10]}, {found['machine']}, load {min(loads):.0f} to "
                f"{max(loads):.0f}; medians; {said}",
                fontsize=7.5, color="#475569")
    figure.tight_layout(rect=(0, 0.02, 1, 0.985))
    figure.savefig(file, dpi=110, facecolor="white")
    pyplot.close(figure)


def one_panel(panel: Any, bars: list[tuple[str, str]], cells: list[dict[str, Any]]) -> None:
    known = [cell["seconds"] for cell in cells if "seconds" in cell] or [1.0]
    end = min(max(known), TOO_LONG * statistics.median(known))
    for cell in cells:
        place = bars.index((cell["peer"], cell["form"]))
        small = SMALL if cell["form"] != "f32" else F32
        if "seconds" in cell:
            panel.barh(place, min(cell["seconds"], end), height=0.7, edgecolor="white",
                       linewidth=0, hatch="//" if cell["seconds"] > end else "",
                       color=OURS if cell["peer"] == OURS_NAME else small)
            text = f"{cell['seconds']:.2f}" + (" (cut)" if cell["seconds"] > end else "")
            panel.text(min(cell["seconds"], end) + 0.015 * end, place, text, va="center",
                       fontsize=8)
        else:
            panel.text(0.015 * end, place, "did not run", va="center", fontsize=8, color="#94a3b8")
    panel.set_yticks(range(len(bars)), [f"{peer}, {form}" for peer, form in bars], fontsize=8.5)
    panel.set_ylim(len(bars) - 0.4, -0.6)
    panel.set_xlim(0, 1.25 * end)
    panel.tick_params(axis="x", labelsize=8)
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="x", color="#e2e8f0", linewidth=0.8)
    panel.set_axisbelow(True)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
