"""The picture of a run: loss over time, with merges, joins and losses marked.

Needs matplotlib, draws without a display, and must not be imported unless a picture is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from syncer.demo.show.outcome import Baseline, RunOutcome
from syncer.errors import ConfigError

MARKS = {"join": ("^", "tab:green", "joined"), "loss": ("X", "tab:red", "lost")}
LEARNERS_IN_LEGEND = 8


def draw(path: str, outcome: RunOutcome) -> None:
    """Writes the picture to `path`. Raises ConfigError when the file cannot be written."""
    figure, (loss, merges) = plt.subplots(
        2, 1, sharex=True, figsize=(9, 6), layout="constrained",
        gridspec_kw={"height_ratios": [4, 1]})
    try:
        draw_loss(loss, outcome)
        draw_merges(merges, outcome)
        figure.suptitle(title(outcome), fontsize=11)
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error.strerror}") from None
    finally:
        plt.close(figure)


def title(outcome: RunOutcome) -> str:
    """What ran, in one line."""
    plan = outcome.plan
    return (f"{plan['learners']} learners, {outcome.outer_steps} outer steps in "
            f"{outcome.training_s:.0f} s, {plan['dtype']} on the wire")


def draw_loss(axes: Axes, outcome: RunOutcome) -> None:
    """Training loss pale, held-out loss strong, the merged model as a star at the end."""
    for each in outcome.learners:
        colour = f"C{each.learner % 10}"
        label = f"learner {each.learner}" if each.learner < LEARNERS_IN_LEGEND else None
        for process in range(1, each.starts + 1):
            points = [p for p in outcome.curve
                      if p["learner"] == each.learner and p["process"] == process]
            losses = [(p["t_s"], p["loss"]) for p in points if p["loss"] is not None]
            # A process measures its fresh model before it takes over the merged one.
            measured = [p for p in points if process == 1 or p["loss"] is not None]
            held_out = [(p["t_s"], p["held_out"]) for p in measured
                        if p["held_out"] is not None]
            axes.plot(*columns(losses), color=colour, alpha=0.3, linewidth=1)
            axes.plot(*columns(held_out), color=colour, linewidth=1.6, marker=".", label=label)
            label = None
    for happening in outcome.happenings:
        if happening["what"] in MARKS and happening["t_s"] > 0:
            axes.axvline(happening["t_s"], color=MARKS[happening["what"]][1], linestyle=":")
    if outcome.baseline is not None and outcome.baseline_curve:
        axes.plot(*columns(baseline_points(outcome, outcome.baseline)), color="black",
                  linestyle="--", linewidth=1.4, label="one alone, at the same own step")
    if outcome.merged is not None:
        axes.plot([outcome.training_s], [outcome.merged], "*", color="black", markersize=12,
                  label=f"merged model: {outcome.merged:.3f}", zorder=5)
    axes.set_ylabel("bits per byte\n(dots: held out, pale: training)")
    axes.set_ylim(bottom=min(1.5, outcome.merged or 1.5))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def draw_merges(axes: Axes, outcome: RunOutcome) -> None:
    """One row per learner: a tick for each merge that holds its delta, and its joins and losses."""
    for each in outcome.learners:
        times = [m["t_s"] for m in outcome.merges if each.learner in m["responded"]]
        axes.eventplot(times, lineoffsets=each.learner, linelengths=0.7, linewidths=0.7,
                       colors=f"C{each.learner % 10}")
    for what, (marker, colour, label) in MARKS.items():
        points = [(h["t_s"], h["learner"]) for h in outcome.happenings
                  if h["what"] == what and h["learner"] is not None]
        if not points:
            continue
        axes.plot(*columns(points), marker, color=colour, markersize=8, label=label, zorder=5,
                  markeredgecolor="white", linestyle="none")
    axes.set_yticks([each.learner for each in outcome.learners][:LEARNERS_IN_LEGEND])
    axes.set_ylim(len(outcome.learners) - 0.4, -0.6)
    axes.set_ylabel("merges with\nlearner")
    axes.set_xlabel("seconds of training")
    if any(h["what"] in MARKS for h in outcome.happenings):
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def baseline_points(outcome: RunOutcome, baseline: Baseline) -> list[tuple[float, float]]:
    """Held-out loss of the learner that trained alone, put where learner 0 was as far.

    It had the machine to itself, so its own clock would compare something else.
    """
    reached = [(p["step"], p["t_s"]) for p in outcome.curve if p["learner"] == 0]
    points = [] if baseline["before"] is None else [(0.0, baseline["before"])]
    for point in outcome.baseline_curve:
        later = [t_s for step, t_s in reached if step >= point["step"]]
        if point["held_out"] is not None and later:
            points.append((later[0], point["held_out"]))
    return [*points, (outcome.training_s, baseline["held_out"])]


def columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """A list of pairs as two lists."""
    return [x for x, _ in points], [y for _, y in points]
