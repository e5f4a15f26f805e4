"""The standard streams of a process as its user left them: closed, full, or nobody reads them.

Must not know what is said. Commands say their one sentence here; the log is server/log.py.
"""

from __future__ import annotations

import os
import sys
from typing import TextIO


def open_closed_streams() -> None:
    """Opens whatever standard stream is closed, to nowhere.

    A file or socket must not get its number: libraries write to it without asking.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
    if sys.stderr is None:
        sys.stderr = _writer(2)
    if sys.stdout is None:
        sys.stdout = _writer(1)


def complain(text: str) -> None:
    """One sentence on standard error, on one line whatever is in it; lost if nobody takes it."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    try:
        print(f"syncer: {line}", file=sys.stderr, flush=True)
    except OSError:  # what it left in the buffer would fail again at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _writer(number: int) -> TextIO:
    return open(number, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
