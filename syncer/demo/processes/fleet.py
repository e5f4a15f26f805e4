"""The processes of a demo run: started, listened to, ended; none of them may be left behind.

Knows nothing of training: it turns child processes into (child, stream, line) and exits.

Every child starts through tether.py, so the kernel kills it when this process dies, and in a
session of its own, so a Ctrl-C at the terminal reaches this process alone, which then ends them in
order. Must be used from the main thread: the kernel's promise is tied to the thread that forks.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import IO, NamedTuple

import syncer
from syncer.demo import settings

TETHER = "syncer.demo.processes.tether"
STDERR_LINES_KEPT = 20
END_TIMEOUT_S = 5.0
"""How long a child that was asked to end may take before it is killed."""
READ_BYTES = 1 << 16


def same_package() -> dict[str, str]:
    """Environment with which a child imports the package that this process has imported.

    The current folder is not on its path, since it may hold another one: a clone beside which the
    package was installed has a syncer/ that is not compiled. Where this process itself has the
    package from the folder that it was started in, the child is told that folder.
    """
    found = {"PYTHONSAFEPATH": "1"}
    root = str(Path(syncer.__file__).resolve().parent.parent)
    if not sys.flags.safe_path and os.path.realpath(sys.path[0] or os.curdir) == root:
        more = os.environ.get("PYTHONPATH")
        found["PYTHONPATH"] = f"{root}{os.pathsep}{more}" if more else root
    return found


class Line(NamedTuple):
    """One line that a child wrote."""

    child: Child
    stream: str
    """"stdout" or "stderr"."""
    text: str


class Exited(NamedTuple):
    """A child has ended and everything it wrote has been handed out."""

    child: Child
    status: int
    """Exit status; -n after signal n."""


class Child:
    """One child process. `role` is "server" or "learner"."""

    def __init__(self, role: str, learner: int | None, process: subprocess.Popen[bytes]):
        self.role, self.learner, self.process = role, learner, process
        self.status: int | None = None
        self.complaints: deque[str] = deque(maxlen=STDERR_LINES_KEPT)
        """The last lines on standard error."""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.status is None

    def send(self, number: int) -> None:
        """A signal, if the process is still there."""
        if self.alive:
            self.process.send_signal(number)


class _Pipe:
    """The read end of a child's stream, cut into lines."""

    def __init__(self, child: Child, stream: str, end: IO[bytes]):
        self.child, self.stream, self.end = child, stream, end
        self.rest = b""

    def cut(self, data: bytes) -> list[Line]:
        *whole, self.rest = (self.rest + data).split(b"\n")
        return [Line(self.child, self.stream, line.decode("utf-8", "replace")) for line in whole]


class Fleet:
    """All children of a run. A context manager: leaving it, in any way, ends every one of them."""

    def __init__(self) -> None:
        self.children: list[Child] = []
        self._selector = selectors.DefaultSelector()
        self._open: dict[Child, int] = {}

    def start(self, role: str, module: str, arguments: list[str],
              learner: int | None = None) -> Child:
        """Starts `python -m module arguments` as a child with one linear algebra thread."""
        environment = {**os.environ, **same_package(), "PYTHONUNBUFFERED": "1",
                       **dict.fromkeys(settings.ONE_THREAD, "1")}
        if role == "server":  # its merge threads are a setting of its own
            environment.pop("OMP_NUM_THREADS")
        process = subprocess.Popen(
            [sys.executable, "-m", TETHER, str(os.getpid()), module, *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=environment, start_new_session=True)
        child = Child(role, learner, process)
        self.children.append(child)
        self._open[child] = 2
        for stream, end in (("stdout", process.stdout), ("stderr", process.stderr)):
            assert end is not None  # PIPE was asked for
            os.set_blocking(end.fileno(), False)
            self._selector.register(end, selectors.EVENT_READ, _Pipe(child, stream, end))
        return child

    def poll(self, timeout_s: float) -> list[Line | Exited]:
        """What the children wrote, and who ended, waiting for the first at most `timeout_s`."""
        happened: list[Line | Exited] = []
        for key, _ in self._selector.select(timeout_s if self._open else 0):
            happened += self._read(key.data)
        for child in self.children:
            if child.alive and not self._open.get(child) and child.process.poll() is not None:
                child.status = child.process.returncode
                happened.append(Exited(child, child.status))
        for each in happened:
            if isinstance(each, Line) and each.stream == "stderr":
                each.child.complaints.append(each.text)
        if not self._open and not happened:
            time.sleep(min(timeout_s, 0.01))
        return happened

    def _read(self, pipe: _Pipe) -> list[Line]:
        try:
            data = os.read(pipe.end.fileno(), READ_BYTES)
        except BlockingIOError:
            return []
        if data:
            return pipe.cut(data)
        self._selector.unregister(pipe.end)
        pipe.end.close()
        self._open[pipe.child] -= 1
        if not self._open[pipe.child]:
            del self._open[pipe.child]
        return pipe.cut(b"\n") if pipe.rest else []

    def end(self) -> None:
        """Ends every child: SIGTERM, a few seconds, SIGKILL. All are gone when this returns."""
        for child in self.children:
            child.send(signal.SIGTERM)
        deadline = time.monotonic() + END_TIMEOUT_S
        while any(child.alive for child in self.children) and time.monotonic() < deadline:
            self.poll(0.05)
        for child in self.children:
            child.send(signal.SIGKILL)
        for child in self.children:
            child.process.wait()
            child.status = child.process.returncode

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.end()
        finally:  # a second Ctrl-C in the middle of it
            for child in self.children:
                if child.process.poll() is None:
                    child.process.kill()
                for end in (child.process.stdout, child.process.stderr):
                    if end is not None:
                        end.close()
            self._selector.close()
