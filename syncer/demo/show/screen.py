"""Live progress: a table that redraws itself on a terminal with rich, plain lines otherwise.

Reads a `RunWatch`; must not change it, and must not fill more than 80 columns.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Protocol

from syncer.demo.show.text import COLUMNS_MAX, bits, rate
from syncer.demo.show.watch import LearnerView, RunWatch

if TYPE_CHECKING:
    from rich.table import Table

PLAIN_INTERVAL_S = 2.0
REDRAW_INTERVAL_S = 0.1
BAR_WIDTH = 30


class Screen(Protocol):
    """Where a run is seen while it goes on."""

    def show(self, watch: RunWatch) -> None:
        """Shows what is new, if it is time."""

    def close(self) -> None:
        """Leaves the terminal as it was."""


class PlainScreen:
    """One line every two seconds, and one for everything that happens."""

    def __init__(self) -> None:
        self._next_s = 0.0
        self._told = 0

    def show(self, watch: RunWatch) -> None:
        """Writes what is new, if it is time."""
        for happening in watch.happenings[self._told:]:
            self.say(f"{watch.now_s() if watch.training else 0.0:6.1f} s  {happening['text']}")
        self._told = len(watch.happenings)
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        if watch.baseline is not None:
            self._next_s = now_s + PLAIN_INTERVAL_S
            self.say(baseline_line(watch.baseline))
        elif watch.training and any(v.loss for v in watch.learners):
            self._next_s = now_s + PLAIN_INTERVAL_S
            self.say(progress_line(watch))

    def say(self, text: str) -> None:
        """One line of its own."""
        print(text, flush=True)

    def close(self) -> None:
        """Nothing stays behind."""


class RichScreen:
    """A table of learners under a bar of outer steps, redrawn in place."""

    def __init__(self) -> None:
        from rich.console import Console  # noqa: PLC0415  optional at run time
        from rich.live import Live  # noqa: PLC0415

        self._console = Console(highlight=False, soft_wrap=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()
        self._next_s = 0.0
        self._told = 0

    def show(self, watch: RunWatch) -> None:
        """Draws the table again, below the lines of what has happened."""
        for happening in watch.happenings[self._told:]:
            self.say(f"{happening['t_s']:6.1f} s  {happening['text']}")
        self._told = len(watch.happenings)
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + REDRAW_INTERVAL_S
            self._live.update(self._table(watch), refresh=True)

    def say(self, text: str) -> None:
        """One line above the table."""
        self._console.print(text, markup=False)

    def close(self) -> None:
        """Takes the table away and gives the terminal back."""
        self._live.stop()

    def _table(self, watch: RunWatch) -> Table:
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        table = Table(title=Text(headline(watch)), title_justify="left", title_style="bold",
                      width=min(COLUMNS_MAX, self._console.width), box=None, padding=(0, 1))
        table.add_column("learner")
        table.add_column("state", min_width=len("returning"))
        for name in ("own steps", "training loss", "held out", "tokens/s"):
            table.add_column(name, justify="right", no_wrap=True)
        alone = [] if watch.baseline is None else [watch.baseline]
        for view in watch.learners + alone:
            style = {"killed": "red", "failed": "red", "returning": "yellow",
                     "starting": "dim"}.get(view.state)
            name = "alone" if view is watch.baseline else str(view.learner)
            table.add_row(name, view.state, f"{view.step:,}", bits(view.loss),
                          bits(view.held_out), rate(view.tokens_per_s), style=style)
        return table


def open_screen() -> Screen:
    """The table when standard output is a terminal and rich is installed, else plain lines."""
    if sys.stdout.isatty():
        try:
            return RichScreen()
        except ImportError:
            pass
    return PlainScreen()


def headline(watch: RunWatch) -> str:
    """The bar of outer steps with the time."""
    if not watch.training:
        return "starting the server and the learners ..."
    done = BAR_WIDTH * watch.outer_step // watch.total_steps
    bar = "#" * done + "." * (BAR_WIDTH - done)
    return f"outer step {watch.outer_step}/{watch.total_steps} [{bar}] {watch.training_s:.0f} s"


def progress_line(watch: RunWatch) -> str:
    """The state of a run in one line of at most 80 columns."""
    training = [v for v in watch.learners if v.state == "training"]
    losses = [v.loss for v in training if v.loss is not None]
    held_out = [v.held_out for v in training if v.held_out is not None]
    total = sum(v.tokens_per_s or 0.0 for v in training)
    parts = [f"{watch.training_s:6.1f} s  outer step {watch.outer_step}/{watch.total_steps}"]
    if len(training) < len(watch.learners):
        parts.append(f"{len(training)} of {len(watch.learners)} training")
    if losses:
        parts.append(f"loss {sum(losses) / len(losses):.3f}")
    if held_out:
        parts.append(f"held out {sum(held_out) / len(held_out):.3f}")
    if total:
        parts.append(f"{total:,.0f} tokens/s")
    line = parts[0]
    for part in parts[1:]:
        if len(line) + 2 + len(part) <= COLUMNS_MAX:
            line += "  " + part
    return line


def baseline_line(view: LearnerView) -> str:
    """The state of the learner that trains alone."""
    return (f"one learner alone: own step {view.step:,}, loss {bits(view.loss)}, held out "
            f"{bits(view.held_out)}")
