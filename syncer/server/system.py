"""The system calls of the server: sockets that listen, threads, appended files, signals.

All of them and nothing else: everything above runs unchanged on another `System`, a simulated one.
Must not decide anything.
"""

from __future__ import annotations

import fcntl
import os
import resource
import secrets
import signal
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import numpy as np

from syncer.checkpoint.files import FILES, Files
from syncer.checkpoint.lane import Lane
from syncer.checkpoint.lineage import Origin
from syncer.config import available_cores
from syncer.errors import ConfigError, KernelError
from syncer.exits import after_signal
from syncer.kernels import SUM_BLOCK, restore_floats, self_check, sumsq
from syncer.machine import memory_nodes
from syncer.server.addresses import BACKLOG
from syncer.server.capacity import Descriptors
from syncer.server.log import Lines, Writer
from syncer.server.notify import ServiceManager
from syncer.server.numa import place
from syncer.server.selector import SelectorLoop
from syncer.server.unix_place import UnixPlace
from syncer.server.workers import Job, JobQueue, run_job
from syncer.streams import Backlog, LineWriter, WriterThread

WORKERS_MAX = 4
WORKER = "syncer-worker-"
SIOCGIFADDR = 0x8915
DESCRIPTORS_MAX = 1 << 20
"""Where nothing limits them."""


def check_threads(count: int) -> None:
    """Raises `ConfigError` unless so many more threads may run at once.

    They are made and ended again: OpenMP, which makes most of them, ends the process without a word
    in the log when it cannot.
    """
    ended = threading.Event()
    made: list[threading.Thread] = []
    try:
        for _ in range(count):
            thread = threading.Thread(target=ended.wait, name="syncer-probe", daemon=True)
            thread.start()
            made.append(thread)
    except RuntimeError:  # what Python makes of EAGAIN
        raise ConfigError(f"only {len(made)} of {count} threads can be made for merges: raise the "
                          "limit of this process (ulimit -u, pids.max of its cgroup), or give "
                          "fewer --merge-threads") from None
    finally:
        ended.set()
        for thread in made:
            thread.join()


class ThreadWorkers:
    """`count` daemon threads over one queue; `close` waits for none that computes.

    Every one of them has its team of `merge_threads` from the start, and computes as IEEE-754 says
    before each job: `floats_restored(thread, what was wrong)` is called, once for each thread, when
    a library had changed that. Raises `ConfigError` if that many threads cannot be had.
    """

    def __init__(self, loop: SelectorLoop, count: int | None = None, merge_threads: int = 1):
        self.loop = loop
        self.count = count or min(WORKERS_MAX, max(2, available_cores()))
        self.merge_threads = merge_threads
        check_threads(self.count * merge_threads)
        self.queue = JobQueue()
        self.taking = threading.Lock()
        self.bells: SimpleQueue[None] = SimpleQueue()
        """Rung once per job: half the cost of a condition variable, which matters per push."""
        self.closing = False
        self.floats_restored: Callable[[str, str], object] = lambda thread, wrong: None
        self.computing: set[threading.Thread] = set()
        self.threads: list[threading.Thread] = []
        try:
            for i in range(self.count):
                thread = threading.Thread(target=self._work, name=f"{WORKER}{i}", daemon=True)
                thread.start()
                self.threads.append(thread)
        except RuntimeError:  # what Python makes of EAGAIN
            self.close()
            raise no_thread("of a worker") from None

    def submit(self, job: Job) -> None:
        with self.taking:
            self.queue.put(job)
        self.bells.put(None)

    def close(self) -> None:
        """Drop what has not begun. A thread that computes is left to itself: nobody wants the
        result, and a large merge takes minutes."""
        with self.taking:
            self.closing = True
            self.queue.clear()
            idle = [thread for thread in self.threads if thread not in self.computing]
        for _ in self.threads:
            self.bells.put(None)
        for thread in idle:
            thread.join()

    def _work(self) -> None:
        me = threading.current_thread()
        if self.merge_threads > 1:  # OpenMP keeps the team of each thread that has asked for one
            sumsq(np.zeros(SUM_BLOCK * self.merge_threads, np.float32), self.merge_threads)
        try:
            self_check()
        except KernelError as error:
            self.loop.post(fail, error)
        said = False
        while True:
            self.bells.get()
            with self.taking:
                if self.closing:
                    return
                job = self.queue.take()
                self.computing.add(me)
            if (wrong := restore_floats()) and not said:
                self.floats_restored(me.name, wrong)
                said = True
            if job is not None:
                run_job(job, self.loop.post)
            del job  # a waiting worker must not keep the last job's buffers alive
            with self.taking:
                self.computing.discard(me)


