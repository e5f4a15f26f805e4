"""Progress lines on standard error, written by a thread of their own.

Whoever says something never waits for whoever reads it: a pipe that is full and that nobody empties
must not hold a supervisor between two connections, a `close`, or the end of the process. Lines that
find no place are counted, and the count is said. Must not know what is said.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading

from syncer.streams import Backlog, LineWriter, WriterThread, one_line
from syncer.tcp import Link

PROGRESS_PREFIX = "[yeto-syncer-client] "
LINES_BYTES_MAX = 64 * 1024
"""Lines that wait to be written."""
WORTH_A_RATE = 1_000_000
"""Bytes sent from which on the rate of a connection says something."""
LINES_STUCK_S = 1.0
"""How long the end of the process waits for a standard error that takes nothing."""


def line_of(text: str) -> bytes:
    return f"{PROGRESS_PREFIX}{one_line(text)}\n".encode()


def of_link(link: Link, count: int, address: str) -> str:
    """Of a connection that has ended, after `count` bytes were sent on it; '' for too few."""
    return "" if count < WORTH_A_RATE else (
        f"{link.local} sent {count / 1e6:.1f} MB to {address}, last seen at {link.mb_per_s:g} MB/s")


class ProgressLines:
    """The lines of this process; the thread is made with the first of them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.backlog = Backlog(LINES_BYTES_MAX,
                               lambda count: line_of(f"{count} lines lost: nobody read them"))
        self.thread: WriterThread | None = None
        self.writers: dict[int, LineWriter] = {}
        """Of each descriptor that was standard error."""

    def say(self, text: str) -> None:
        """One line. Never raises, and never waits."""
        piece = line_of(text)
        with self.lock:
            if self.thread is None:
                try:
                    self.thread = WriterThread("syncer-progress", self.backlog, self.write)
                except RuntimeError:  # no thread to be had: the next line may have one
                    self.backlog.put(piece)
                    return
        self.thread.put(piece)

    def write(self, piece: bytes) -> None:
        """On the thread. Not through a buffer of Python where there is a descriptor: who waits in
        one holds its lock, which the end of the process needs."""
        stream = sys.stderr
        if stream is None:
            return
        try:
            number = stream.fileno()
        except (OSError, AttributeError):  # something that stands in for it, as in a notebook
            stream.write(piece.decode())
            stream.flush()
        else:
            self.writers.setdefault(number, LineWriter(number))(piece)

    def close(self) -> None:
        """Write what waits, if somebody takes it."""
        with self.lock:
            thread = self.thread
        if thread is not None:
            thread.close(LINES_STUCK_S)


_lines = ProgressLines()


def _end() -> None:
    _lines.close()


def say(text: str) -> None:
    """A progress line of this process."""
    _lines.say(text)


def _begin_anew() -> None:
    """In a forked child, which has none of its parent's threads."""
    global _lines  # noqa: PLW0603 (the process is another one)
    _lines = ProgressLines()


os.register_at_fork(after_in_child=_begin_anew)
atexit.register(_end)
