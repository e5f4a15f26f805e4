"""The log: one line per happening, as text or JSON.

It must not colour lines when nobody looks at them, never writes two lines for one happening
whatever a peer put into a value, and never ends the process, or makes it wait, because the log
cannot be written.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Protocol

from syncer.server import shortened
from syncer.server.loop import Loop
from syncer.server.restraint import Restraint
from syncer.streams import Backlog, one_line

LOG_BYTES_MAX = 1 << 20
"""Lines that wait to be written; what comes then is counted, and the count is said."""
LOG_STUCK_S = 1.0
"""How long an end waits for a log that takes nothing."""
LEVELS = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40}
SHORT = {"DEBUG": "DEBUG", "INFO": "INFO ", "WARNING": "WARN ", "ERROR": "ERROR"}
COLOURS = {"DEBUG": "\x1b[2m", "INFO": "\x1b[32m", "WARNING": "\x1b[33m", "ERROR": "\x1b[31m"}
PLAIN = "\x1b[0m"


class Writer(Protocol):
    """The port: something that writes what is put, in order, while whoever put it goes on.

    `put` says False for what is lost; `close` waits for the rest until nothing was written for
    `stuck_s`, and says how much of it is left.
    """

    def put(self, piece: bytes) -> bool: ...

    def close(self, stuck_s: float) -> int: ...


MakeWriter = Callable[[str, Backlog, Callable[[bytes], None]], Writer]
"""(name, what waits, the writing itself, which raises OSError)."""


class Lines:
    """Where a log's lines go, each a whole one. From every thread; never raises and never waits."""

    def __init__(self, terminal: bool, write: Callable[[bytes], None], make_aside: MakeWriter):
        self.terminal = terminal
        self.gap: Callable[[int], bytes] = lambda count: b""
        """The line that stands where so many were lost."""
        self.aside = make_aside("syncer-log", Backlog(LOG_BYTES_MAX, self._gap), write)

    def __call__(self, line: bytes) -> None:
        self.aside.put(line)

    def _gap(self, count: int) -> bytes:
        return self.gap(count)

    def close(self) -> None:
        """Write what waits, if somebody takes it."""
        self.aside.close(LOG_STUCK_S)


def utc_now() -> datetime:
    return datetime.now(UTC)


class Log:
    """Writes lines of at least `level` ("debug" … "error") in `form` ("text" or "json").

    Usable from every thread. `now` is asked for the time of each line.
    """

    def __init__(self, level: str, form: str, lines: Lines,
                 now: Callable[[], datetime] = utc_now):
        level = level.upper()
        self.threshold = LEVELS["WARNING" if level == "WARN" else level]
        self.json = form == "json"
        self.lines = lines
        self.now = now
        self.colour = not self.json and lines.terminal
        lines.gap = self.gap
        self.restraint: Restraint | None = None
        """Who holds back lines that are too many; nobody in a log of debug level."""

    def restrain(self, loop: Loop | None) -> None:
        """From here on lines of one text are few, by the clock of `loop`; None: not any more."""
        if self.restraint is not None:
            self.restraint.close()
            self.restraint = None
        if loop is not None and self.threshold > LEVELS["DEBUG"]:
            self.restraint = Restraint(loop, self._write)

    def write(self, level: str, text: str, fields: dict[str, Any]) -> None:
        """One line: `text`, then the fields. `level` is a name of the logging module."""
        if LEVELS[level] < self.threshold:
            return
        text = shortened.in_text(text)
        if self.restraint is None or self.restraint.admits(level, text, fields):
            self._write(level, text, fields)

    def _write(self, level: str, text: str, fields: dict[str, Any]) -> None:
        self.lines(self._line(level, text, shortened.in_fields(fields)))

    def gap(self, count: int) -> bytes:
        """The line that stands where so many lines are missing, whatever the level."""
        return self.warn("log lines lost", {"lines": count})

    def warn(self, text: str, fields: dict[str, Any]) -> bytes:
        """A warning as a line that somebody else writes."""
        return self._line("WARNING", text, fields)

    def close(self) -> None:
        """Write what waits to be written, if somebody takes it."""
        self.lines.close()

    def debug(self, text: str, **fields: Any) -> None:
        self.write("DEBUG", text, fields)

    def info(self, text: str, **fields: Any) -> None:
        self.write("INFO", text, fields)

    def warning(self, text: str, **fields: Any) -> None:
        self.write("WARNING", text, fields)

    def error(self, text: str, **fields: Any) -> None:
        self.write("ERROR", text, fields)

    def _line(self, level: str, text: str, fields: dict[str, Any]) -> bytes:
        line = self._json(level, text, fields) if self.json else self._text(level, text, fields)
        return line.encode("utf-8", "backslashreplace") + b"\n"

    def _time(self) -> str:
        return self.now().isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def _json(self, level: str, text: str, fields: dict[str, Any]) -> str:
        # The fixed keys win: a field of the same name must not hide when or what happened.
        record = {**fields, "time": self._time(), "level": level.lower(), "message": text}
        first = {key: record.pop(key) for key in ("time", "level", "message")}
        return json.dumps({**first, **record}, ensure_ascii=False, default=str)

    def _text(self, level: str, text: str, fields: dict[str, Any]) -> str:
        head = SHORT[level]
        if self.colour:
            head = f"{COLOURS[level]}{head}{PLAIN}"
        parts = [f"{self._time()} {head} {one_line(text)}"]
        parts += [f"{name}={_value(value)}" for name, value in fields.items()]
        return " ".join(parts)


def _value(value: Any) -> str:
    if isinstance(value, str):
        if value and value.isprintable() and not set(' "=') & set(value):
            return value
        return one_line(json.dumps(value, ensure_ascii=False))
    if isinstance(value, float):
        return f"{value:.6g}"
    return one_line(str(value))