def fail(error: Exception) -> None:
    """Raises on the loop's thread what another one met."""
    raise error


def still_computing() -> bool:
    """Whether a worker of this process has not noticed yet that its server has ended."""
    return any(thread.name.startswith(WORKER) for thread in threading.enumerate())


def leave(status: int) -> NoReturn:
    """End the process at once, whatever its threads do: the end of the interpreter would take
    memory from under them."""
    for stream in sys.stdout, sys.stderr:
        with suppress(OSError):
            stream.flush()
    os._exit(status)


def no_thread(which: str) -> ConfigError:
    """What is to be done about it."""
    return ConfigError(f"the thread {which} cannot be made: raise the limit of this process "
                       "(ulimit -u, pids.max of its cgroup), or give fewer --merge-threads")


def thread_aside(name: str, backlog: Backlog, write: Callable[[bytes], None]) -> WriterThread:
    """A thread that writes. Raises `ConfigError` if it cannot be made."""
    try:
        return WriterThread(name, backlog, write)
    except RuntimeError:  # what Python makes of EAGAIN
        raise no_thread(f"called {name}") from None


def lines_to(descriptor: int) -> Lines:
    """Log lines to a descriptor. Raises `ConfigError` if their thread cannot be made."""
    return Lines(os.isatty(descriptor), LineWriter(descriptor), thread_aside)


class AppendFile:
    """A file that only grows, or a pipe or terminal. Every method raises OSError.

    A pipe need not have its reader yet, and may lose it: it is held open for reading here as well.
    """

    def __init__(self, path: str | os.PathLike[str]):
        flags = os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOCTTY
        with suppress(FileNotFoundError):
            if stat.S_ISFIFO(os.stat(path).st_mode):
                self.descriptor = os.open(path, flags | os.O_RDWR)
                return
        # no device keeps the start waiting
        self.descriptor = os.open(path, flags | os.O_WRONLY | os.O_NONBLOCK, 0o644)
        os.set_blocking(self.descriptor, True)

    def size(self) -> int:
        return os.fstat(self.descriptor).st_size

    def append(self, data: bytes) -> int:
        """Bytes written; may be fewer than given."""
        return os.write(self.descriptor, data)

    def cut(self, size: int) -> None:
        os.ftruncate(self.descriptor, size)

    def close(self) -> None:
        os.close(self.descriptor)


def new_origin() -> Origin:
    """Another one at every call."""
    return Origin(secrets.randbits(64) or 1, int(time.time()))


class Usage(NamedTuple):
    """What this process has used."""

    cpu_seconds: float
    peak_rss_bytes: int


def peak_rss_kib() -> int:
    """Most memory that this program has had. `ru_maxrss` is that of whoever started it, if more:
    it goes through fork and exec."""
    with suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class Signals:
    """The process's SIGTERM, SIGINT and SIGHUP while a server runs in the main thread.

    The first one calls `stop(signum)` and wakes the loop, a second one ends the process at once.
    SIGHUP asks for `again` if there is something to read again. Without, a terminal was closed: it
    stops the run, and never ends the process at once, as shell and kernel both may send it. Where
    it is ignored (nohup) it stays so.
    """

    def __init__(self, loop: SelectorLoop, stop: Callable[[int], object],
                 again: Callable[[], object] | None = None,
                 end: Callable[[int], object] = os._exit):
        self.loop, self.stop, self.again, self.end = loop, stop, again, end
        self.seen = 0
        self.previous: dict[int, Any] = {}
        self.descriptor = -1

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            # The handler runs between bytecodes; the descriptor ends the wait in the selector.
            self.descriptor = signal.set_wakeup_fd(self.loop.wake_write.fileno(),
                                                   warn_on_full_buffer=False)
            for signum in (signal.SIGTERM, signal.SIGINT):
                self.previous[signum] = signal.signal(signum, self._caught)
            if self.again is not None or signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
                self.previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._hung_up)
        return self

    def _hung_up(self, signum: int, frame: FrameType | None) -> None:
        if self.again is not None:
            self.again()
        elif not self.seen:
            self._caught(signum, frame)

    def _caught(self, signum: int, frame: FrameType | None) -> None:
        self.seen += 1
        if self.seen > 1:
            self.end(after_signal(signum))
        self.stop(signum)

    def __exit__(self, *exc_info: object) -> None:
        for signum, handler in self.previous.items():
            signal.signal(signum, handler)
        if self.previous:
            signal.set_wakeup_fd(self.descriptor)


