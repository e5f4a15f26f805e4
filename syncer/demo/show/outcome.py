"""The closing figures of a run: collected once, shown as a table and a plot, written as JSON.

Must not print and must not start anything.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from syncer.demo.model import merged
from syncer.demo.run_plan import RunPlan
from syncer.demo.show.watch import (
    KILLED,
    BaselinePoint,
    CurvePoint,
    Happening,
    LearnerView,
    MergePoint,
    RunWatch,
)
from syncer.errors import ConfigError

JSON_FORMAT = "syncer-demo-v1"


class ServerTotals(TypedDict):
    """The server's own closing figures."""

    bytes_received: int
    bytes_sent: int
    cpu_seconds: float
    peak_rss_bytes: int
    commits: int


class LossOutcome(TypedDict):
    """A `Loss`, and what the tape says about it."""

    learner: int
    step: int
    t_s: float
    return_step: int | None
    return_s: float | None
    took_part_again_in: int | None
    """The first outer step with its delta after the return."""
    merges_without_it: int
    returned: bool


class Baseline(TypedDict):
    """The learner that trained alone. Bits per byte."""

    steps: int
    before: float | None
    held_out: float
    seconds: float


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
class RunOutcome:
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
    server: ServerTotals | None
    loss: LossOutcome | None
    """What --kill-one did."""
    baseline: Baseline | None = None
    problems: list[str] = field(default_factory=list)
    curve: list[CurvePoint] = field(default_factory=list)
    baseline_curve: list[BaselinePoint] = field(default_factory=list)
    merges: list[MergePoint] = field(default_factory=list)
    happenings: list[Happening] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether something went wrong that nobody asked for."""
        return bool(self.problems)


def collect(plan: RunPlan, watch: RunWatch, final_state: Path, ended: str,
            loss: Loss | None) -> RunOutcome:
    """The outcome of a run whose processes have ended; measures the final state if there is one."""
    problems = [h["text"] for h in watch.happenings
                if h["what"] == "loss" and "unexpectedly" in h["text"]]
    bits = source = sha256 = None
    if final_state.exists():
        measured = merged.measure_final_state(final_state, plan.torch)
        bits, sha256, source = measured.bits_per_byte, measured.sha256, "final state"
    else:
        ends = [v.end for v in watch.learners if v.end and v.end["merged"] is not None]
        if ends:
            newest = max(ends, key=lambda end: (sum(end["versions"]), -end["learner"]))
            bits, sha256 = newest["merged"], newest["sha256"]
            source = f"learner {newest['learner']}"
    rows = [learner_row(view, watch, sha256 if source == "final state" else None)
            for view in watch.learners]
    if source == "final state":
        problems += [f"learner {row.learner} ended with other parameters than the server's"
                     for row in rows if row.merged is not None and not row.holds_final_cut]
    if ended == "final cut":
        late = None if loss is None else loss.learner
        problems += [f"learner {row.learner} did not report the final cut"
                     for row in rows if row.merged is None and row.learner != late]
    return RunOutcome(
        plan=plan._asdict() | {"total_steps": plan.total_steps}, ended=ended,
        training_s=watch.training_s, outer_steps=watch.outer_step,
        before=next((row.before for row in rows if row.before is not None), None), merged=bits,
        merged_from=source, merged_sha256=sha256, learners=rows, server=server_totals(watch),
        loss=describe_loss(loss, watch), problems=problems, curve=watch.curve,
        merges=watch.merges, happenings=watch.happenings)


def learner_row(view: LearnerView, watch: RunWatch, final_sha256: str | None) -> LearnerRow:
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


def server_totals(watch: RunWatch) -> ServerTotals | None:
    """Out of the server's closing line, if it came to one."""
    said = watch.totals
    if said is None:
        return None
    return {"bytes_received": said["bytes_received"], "bytes_sent": said["bytes_sent"],
            "cpu_seconds": said["cpu_seconds"], "peak_rss_bytes": said["peak_rss_bytes"],
            "commits": said["commits"]}


def describe_loss(loss: Loss | None, watch: RunWatch) -> LossOutcome | None:
    """What --kill-one did, with the merges that went on without the learner."""
    if loss is None:
        return None
    back = None
    if loss.return_step is not None:
        back = watch.first_merge_with(loss.learner, loss.return_step)
    end = len(watch.merges) if back is None else back - 1
    without = [step for step in watch.merges_without(loss.learner) if loss.step < step <= end]
    return {"learner": loss.learner, "step": loss.step, "t_s": loss.t_s,
            "return_step": loss.return_step, "return_s": loss.return_s,
            "took_part_again_in": back, "merges_without_it": len(without),
            "returned": watch.learners[loss.learner].state != KILLED}


def add_baseline(outcome: RunOutcome, watch: RunWatch, view: LearnerView) -> bool:
    """The learner that trained alone, from its last record; False if it never wrote one."""
    if view.end is None:
        return False
    outcome.baseline = {"steps": view.end["step"], "before": view.before,
                        "held_out": view.end["own"], "seconds": view.end["seconds"]}
    outcome.baseline_curve = watch.baseline_curve
    return True


def write_json(path: str, outcome: RunOutcome) -> None:
    """Writes the whole outcome. Raises ConfigError when the file cannot be written."""
    try:
        text = json.dumps({"format": JSON_FORMAT, **asdict(outcome)}, indent=1) + "\n"
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path} cannot be written: {error.strerror}") from None
