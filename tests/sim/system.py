"""The world of one simulated server: every port of `syncer.server.system.System`.

Sockets are those of `network`, files those of `disk`; here are the loop that waits for them,
workers, the lane of the saver, the tape and the log. Must not know rounds.
"""

from __future__ import annotations

import errno
import os
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from syncer.checkpoint.lineage import Origin
from syncer.server.capacity import FILES_RESERVED, Descriptors
from syncer.server.log import Lines
from syncer.server.loop import READ, WRITE, Handler, Loop, Timer
from syncer.server.notify import ServiceManager
from syncer.server.system import System, Usage
from syncer.server.workers import Job, JobQueue, run_job
from syncer.streams import Backlog
from syncer.tls import TlsSocket
from tests.sim.clock import MS, SECOND, World
from tests.sim.disk import Disk, SimFiles
from tests.sim.lane import Killed, SimLane
from tests.sim.network import Listener, Network


def below(sock: Any) -> Any:
    """The simulated socket, which TLS may be on."""
    return sock.sock if isinstance(sock, TlsSocket) else sock


class SimLoop(Loop):
    """The real timers and turns over simulated readiness, level-triggered as epoll's.

    stir: called when a turn has something to do.
    """

    def __init__(self, world: World, network: Network):
        super().__init__()
        self.world, self.network = world, network
        self.stir: Callable[[], None] = lambda: None
        self.sleep: Callable[[int | None], None] = lambda due_ns: None
        """Of a server that runs by itself: returns when a turn is due."""
        self.waiting: dict[Any, tuple[int, Handler]] = {}
        self.hot: dict[Any, None] = {}
        """Sockets that may be ready, in the order in which that became known."""
        self.timers_made: list[Timer] = []
        self.closed = False

    def now_ns(self) -> int:
        return self.world.now_ns

    def register(self, sock: Any, events: int, handler: Handler) -> None:
        sock = below(sock)
        assert sock not in self.waiting, "registered twice"
        assert sock.fileno() >= 0, "registered after it was closed"
        self.network.call("register")
        sock.touched = self.touch
        self._watch(sock, events, handler)

    def modify(self, sock: Any, events: int, handler: Handler) -> None:
        sock = below(sock)
        assert sock in self.waiting, "modified, and not registered"
        try:
            self.network.call("modify")
        except (OSError, MemoryError):
            self.unregister(sock)                 # as the selector of Python does
            raise
        self._watch(sock, events, handler)

    def _watch(self, sock: Any, events: int, handler: Handler) -> None:
        self.waiting[sock] = events, handler
        self.touch(sock)

    def unregister(self, sock: Any) -> None:
        sock = below(sock)
        sock.touched = None
        del self.waiting[sock]
        self.hot.pop(sock, None)

    def wake(self) -> None:
        self.stir()

    def unacknowledged(self, sock: Any) -> int:
        return below(sock).unacknowledged

    def call_at(self, when_ns: int, callback: Callable[[], Any]) -> Timer:
        timer = super().call_at(when_ns, callback)
        self.timers_made.append(timer)
        return timer

    def touch(self, sock: Any) -> None:
        """Something happened to a socket: is it what its handler waits for?"""
        if self._events(sock):
            self.hot[sock] = None
            self.stir()

    def _events(self, sock: Any) -> int:
        events = self.waiting[sock][0]
        return (READ if events & READ and sock.readable else 0) | (
            WRITE if events & WRITE and sock.writable else 0)

    def ready(self) -> list[tuple[Handler, int]]:
        """What a wait would return now."""
        found = []
        for sock in list(self.hot):
            events = self._events(sock)
            if events:
                found.append((self.waiting[sock][1], events))
            else:
                del self.hot[sock]
        return found

    def due_ns(self, deadline_ns: int | None) -> int | None:
        for sock in list(self.hot):
            if self._events(sock):
                return self.world.now_ns
            del self.hot[sock]
        return super().due_ns(deadline_ns)

    def poll(self, deadline_ns: int | None = None) -> None:
        """As `SelectorLoop.poll`."""
        self.sleep(self.due_ns(deadline_ns))
        self.woken()
        self.turn(self.ready())

    def close(self) -> None:
        self.closed = True