def raise_limit() -> int:
    """Have as many descriptors as this process may have; returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (hard, min(DESCRIPTORS_MAX, hard if hard > 0 else DESCRIPTORS_MAX)):
        with suppress(OSError, ValueError):  # an unlimited one is more than the kernel gives
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
            break
    return DESCRIPTORS_MAX if soft == resource.RLIM_INFINITY else soft


class System:
    """The real world of one server: every port, each made when it is asked for.

    Large: a method for each thing that a server asks of its world.
    """

    def __init__(self, files: Files = FILES):
        self.files = files

    def loop(self) -> SelectorLoop:
        return SelectorLoop()

    def restore_floats(self) -> str:
        """Makes the calling thread, and those it makes, compute as IEEE-754 says; returns what was
        wrong, '' if nothing."""
        return restore_floats()

    def place(self, numa: str) -> str:
        """Where memory and threads lie from now on; returns what is missing for it, or ''."""
        return place(numa, memory_nodes())

    def workers(self, loop: SelectorLoop, merge_threads: int) -> ThreadWorkers:
        """Raises `ConfigError` if there are not so many threads to be had."""
        return ThreadWorkers(loop, merge_threads=merge_threads)

    def resolve(self, host: str, port: int) -> list[tuple[int, Any]]:
        """(family, address) of every address of a name. Raises OSError or UnicodeError."""
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return list(dict.fromkeys((family, address) for family, _, _, _, address in found))

    def bind(self, family: int, address: Any) -> socket.socket:
        """A socket that listens there. Raises OSError."""
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(BACKLOG)
            sock.setblocking(False)
        except OSError:
            sock.close()
            raise
        return sock

    def listen_unix(self, path: str) -> UnixPlace:
        """Raises `BindError`."""
        return UnixPlace(path)

    def own_addresses(self) -> list[str]:
        """That others may know this machine by: one of each interface, and IPv6 of global scope."""
        found = []
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            for _, name in socket.if_nameindex():
                with suppress(OSError):  # it has none
                    told = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("40s", os.fsencode(name)))
                    found.append(socket.inet_ntoa(told[20:24]))
        with suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as lines:
            found += [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(parts[0]))
                      for parts in map(str.split, lines) if int(parts[3], 16) == 0]
        return [host for host in found if not host.startswith("127.")]

    def lane(self) -> Lane:
        """Where checkpoints are written. Raises `ConfigError` if its thread cannot be made."""
        try:
            return Lane()
        except RuntimeError:  # what Python makes of EAGAIN
            raise no_thread("for checkpoints") from None

    def descriptors(self) -> Descriptors:
        """Of this process, when everything is open that will be."""
        try:
            used = len(os.listdir("/proc/self/fd"))
        except OSError:  # no /proc: what a server has, and some more
            used = 32
        return Descriptors(raise_limit(), used)

    def append(self, path: str) -> AppendFile:
        """Raises OSError."""
        return AppendFile(path)

    def aside(self, name: str, backlog: Backlog, write: Callable[[bytes], None]) -> Writer:
        """Whatever writes beside the loop. Raises `ConfigError` if its thread cannot be made."""
        return thread_aside(name, backlog, write)

    def log_lines(self) -> Lines:
        """Raises `ConfigError` if their thread cannot be made."""
        if sys.stderr is None:  # closed before this program began: nobody reads the log
            return lines_to(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC))
        return lines_to(sys.stderr.fileno())

    def origin(self) -> Origin:
        """What this process has that no other one has."""
        return new_origin()

    def checks(self) -> bool:
        """Whether the scheduler's invariants are checked after every event."""
        return os.environ.get("SYNCER_CHECK", "") not in ("", "0")

    def service_manager(self) -> ServiceManager | None:
        """Whoever started this process and wants to hear of it (sd_notify); mostly nobody."""
        address = os.environ.get("NOTIFY_SOCKET", "")
        return ServiceManager(address) if address[:1] in ("/", "@") and address[1:] else None

    def usage(self) -> Usage:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return Usage(used.ru_utime + used.ru_stime, peak_rss_kib() * 1024)
