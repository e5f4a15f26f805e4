"""What is known of a run while it goes on: children's lines and tape records in, one state out.

Must not print, start or signal anything: processes/conductor.py acts, the rest of show/ shows.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, TypedDict

STARTING, TRAINING, KILLED, RETURNING, DONE, FAILED = (
    "starting", "training", "killed", "returning", "done", "failed")


class CurvePoint(TypedDict):
    """A point of a learner's curve. Bits per byte, None where there is none."""

    t_s: float
    learner: int
    process: int
    """1 for the first process that had the id, 2 for the next."""
    step: int
    loss: float | None
    held_out: float | None


class BaselinePoint(TypedDict):
    """A point of the curve of the learner that trains alone."""

    step: int
    loss: float
    held_out: float | None


class MergePoint(TypedDict):
    """One merge, from the tape."""

    t_s: float
    step: int
    fragment: int
    responded: list[int]
    expected: list[int]
    gnorm: float


class Happening(TypedDict):
    """Something to be told and marked."""

    t_s: float
    outer_step: int
    what: str
    """"join", "loss" or "note"."""
    learner: int | None
    text: str


class LearnerView:
    """One learner id over all the processes that had it."""

    def __init__(self, learner: int):
        self.learner = learner
        self.state = STARTING
        self.step = 0
        self.tokens = 0
        self.tokens_before_loss = 0
        """Tokens of processes that were lost, as far as they had told."""
        self.wire = (0, 0)
        """Bytes (sent, received) of the process that is there now."""
        self.wire_before_loss = (0, 0)
        self.loss: float | None = None
        self.held_out: float | None = None
        self.tokens_per_s: float | None = None
        self.before: float | None = None
        """Held-out bits per byte of the fresh model."""
        self.end: dict[str, Any] | None = None
        """The last record of a learner that ended properly."""
        self.starts = 0
        self._last_progress: tuple[float, int] | None = None

    def started(self) -> None:
        self.starts += 1
        self.state = RETURNING if self.starts > 1 else STARTING
        self._last_progress = None

    def lost(self) -> None:
        self.state = KILLED
        self.tokens_before_loss, self.tokens = self.tokens_total, 0
        self.wire_before_loss, self.wire = self.wire_total, (0, 0)
        self.tokens_per_s = None

    @property
    def tokens_total(self) -> int:
        return self.tokens_before_loss + self.tokens

    @property
    def wire_total(self) -> tuple[int, int]:
        """Bytes (sent, received) of all its processes, as far as a lost one had told."""
        before, now = self.wire_before_loss, self.wire
        return before[0] + now[0], before[1] + now[1]

    def record(self, record: dict[str, Any]) -> None:
        """One record of report.py."""
        event = record["event"]
        if event == "start":
            self.before = record["bits_per_byte"] if self.before is None else self.before
        elif event == "progress":
            self.state = TRAINING
            self._rate(record["tokens"], record["seconds"])
            self.step, self.tokens, self.loss = record["step"], record["tokens"], record["loss"]
            self.wire = record["bytes_sent"], record["bytes_received"]
            if record["held_out"] is not None:
                self.held_out = record["held_out"]
        elif event == "end":
            self.state = DONE
            self.step, self.tokens, self.end = record["step"], record["tokens"], record
            self.wire = record["bytes_sent"], record["bytes_received"]

    def _rate(self, tokens: int, seconds: float) -> None:
        """By the learner's own clock: several records may be read at one moment."""
        since_s, since_tokens = self._last_progress or (0.0, 0)
        if seconds > since_s:
            rate = (tokens - since_tokens) / (seconds - since_s)
            old = self.tokens_per_s
            self.tokens_per_s = rate if old is None else 0.5 * old + 0.5 * rate
        self._last_progress = seconds, tokens


class TrainingClock:
    """When training began and ended; each happens once."""

    def __init__(self) -> None:
        self._begun_s = time.monotonic()
        self.start_s: float | None = None
        self.end_s: float | None = None

    def start(self) -> None:
        if self.start_s is None:
            self.start_s = time.monotonic()

    def end(self) -> None:
        if self.end_s is None:
            self.end_s = time.monotonic()

    def now_s(self) -> float:
        """Seconds since the start; before it, since this was made."""
        return time.monotonic() - (self._begun_s if self.start_s is None else self.start_s)

    @property
    def training_s(self) -> float:
        """Seconds from the start to the end, or until now."""
        if self.start_s is None:
            return 0.0
        return (time.monotonic() if self.end_s is None else self.end_s) - self.start_s