class SimWorkers:
    """`count` workers that take their time. `failing`: so many of the next jobs find no memory."""

    def __init__(self, world: World, loop: SimLoop, count: int, work_ms: float):
        self.world, self.loop, self.work_ms = world, loop, work_ms
        self.idle = self.count = count
        self.queue = JobQueue()
        self.under_way: list[list[Any]] = []
        self.failing = 0
        self.failed = 0
        self.dead = False
        self.left_over = 0
        """Jobs that had not answered when the end came."""

    def submit(self, job: Job) -> None:
        self.queue.put(job)
        self.world.after(self.world.rng.random() * 0.05 * MS, self._take)

    def _take(self) -> None:
        if self.dead or not self.idle:
            return
        job = self.queue.take()
        if job is None:
            return
        self.idle -= 1
        if self.failing:
            self.failing -= 1
            self.failed += 1
            job = job._replace(run=_no_memory)
        early = self.world.chance(0.5)
        answers: list[tuple[Any, ...]] = []
        if early:                                 # computed at the beginning, or at the end
            run_job(job, lambda *answer: answers.append(answer))
        under_way = [None if early else job, answers]
        self.under_way.append(under_way)
        self.world.after(self.world.between(0.01, self.work_ms) * MS, self._finish, under_way)

    def _finish(self, under_way: list[Any]) -> None:
        if self.dead:
            return
        self.under_way = [other for other in self.under_way if other is not under_way]
        job, answers = under_way
        if job is not None:
            run_job(job, lambda *answer: answers.append(answer))
        for answer in answers:
            self.loop.post(*answer)
        self.idle += 1
        self._take()

    def close(self) -> None:
        """What is under way answers to nobody, and its memory goes."""
        self.left_over = len(self.queue.jobs) + len(self.under_way)
        self.dead = True
        self.queue.clear()
        for under_way in self.under_way:
            under_way.clear()
        self.under_way.clear()


def _no_memory(*given: Any) -> None:
    raise MemoryError("no memory for a fragment buffer")


class Scarce:
    """A pool of buffers that has none until `end_ns`."""

    def __init__(self, world: World, pool: Any, end_ns: float):
        self.world, self.pool, self.end_ns = world, pool, end_ns

    def take(self, numel: int) -> Any:
        if self.world.now_ns < self.end_ns:
            _no_memory()
        return self.pool.take(numel)


