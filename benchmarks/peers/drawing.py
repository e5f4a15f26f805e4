"""The table of peers as a picture. Must not measure."""

from __future__ import annotations

from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

OURS, F32, SMALL = "#c2410c", "#64748b", "#a3b1c2"
OURS_NAME = "syncer"
TOO_LONG = 2.2
"""A bar so many times as long as the longest of those that are not ours f32 is cut, and says so."""


def draw(found: dict[str, Any], file: str) -> None:
    """A panel for each place and number of participants: a bar a peer and format, from zero."""
    cells = found["syncs"]
    places = list(dict.fromkeys(cell["place"] for cell in cells))
    worlds = list(dict.fromkeys(cell["participants"] for cell in cells))
    bars = len({(cell["peer"], cell["form"]) for cell in cells})
    figure, panels = pyplot.subplots(
        len(worlds), len(places), squeeze=False, sharey=True,
        figsize=(2.2 + 3.4 * len(places), 1.2 + (0.6 + 0.27 * bars) * len(worlds)))
    for row, world in zip(panels, worlds, strict=True):
        for panel, place in zip(row, places, strict=True):
            one_panel(panel, [cell for cell in cells
                              if (cell["place"], cell["participants"]) == (place, world)])
            panel.set_title(f"{place}, {world} participants", fontsize=10, loc="left")
    for panel in panels[-1]:
        panel.set_xlabel("seconds for one sync (less is better)", fontsize=9)
    said = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    figure.suptitle(f"One sync of {found['mib']} MiB of f32 parameters", fontsize=12, x=0.01,
                    ha="left", weight="bold")
    figure.text(0.01, 0.005, f"{found['when'][:10]}, {found['machine']}, load "
                f"{found['load_before']:.1f} to {found['load_after']:.1f}; medians; {said}",
                fontsize=7.5, color="#475569")
    figure.tight_layout(rect=(0, 0.02, 1, 0.985))
    figure.savefig(file, dpi=110, facecolor="white")
    pyplot.close(figure)


def one_panel(panel: Any, cells: list[dict[str, Any]]) -> None:
    known = sorted(cell["seconds"] for cell in cells if "seconds" in cell)
    end = min(known[-1], TOO_LONG * known[-2] if len(known) > 1 else known[-1]) if known else 1.0
    for place, cell in enumerate(cells):
        small = SMALL if cell["form"] != "f32" else F32
        if "seconds" in cell:
            panel.barh(place, min(cell["seconds"], end), height=0.7,
                       color=OURS if cell["peer"] == OURS_NAME else small)
            text = f"{cell['seconds']:.2f}" + (" (cut)" if cell["seconds"] > end else "")
            panel.text(min(cell["seconds"], end) + 0.015 * end, place, text, va="center",
                       fontsize=8)
        else:
            panel.text(0.015 * end, place, "did not run", va="center", fontsize=8, color="#94a3b8")
    panel.set_yticks(range(len(cells)), [f"{cell['peer']}, {cell['form']}" for cell in cells],
                     fontsize=8.5)
    panel.set_ylim(len(cells) - 0.4, -0.6)
    panel.set_xlim(0, 1.18 * end)
    panel.tick_params(axis="x", labelsize=8)
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="x", color="#e2e8f0", linewidth=0.8)
    panel.set_axisbelow(True)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