class RunWatch:
    """The whole run. Times are seconds since `start` of training (negative before it)."""

    def __init__(self, learners: int, total_steps: int):
        self.learners = [LearnerView(learner) for learner in range(learners)]
        self.total_steps = total_steps
        self.port: int | None = None
        self.outer_step = 0
        self.baseline: LearnerView | None = None
        """One learner alone, once it is being trained."""
        self.baseline_curve: list[BaselinePoint] = []
        self.totals: dict[str, Any] | None = None
        """The server's own closing line."""
        self.finalized: set[int] = set()
        """Learners that confirmed the final cut."""
        self.complaints: list[str] = []
        """Errors the server logged."""
        self.curve: list[CurvePoint] = []
        self.merges: list[MergePoint] = []
        self.happenings: list[Happening] = []
        self._initialized = False
        self._clock = TrainingClock()

    # ------------------------------------------------------------------------------------- time
    @property
    def training(self) -> bool:
        return self._clock.start_s is not None

    def now_s(self) -> float:
        """Seconds since training began; before it, seconds since the children were started."""
        return self._clock.now_s()

    def _begin_if_ready(self) -> None:
        """Training begins when the server has parameters and all learners have joined once."""
        joined = {each["learner"] for each in self.happenings if each["what"] == "join"}
        if self._initialized and len(joined) == len(self.learners):
            self._clock.start()

    def end_training(self) -> None:
        self._clock.end()

    @property
    def training_s(self) -> float:
        """Seconds from the first broadcast to the last merge, or until now."""
        return self._clock.training_s

    # ------------------------------------------------------------------------------- what comes
    def happened(self, what: str, text: str, learner: int | None = None) -> None:
        """Something to be told and marked: "join", "loss", "note"."""
        self.happenings.append({"t_s": round(self.now_s(), 3) if self.training else 0.0,
                                "outer_step": self.outer_step, "what": what, "learner": learner,
                                "text": text})

    def learner_line(self, learner: int, text: str) -> None:
        """A line on a learner's standard output."""
        record = parse(text)
        if record is None:
            return
        view = self.learners[learner]
        now_s = self.now_s() if self.training else 0.0
        if record["event"] in ("start", "progress"):
            progress = record["event"] == "progress"
            self.curve.append({
                "t_s": round(now_s, 3), "learner": learner, "process": view.starts,
                "step": record["step"] if progress else view.step,
                "loss": record["loss"] if progress else None,
                "held_out": record["held_out" if progress else "bits_per_byte"]})
        view.record(record)

    def baseline_line(self, text: str) -> None:
        """A line on the standard output of the learner that trains alone."""
        record = parse(text)
        if record is not None and self.baseline is not None:
            self.baseline.record(record)
            if record["event"] == "progress":
                self.baseline_curve.append({"step": record["step"], "loss": record["loss"],
                                            "held_out": record["held_out"]})

    def server_line(self, text: str) -> None:
        """A line of the server's JSON log."""
        record = parse(text)
        if record is None:
            self.complaints.append(text)
            return
        message = record.get("message", "")
        if record.get("level") == "error":
            self.complaints.append(message)
        if message == "syncer listening":
            self.port = record["port"]
        elif message == "global parameters initialized":
            self._initialized = True
            self._begin_if_ready()
        elif message == "learner finalized":
            self.finalized.add(record["learner"])
        elif message == "server totals":
            self.totals = record
        elif message == "learner connected":
            returning = self.learners[record["learner"]].starts > 1
            verb = "is back" if returning else "joined"
            self.happened("join", f"learner {record['learner']} {verb}", record["learner"])
            self._begin_if_ready()

    def tape_record(self, record: dict[str, Any]) -> None:
        """A record of the event tape."""
        if "event" in record:
            return
        self.outer_step = record["step"]
        self.merges.append({
            "t_s": round(self.now_s(), 3), "step": record["step"], "fragment": record["fragment"],
            "responded": record["responded"], "expected": record["expected"],
            "gnorm": record["gnorm"]})
        if self.outer_step >= self.total_steps:
            self.end_training()

    # ------------------------------------------------------------------------------ what follows
    def merges_without(self, learner: int) -> list[int]:
        """Outer steps that were taken without a delta of this learner."""
        return [m["step"] for m in self.merges if learner not in m["responded"]]

    def first_merge_with(self, learner: int, after: int) -> int | None:
        """The first outer step after `after` that holds a delta of this learner."""
        return next((m["step"] for m in self.merges
                     if m["step"] > after and learner in m["responded"]), None)


class TapeReader:
    """Follows the event tape by byte offset; records come whole, one per line."""

    def __init__(self, path: Path):
        self.path = path
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """The records written since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole, _, _ = data.rpartition(b"\n")
        if not whole:
            return []
        self._offset += len(whole) + 1
        return [json.loads(line) for line in whole.split(b"\n")]


def parse(text: str) -> dict[str, Any] | None:
    """A JSON object, or None for a line that is none."""
    try:
        record = json.loads(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
