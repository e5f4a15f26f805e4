"""The closing figures of a run: collected once, shown by table.py and plot.py, written as JSON.

Must not print and must not start anything.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from syncer.demo import merged
from syncer.demo.plan import Plan
from syncer.demo.watch import KILLED, LearnerView, Watch
from syncer.errors import ConfigError

FORMAT = "syncer-demo-v1"


class Loss(NamedTuple):
    """What --kill-one did. Times are seconds of training."""

    learner: int
    step: int
    """Outer step after which it was killed."""
    t_s: float
    return_step: int | None = None
    """Outer step after which it was started again."""
    return_s: float | None = None


@dataclass
class LearnerRow:
    """One learner of the closing table; None where it never said."""

    learner: int
    state: str
    starts: int
    before: float | None
    """Held-out bits per byte of the fresh model."""
    own: float | None
    """Of its own parameters at its last step."""
    merged: float | None
    """Of the merged parameters it holds."""
    holds_final_cut: bool
    """Its parameters are those of the final-state file, to the bit."""
    steps: int
    tokens: int
    tokens_per_s: float | None
    bytes_sent: int
    bytes_received: int
    peak_rss_bytes: int | None


@dataclass
class Outcome:
    """Everything a run has to show; `asdict` of it is the JSON file."""

    plan: dict[str, Any]
    ended: str
    """"final cut", "time budget" or "interrupted"."""
    training_s: float
    outer_steps: int
    before: float | None
    merged: float | None
    """Held-out bits per byte of the merged model."""
    merged_from: str | None
    """"final state" (the server's file) or "learner N" (the newest broadcasts it held)."""
    merged_sha256: str | None
    learners: list[LearnerRow]
    server: dict[str, Any] | None
    """The server's totals: bytes_received, bytes_sent, cpu_seconds, peak_rss_bytes, commits."""
    loss: dict[str, Any] | None
    """What --kill-one did, and what the tape says about it."""
    baseline: dict[str, Any] | None = None
    problems: list[str] = field(default_factory=list)
    curve: list[dict[str, Any]] = field(default_factory=list)
    baseline_curve: list[dict[str, Any]] = field(default_factory=list)
    merges: list[dict[str, Any]] = field(default_factory=list)
    happenings: list[dict[str, Any]] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether something went wrong that nobody asked for."""
        return bool(self.problems)


def collect(plan: Plan, watch: Watch, final_state: Path, ended: str, loss: Loss | None) -> Outcome:
    """The outcome of a run whose processes have ended; measures the final state if there is one."""
    problems = [h["text"] for h in watch.happenings
                if h["what"] == "loss" and "unexpectedly" in h["text"]]
    bits = source = sha256 = None
    if final_state.exists():
        measured = merged.measure_final_state(final_state)
        bits, sha256, source = measured.bits_per_byte, measured.sha256, "final state"
    else:
        ends = [v for v in watch.learners if v.end and v.end["merged"] is not None]
        if ends:
            newest = max(ends, key=lambda v: (sum(v.end["versions"]), -v.learner))
            bits, sha256 = newest.end["merged"], newest.end["sha256"]
            source = f"learner {newest.learner}"
    rows = [learner_row(view, watch, sha256 if source == "final state" else None)
            for view in watch.learners]
    if source == "final state":
        problems += [f"learner {row.learner} ended with other parameters than the server's"
                     for row in rows if row.merged is not None and not row.holds_final_cut]
    if ended == "final cut":
        late = None if loss is None else loss.learner
        problems += [f"learner {row.learner} did not report the final cut"
                     for row in rows if row.merged is None and row.learner != late]
    return Outcome(
        plan=plan._asdict() | {"total_steps": plan.total_steps}, ended=ended,
        training_s=watch.training_s, outer_steps=watch.outer_step,
        before=next((row.before for row in rows if row.before is not None), None), merged=bits,
        merged_from=source, merged_sha256=sha256, learners=rows, server=server_totals(watch),
        loss=describe_loss(loss, watch), problems=problems, curve=watch.curve,
        merges=watch.merges, happenings=watch.happenings)


def learner_row(view: LearnerView, watch: Watch, final_sha256: str | None) -> LearnerRow:
    end = view.end or {}
    sent, received = view.wire_total
    seconds = watch.training_s
    return LearnerRow(
        learner=view.learner, state=view.state, starts=view.starts, before=view.before,
        own=end.get("own"), merged=end.get("merged"),
        holds_final_cut=final_sha256 is not None and end.get("sha256") == final_sha256,
        steps=view.step, tokens=view.tokens_total,
        tokens_per_s=view.tokens_total / seconds if seconds > 0 else None, bytes_sent=sent,
        bytes_received=received, peak_rss_bytes=end.get("peak_rss_bytes"))


def server_totals(watch: Watch) -> dict[str, Any] | None:
    names = ("bytes_received", "bytes_sent", "cpu_seconds", "peak_rss_bytes", "commits")
    return watch.totals and {name: watch.totals[name] for name in names}


def describe_loss(loss: Loss | None, watch: Watch) -> dict[str, Any] | None:
    """What --kill-one did, with the merges that went on without the learner."""
    if loss is None:
        return None
    back = None
    if loss.return_step is not None:
        back = watch.first_merge_with(loss.learner, loss.return_step)
    end = len(watch.merges) if back is None else back - 1
    without = [step for step in watch.merges_without(loss.learner) if loss.step < step <= end]
    return loss._asdict() | {"took_part_again_in": back, "merges_without_it": len(without),
                             "returned": watch.learners[loss.learner].state != KILLED}


def add_baseline(outcome: Outcome, watch: Watch) -> None:
    """The learner that trained alone, from its last record."""
    end = watch.baseline.end
    outcome.baseline = {"steps": end["step"], "before": watch.baseline.before,
                        "held_out": end["own"], "seconds": end["seconds"]}
    outcome.baseline_curve = watch.baseline_curve


def write_json(path: str, outcome: Outcome) -> None:
    """Writes the whole outcome. Raises ConfigError when the file cannot be written."""
    try:
        Path(path).write_text(json.dumps({"format": FORMAT, **asdict(outcome)}, indent=1) + "\n",
                              encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path} cannot be written: {error.strerror}") from None
