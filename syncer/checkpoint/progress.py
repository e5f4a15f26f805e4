"""A progress bar on a terminal's standard error; silent everywhere else and for short work.

Our own, because the package needs nothing but NumPy. Must not know what the work is.
"""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

WIDTH = 30
SILENT_S = 0.5
"""Work that is done sooner shows nothing."""
EVERY_S = 0.1


class Progress:
    """`bar(done, total)` in bytes, as often as one likes; `with` clears the line at the end."""

    def __init__(self, text: str, stream: TextIO | None = None, wanted: bool = True):
        self.text = text
        self.stream = stream or sys.stderr
        self.wanted = wanted and self.stream.isatty()
        self.begun = time.monotonic()
        self.shown = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if not self.wanted or now - self.begun < SILENT_S or now - self.shown < EVERY_S:
            return
        self.shown = now
        share = done / total if total else 1.0
        rate = done / (now - self.begun)
        left_s = (total - done) / rate if rate else 0.0
        bar = "█" * int(share * WIDTH)
        self.stream.write(f"\r\x1b[K{self.text} {bar:<{WIDTH}} {share:4.0%} {size(rate)}/s "
                          f"{left_s:.0f} s left")
        self.stream.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        if self.shown:
            self.stream.write("\r\x1b[K")
            self.stream.flush()


def size(count: float) -> str:
    """Bytes for people: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
