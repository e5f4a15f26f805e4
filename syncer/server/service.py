"""One run of the server from start to exit status: binds, loops, flushes, ends.

It owns the process's signals and its exit status; what happens in between is the driver's.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import traceback
from contextlib import ExitStack
from typing import Any

from syncer.checkpoint.atomic import WriteError
from syncer.config import Config
from syncer.core import events
from syncer.errors import CheckpointError, ConfigError
from syncer.exits import NO_FAILURES, Exit, after_signal
from syncer.server.door import BindError, Door, listen
from syncer.server.driver import Driver, Ending
from syncer.server.log import Log
from syncer.server.loop import Loop
from syncer.server.persistence import Persistence
from syncer.server.tape import Tape
from syncer.server.workers import Workers

FLUSH_NS = 2 * 10**9
"""At the end, queued bytes get this long to leave; then peers get a `Farewell` to read them."""


class Server:
    """A bound server; `run` serves until the run ends and returns the exit status.

    Raises `BindError` when the address cannot be listened on, `ConfigError` when a file cannot be
    opened, `CheckpointError` when a checkpoint cannot be resumed. `address` is (host, port) as
    bound. `stop` may be called from any thread.
    """

    def __init__(self, config: Config, log: Log | None = None):
        self.config = config
        self.log = log or Log(config.log_level, config.log_format)
        with ExitStack() as undo:
            self.loop = Loop()
            undo.callback(self.loop.close)
            self.persistence = Persistence(config, self.log)
            undo.callback(self.persistence.close)
            sock = listen(config.bind_host, config.port)
            undo.callback(sock.close)
            self.tape = open_tape(config)
            if self.tape is not None:
                undo.callback(self.tape.close)
            self.persistence.begin()
            undo.pop_all()
        self.workers = Workers(self.loop)
        self.driver = Driver(config, self.loop, self.workers, self.log, tape=self.tape,
                             persistence=self.persistence)
        self.door = Door(self.loop, config, self.log, sock, self.driver)
        self.driver.door = self.door
        self.address = self.door.address

    def run(self) -> int:
        """Serve until the run ends; everything is closed when this returns.

        In the main thread the first SIGTERM or SIGINT ends the run gracefully, a second one ends
        the process at once.
        """
        with _Signals(self):
            status = self._serve_to_the_end()
        self.loop.close()
        return status

    def _serve_to_the_end(self) -> int:
        config = self.config
        self.log.info("syncer listening", host=self.address[0], port=self.address[1],
                      learners=config.learners, total_steps=config.total_steps,
                      fixed_roster=config.fixed_roster, authenticated=bool(config.key_bytes),
                      profile_hash=config.profile_hash.hex())
        if config.host is None and not (config.key_bytes or config.allow_unauthenticated):
            self.log.info("only this machine can connect: no key is set (SYNCER_HMAC_KEY)")
        try:
            self._serve()
            ending = self.driver.ending
        except Exception as error:
            ending = self._defect(error)
        self._say(ending)
        try:
            self._close()
        except Exception as error:
            ending = self._defect(error)
            self._say(ending)
        self._totals()
        if self.tape is not None:
            self.tape.close()
        return ending.status

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Ask for a graceful end, as the first signal does."""
        self.loop.post(lambda: self.driver.handle(events.Stop(int(signum))))

    def _serve(self) -> None:
        driver, loop, scheduler = self.driver, self.loop, self.driver.scheduler
        while driver.ending is None:
            loop.poll(scheduler.deadline_ns())
            driver.tick_if_due()

    def _defect(self, error: Exception) -> Ending:
        """An error nobody should be able to cause: one line for people, the rest at debug level."""
        for line in traceback.format_exc().splitlines():
            self.log.debug(line)
        return Ending(Exit.FAILED, f"internal error: {type(error).__name__}: {error}")

    def _say(self, ending: Ending) -> None:
        self.log.write("INFO" if ending.status in NO_FAILURES else "ERROR", ending.text,
                       {"status": ending.status})

    # --------------------------------------------------------------------------------- the end
    def _close(self) -> None:
        """Flush what is queued, let peers read it, then close every socket and thread."""
        self.driver.ending = self.driver.ending or Ending(Exit.FAILED, "")
        self.door.close()
        groups = [group for group in self.driver.groups.values() if not group.ended]
        self._poll_until(lambda: all(group.flushed for group in groups), FLUSH_NS)
        for group in groups:
            if not group.ended:
                self.door.say_farewell(group.channels, group.control, [])
        self._poll_until(lambda: not self.door.farewells, None)
        self.workers.close()
        self.persistence.close()
        self.driver.close()

    def _poll_until(self, reached: Any, limit_ns: int | None) -> None:
        deadline_ns = None if limit_ns is None else self.loop.now_ns() + limit_ns
        while not reached():
            if deadline_ns is not None and self.loop.now_ns() >= deadline_ns:
                return
            self.loop.poll(deadline_ns)

    def _totals(self) -> None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        unit = 1 if sys.platform == "darwin" else 1024
        self.log.info("server totals", bytes_received=self.loop.bytes_received,
                      bytes_sent=self.loop.bytes_sent,
                      cpu_seconds=round(usage.ru_utime + usage.ru_stime, 3),
                      peak_rss_bytes=usage.ru_maxrss * unit, commits=self.driver.commits)


def open_tape(config: Config) -> Tape | None:
    """The event tape, if one is asked for. Raises `ConfigError`."""
    if config.event_tape is None:
        return None
    try:
        return Tape(config.event_tape)
    except OSError as error:
        raise ConfigError(f"--event-tape {config.event_tape} cannot be opened for appending: "
                          f"{error.strerror}; name a file you may write to") from None


def serve(config: Config) -> int:
    """Run a server in this process until the run ends; returns the exit status, an `Exit`.

    Raises `ConfigError` when a file of the configuration cannot be opened.
    """
    try:
        server = Server(config)
    except BindError as error:
        print(f"syncer: {error}", file=sys.stderr)
        return Exit.NOT_BINDABLE
    except CheckpointError as error:
        print(f"syncer: {error}", file=sys.stderr)
        return Exit.NOT_WRITTEN if isinstance(error, WriteError) else Exit.NOT_RESUMABLE
    return server.run()


class _Signals:
    """The process's SIGTERM and SIGINT while a server runs in the main thread."""

    def __init__(self, server: Server):
        self.server = server
        self.seen = 0
        self.previous: dict[int, Any] = {}
        self.descriptor = -1

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            # The handler runs between bytecodes; the descriptor ends the wait in the selector.
            self.descriptor = signal.set_wakeup_fd(self.server.loop.wake_write.fileno(),
                                                   warn_on_full_buffer=False)
            for signum in (signal.SIGTERM, signal.SIGINT):
                self.previous[signum] = signal.signal(signum, self._caught)
        return self

    def _caught(self, signum: int, frame: Any) -> None:
        self.seen += 1
        if self.seen > 1:
            os._exit(after_signal(signum))
        self.server.stop(signum)

    def __exit__(self, *exc_info: object) -> None:
        for signum, handler in self.previous.items():
            signal.signal(signum, handler)
        if self.previous:
            signal.set_wakeup_fd(self.descriptor)


