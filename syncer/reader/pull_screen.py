"""What a person sees of a pull: lines on standard error, and on a terminal with rich a bar.

A pipe gets lines and nothing else. Must not know the protocol.
"""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol

from syncer.checkpoint.progress import size

EVERY_LINE_S = 5.0
"""Between two lines of one cut."""


class PullScreen(Protocol):
    """Where a pull is seen."""

    def say(self, text: str) -> None:
        """One line."""

    def progress(self, done: int, total: int) -> None:
        """So many bytes of a cut are there."""

    def close(self) -> None:
        """The terminal is as it was."""


class LineScreen:
    """Lines; of a cut that takes long, one every few seconds."""

    def __init__(self) -> None:
        self._next = time.monotonic() + EVERY_LINE_S

    def say(self, text: str) -> None:
        print(f"syncer pull: {text}", file=sys.stderr, flush=True)

    def progress(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done in (0, total):
            self._next = now + EVERY_LINE_S  # short ones are told by their end alone
        elif now >= self._next:
            self._next = now + EVERY_LINE_S
            self.say(f"{size(done)} of {size(total)}, {done / total:.0%}")

    def close(self) -> None:
        pass


class BarScreen:
    """A bar by rich on a terminal; gone when a cut is there."""

    def __init__(self) -> None:
        from rich.console import Console  # noqa: PLC0415  optional at run time
        from rich.progress import (  # noqa: PLC0415
            BarColumn,
            DownloadColumn,
            Progress,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._bar = Progress(BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
                             TimeRemainingColumn(), console=Console(stderr=True), transient=True)
        self._task: Any = None

    def say(self, text: str) -> None:
        self._bar.console.print(f"syncer pull: {text}", highlight=False, markup=False)

    def progress(self, done: int, total: int) -> None:
        if self._task is None or done == 0:
            self._clear()
            self._bar.start()
            self._task = self._bar.add_task("", total=total)
        self._bar.update(self._task, completed=done)
        if done == total:
            self._clear()

    def _clear(self) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._bar.stop()
            self._task = None

    def close(self) -> None:
        self._clear()


def pull_screen(quiet: bool) -> PullScreen:
    """The bar where there is a terminal and rich, else lines; `quiet`: none of a cut's bytes."""
    if not quiet and sys.stderr is not None and sys.stderr.isatty():
        try:
            return BarScreen()
        except ImportError:
            pass
    return LineScreen()