class SimTape:
    """A file that only grows; over all processes of a run. `trouble`: of its next calls."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.trouble: deque[str] = deque()

    def size(self) -> int:
        return len(self.data)

    def append(self, data: bytes) -> int:
        trouble = self.trouble.popleft() if self.trouble else ""
        if trouble == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = len(data) // 2 if trouble == "short" else len(data)
        self.data += data[:written]
        return written

    def cut(self, size: int) -> None:
        del self.data[size:]

    def close(self) -> None:
        pass


class LogLines:
    """Keeps what a log says."""

    def __init__(self, terminal: bool):
        self.terminal = terminal
        self.lines: list[bytes] = []

    def write(self, line: bytes) -> None:
        assert line.find(b"\n") == len(line) - 1, f"no whole line: {line!r}"
        self.lines.append(line)


class SimAside:
    """Writes what waits, and takes its time. `stuck_until_ns`: nobody reads what it writes."""

    def __init__(self, world: World, backlog: Backlog, write: Callable[[bytes], None]):
        self.world, self.backlog, self.write = world, backlog, write
        self.dice = random.Random(1)              # what a run does depends on no log level
        self.stuck_until_ns = 0
        self.given = self.accounted = 0
        """Pieces; those that were written, or whose loss was said."""
        self.piece: bytes | None = None
        self.dead = self.closed = self.over = False

    def put(self, piece: bytes) -> bool:
        if self.closed:
            return False
        self.given += 1
        fits = self.backlog.put(piece)
        if self.piece is None:
            self._next()
        return fits

    def stop_reading(self, span_ns: float, bytes_max: int) -> None:
        """For so long; and what waits meanwhile may not be much."""
        self.stuck_until_ns = self.world.now_ns + int(span_ns)
        self.backlog.bytes_max = bytes_max

    def _next(self) -> None:
        self.piece = self.backlog.take()
        if self.piece is not None:
            late_ns = self.dice.random() * 0.05 * MS
            self.world.after(max(self._stuck_ns, late_ns), self._write, self.piece)

    @property
    def _stuck_ns(self) -> int:
        return self.stuck_until_ns - self.world.now_ns

    def _write(self, piece: bytes) -> None:
        if self.dead or piece is not self.piece:  # written by `close`
            return
        if self._stuck_ns > 0:
            self.world.after(self._stuck_ns, self._write, piece)
            return
        self.write(piece)
        self.accounted += self.backlog.in_hand
        self.backlog.done(True)
        self._next()

    def close(self, stuck_s: float) -> int:
        self.closed = True
        if self._stuck_ns > 0:
            end_ns = self.world.now_ns + min(self._stuck_ns, int(stuck_s * SECOND))
            self.world.after(end_ns - self.world.now_ns, lambda: None)
            self.world.wait(lambda: self.dead or self.world.now_ns >= end_ns)
        if self.dead:
            if self.over:
                return self.backlog.left
            raise Killed
        while self.piece is not None and self._stuck_ns <= 0:
            self._write(self.piece)
        assert self.given == self.accounted + self.backlog.left, "lost in silence"
        self.dead = self.over = True              # it ends with its process
        return self.backlog.left


class SimManager(ServiceManager):
    """Hears how the process stands, in the order in which a process may say it."""

    def __init__(self) -> None:
        self.status, self.due_ns, self.address = "", 0, "the service manager"
        self.said: list[str] = []
        self.socket = self                        # which is closed with the last word

    def close(self) -> None:
        assert self.said[-1] == "STOPPING=1", self.said[-1]

    def sendto(self, data: bytes, address: str) -> None:
        line, *rest = data.decode().split("\n")
        assert (line == "READY=1") == (not self.said), f"{line} behind {self.said}"
        assert self.said[-1:] != ["STOPPING=1"], f"{line} behind the last word"
        assert all(each.startswith("STATUS=") for each in rest), rest
        self.said.append(line)


class SimSystem(System):
    """The ports of one process."""

    def __init__(self, world: World, network: Network, disk: Disk, work_ms: float):
        self.world, self.network, self.work_ms = world, network, work_ms
        self.tape, self.lines = SimTape(), LogLines(terminal=False)
        self.disk = disk
        self.files = SimFiles(disk)
        self.files.of_process = True
        self.the_loop: SimLoop | None = None
        self.the_workers: SimWorkers | None = None
        self.the_lane: SimLane | None = None
        self.listener: Listener | None = None
        self.sockets_max: int | None = None
        """What its descriptors leave for sockets; None: more than anybody will dial."""
        self.asides: list[SimAside] = []

    def loop(self) -> SimLoop:
        self.the_loop = SimLoop(self.world, self.network)
        return self.the_loop

    def place(self, numa: str) -> str:
        return ""

    def workers(self, loop: SimLoop, merge_threads: int) -> SimWorkers:
        self.the_workers = SimWorkers(self.world, loop, self.world.rng.randint(1, 4), self.work_ms)
        return self.the_workers

    def resolve(self, host: str, port: int) -> list[tuple[int, Any]]:
        """A name of two addresses, of which this machine has one."""
        return [(1, ("absent", port)), (2, ("every", port))]

    def bind(self, family: int, address: Any) -> Listener:
        number = (errno.EADDRNOTAVAIL if family == 1 else
                  errno.EADDRINUSE if self.network.listener is not None else 0)
        if number:
            raise OSError(number, os.strerror(number))
        self.listener = Listener(self.network, sockets_max=self.sockets_max)
        return self.listener

    def own_addresses(self) -> list[str]:
        return ["192.0.2.1", "2001:db8::1"]

    def lane(self) -> SimLane:
        self.the_lane = SimLane(self.world, self.files.begin_work)
        self.files.passes = self.the_lane.passes
        return self.the_lane

    def descriptors(self) -> Descriptors:
        sockets = 1 << 20 if self.sockets_max is None else self.sockets_max
        return Descriptors(10 + FILES_RESERVED + sockets, 10)

    def append(self, path: str) -> SimTape:
        return self.tape

    def aside(self, name: str, backlog: Backlog, write: Callable[[bytes], None]) -> SimAside:
        self.asides.append(SimAside(self.world, backlog, write))
        return self.asides[-1]

    def log_lines(self) -> Lines:
        return Lines(self.lines.terminal, self.lines.write, self.aside)

    def origin(self) -> Origin:
        return Origin(self.world.births.getrandbits(64) | 1, self.world.now_ns // SECOND)

    def service_manager(self) -> SimManager | None:
        """Every other process was started by one."""
        return SimManager() if self.network.number % 2 else None

    def usage(self) -> Usage:
        return Usage(0.0, 0)

    def kill(self) -> None:
        """The process is gone, whatever it was doing; its files stay as they are."""
        self.files.dead = True
        if self.the_loop is not None:
            self.the_loop.stir = lambda: None
        if self.the_workers is not None:
            self.the_workers.dead = True
        if self.the_lane is not None:
            self.the_lane.kill()
        for aside in self.asides:
            aside.dead = True
        self.disk.release(self.files)
