"""The standard streams of a process as its user left them: closed, full, or nobody reads them.

Must not know what is said. Commands say their one sentence here; the log is server/log.py.

A pipe that nobody reads (a pager, a stopped terminal) takes 64 KiB and then blocks whoever writes.
What has more to do than to write therefore fills a `Backlog`, and a `WriterThread` empties it.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

CLOSE_MOST_S = 10.0
"""At its end a process waits so long for what is written slowly."""


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


def one_line(text: str) -> str:
    """`text` with every character that could end the line or steer a terminal made visible."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def complain(text: str) -> None:
    """One sentence on standard error, on one line whatever is in it; lost if nobody takes it."""
    try:
        print(f"syncer: {one_line(text)}", file=sys.stderr, flush=True)
    except OSError:  # what it left in the buffer would fail again at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _writer(number: int) -> TextIO:
    return open(number, "w", encoding="utf-8", errors="backslashreplace", closefd=False)


class Backlog:
    """Pieces that wait to be written, in order, `bytes_max` at most; not locked, its owner is.

    What finds no place or cannot be written is counted, and `gap(count)` is written in its stead as
    soon as something can be written again.
    """

    def __init__(self, bytes_max: int, gap: Callable[[int], bytes]):
        self.bytes_max, self.gap = bytes_max, gap
        self.pieces: deque[bytes | int] = deque()
        """A number stands where so many pieces are missing."""
        self.bytes = 0
        self.lost = 0
        """Pieces that nothing has been written for."""
        self.in_hand = 0
        """Pieces that what was taken stands for."""
        self.failing = False

    def put(self, piece: bytes) -> bool:
        """Behind the others; False if it is lost."""
        if self.bytes and self.bytes + len(piece) > self.bytes_max:
            self.lost += 1
            return False
        if self.lost:
            self.pieces.append(self.lost)
            self.lost = 0
        self.pieces.append(piece)
        self.bytes += len(piece)
        return True

    def take(self) -> bytes | None:
        """What is to be written next, None if nothing is; answer with `done`."""
        if self.pieces:
            piece = self.pieces.popleft()
        elif self.lost and not self.failing:
            piece, self.lost = self.lost, 0
        else:
            return None
        if isinstance(piece, int):
            self.in_hand = piece
            return self.gap(piece)
        self.in_hand = 1
        self.bytes -= len(piece)
        return piece

    def done(self, written: bool) -> None:
        """What was taken has been written, or is lost."""
        self.failing = not written
        if not written:
            self.lost += self.in_hand
        self.in_hand = 0

    @property
    def left(self) -> int:
        """Pieces that were not written, or of whose loss nobody was told."""
        waiting = sum(piece if isinstance(piece, int) else 1 for piece in self.pieces)
        return waiting + self.lost + self.in_hand


class WriterThread:
    """Empties a backlog on a thread of its own: who puts never waits for who reads.

    write(piece): raises OSError for one that is lost. RuntimeError: there is no thread to be had.
    """

    def __init__(self, name: str, backlog: Backlog, write: Callable[[bytes], None]):
        self.backlog, self.write = backlog, write
        lock = threading.Lock()
        self.given, self.moved = threading.Condition(lock), threading.Condition(lock)
        self.closing = self.over = False
        self.moves = 0
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.thread.start()

    def put(self, piece: bytes) -> bool:
        """From any thread; False if it is lost."""
        with self.given:
            if self.closing:
                return False
            fits = self.backlog.put(piece)
            self.given.notify()
            return fits

    def close(self, stuck_s: float) -> int:
        """Wait until everything is written, or nothing was for so long; returns how much is left.
        Nobody waits a second time."""
        last_s = time.monotonic() + CLOSE_MOST_S
        with self.moved:
            waits, self.closing = not self.closing, True
            self.given.notify()
            while waits and not self.over:
                before, patience_s = self.moves, min(stuck_s, last_s - time.monotonic())
                if patience_s > 0:
                    self.moved.wait(patience_s)
                waits = self.moves > before
            return self.backlog.left

    def _work(self) -> None:
        while (piece := self._next()) is not None:
            written = True
            try:
                self.write(piece)
            except Exception:  # whatever it is: those behind it are still owed
                written = False
            with self.moved:
                self.backlog.done(written)
                self.moves += 1
                self.moved.notify()
        with self.moved:
            self.over = True
            self.moved.notify()

    def _next(self) -> bytes | None:
        with self.given:
            while (piece := self.backlog.take()) is None and not self.closing:
                self.given.wait()
            return piece


class LineWriter:
    """Writes whole lines to a descriptor, which may be one that does not block."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        self.torn = False

    def __call__(self, line: bytes) -> None:
        """Raises OSError; the next line then begins on a line of its own."""
        rest = b"\n" + line if self.torn else line
        whole = len(rest)
        while rest:
            try:
                rest = rest[os.write(self.descriptor, rest) :]
            except BlockingIOError:
                room = select.poll()
                room.register(self.descriptor, select.POLLOUT)
                room.poll()
            except OSError:
                self.torn = self.torn or len(rest) < whole
                raise
        self.torn = False
