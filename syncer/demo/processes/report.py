"""What a learner process tells: records as JSON lines for a parent, or readable lines for people.

Must not compute anything: it only writes what it is given.

Records, one JSON object per line, "event" first:
  start     learner, pid, shard, shards, shard_bytes, parameters, bits_per_byte
  connected learner
  progress  learner, seconds (of training so far), step, tokens, loss, held_out (null between two
            looks), outer_step, connected, bytes_sent, bytes_received
  end       learner, how ("final cut", "alone" or "stopped"), step, tokens, seconds, own (held-out
            bits per byte of its own parameters at the end), merged (of the newest merged
            parameters it holds, or null), versions, sha256 (of them), bytes_sent, bytes_received,
            peak_rss_bytes
"""

from __future__ import annotations

import json
from typing import Any, Protocol

from syncer.demo import settings


class Report(Protocol):
    """Where a learner tells what it does."""

    interval_s: float
    """Seconds between two progress records."""

    def write(self, event: str, **values: Any) -> None:
        """One record: `event`, and the values that belong to it."""


class JsonReport:
    """One JSON object per record on standard output; the parent reads it as it comes."""

    interval_s = settings.REPORT_INTERVAL_S

    def write(self, event: str, **values: Any) -> None:
        print(json.dumps({"event": event, **values}), flush=True)


class ReadableReport:
    """One line per record on standard output."""

    interval_s = settings.REPORT_INTERVAL_READABLE_S

    def __init__(self) -> None:
        self._bits = float("nan")

    def write(self, event: str, **values: Any) -> None:
        line = getattr(self, f"_{event}")(values)
        print(f"learner {values['learner']}: {line}", flush=True)

    def _start(self, v: dict[str, Any]) -> str:
        self._bits = v["bits_per_byte"]
        return (f"{v['parameters']:,} parameters, {v['shard_bytes']:,} bytes of text (shard "
                f"{v['shard']} of {v['shards']}), {self._bits:.3f} bits per held-out byte")

    def _connected(self, v: dict[str, Any]) -> str:
        return f"connected to {v['server']}"

    def _progress(self, v: dict[str, Any]) -> str:
        held_out = "" if v["held_out"] is None else f", held-out {v['held_out']:.3f}"
        where = "alone" if v["outer_step"] is None else f"outer step {v['outer_step']}"
        cut_off = "" if v["connected"] else ", not connected"
        return (f"step {v['step']:,} ({where}{cut_off}), training loss {v['loss']:.3f}{held_out} "
                "bits per byte")

    def _end(self, v: dict[str, Any]) -> str:
        merged = "" if v["merged"] is None else f", merged model {v['merged']:.3f}"
        return (f"{v['how']} after {v['step']:,} own steps in {v['seconds']:.1f} s: held-out bits "
                f"per byte {self._bits:.3f} -> {v['own']:.3f}{merged}")


def open_report(form: str) -> Report:
    """"json" for a parent process, anything else for people."""
    return JsonReport() if form == "json" else ReadableReport()
