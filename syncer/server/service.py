"""One run of the server from start to exit status: opens what it needs, serves, flushes, ends.

It makes no system call of its own: those are the ports of a `System`. What happens between the
start and the end is the driver's.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from syncer.checkpoint.atomic import WriteError
from syncer.config import Config
from syncer.core import events
from syncer.errors import CheckpointError, ConfigError
from syncer.exits import NO_FAILURES, Exit
from syncer.server.door import Door
from syncer.server.driver import Driver, Ending
from syncer.server.log import Log
from syncer.server.persistence import Persistence
from syncer.server.system import BindError, Signals, System
from syncer.server.tape import Tape

FLUSH_NS = 2 * 10**9
"""At the end, queued bytes get this long to leave; then peers get a `Farewell` to read them."""


class Server:
    """A bound server in a world: `system` has its ports.

    Raises `BindError` when the address cannot be listened on, `ConfigError` when a file cannot be
    opened, `CheckpointError` when a checkpoint cannot be resumed. `address` is (host, port) as
    bound. `status` is the exit status once `life` has ended.
    """

    def __init__(self, config: Config, log: Log | None = None, system: System | None = None):
        self.config = config
        self.system = system or System()
        self.log = log or Log(config.log_level, config.log_format, self.system.log_lines())
        with ExitStack() as undo:
            self.loop = self.system.loop()
            undo.callback(self.loop.close)
            self.persistence = Persistence(config, self.log, self.system.files, self.system.lane)
            undo.callback(self.persistence.close)
            sock = self.system.listen(config.bind_host, config.port)
            undo.callback(sock.close)
            self.tape = open_tape(config, self.system)
            if self.tape is not None:
                undo.callback(self.tape.close)
            self.persistence.begin()
            undo.pop_all()
        self.workers = self.system.workers(self.loop)
        self.driver = Driver(config, self.loop, self.workers, self.log, tape=self.tape,
                             persistence=self.persistence)
        self.door = Door(self.loop, config, self.log, sock, self.driver)
        self.driver.door = self.door
        self.address = self.door.address
        self.status: int = Exit.FAILED

    def run(self) -> int:
        """Serve until the run ends and return the exit status; then everything is closed.

        In the main thread the first SIGTERM or SIGINT ends the run gracefully, a second one ends
        the process at once.
        """
        life = self.life()
        with Signals(self.loop, self.stop):
            deadline_ns = next(life)
            while True:
                try:
                    try:
                        self.loop.poll(deadline_ns)
                    except Exception as error:
                        deadline_ns = life.throw(error)
                    else:
                        deadline_ns = next(life)
                except StopIteration:
                    break
        self.loop.close()
        return self.status

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Ask for a graceful end, as the first signal does. From any thread."""
        self.loop.post(lambda: self.driver.handle(events.Stop(int(signum))))

    # -------------------------------------------------------------------------------- the life
    def life(self) -> Iterator[int | None]:
        """The run from its first log line to its last.

        Whoever drives it makes a turn of the loop after each value, a time of the loop's clock by
        which that turn is due at the latest (None: when something is ready), and throws in here
        what the turn raised.
        """
        self._announce()
        driver = self.driver
        try:
            while driver.ending is None:
                yield driver.scheduler.deadline_ns()
                driver.tick_if_due()
            ending = driver.ending
        except Exception as error:
            ending = self._defect(error)
        self._say(ending)
        try:
            yield from self._close()
        except Exception as error:
            ending = self._defect(error)
            self._say(ending)
        self._totals()
        if self.tape is not None:
            self.tape.close()
        self.status = ending.status

    def _announce(self) -> None:
        config = self.config
        self.log.info("syncer listening", host=self.address[0], port=self.address[1],
                      learners=config.learners, total_steps=config.total_steps,
                      fixed_roster=config.fixed_roster, authenticated=bool(config.key_bytes),
                      profile_hash=config.profile_hash.hex())
        if config.host is None and not (config.key_bytes or config.allow_unauthenticated):
            self.log.info("only this machine can connect: no key is set (SYNCER_HMAC_KEY)")

    def _defect(self, error: Exception) -> Ending:
        """An error nobody should be able to cause: one line for people, the rest at debug level."""
        for line in "".join(traceback.format_exception(error)).splitlines():
            self.log.debug(line)
        return Ending(Exit.FAILED, f"internal error: {type(error).__name__}: {error}")

    def _say(self, ending: Ending) -> None:
        self.log.write("INFO" if ending.status in NO_FAILURES else "ERROR", ending.text,
                       {"status": ending.status})

    # --------------------------------------------------------------------------------- the end
    def _close(self) -> Iterator[int | None]:
        """Flush what is queued, let peers read it, then close every socket and thread."""
        self.driver.ending = self.driver.ending or Ending(Exit.FAILED, "")
        self.door.close()
        groups = [group for group in self.driver.groups.values() if not group.ended]
        yield from self._until(lambda: all(group.flushed for group in groups), FLUSH_NS)
        for group in groups:
            if not group.ended:
                self.door.say_farewell(group.channels, group.control, [])
        yield from self._until(lambda: not self.door.farewells, None)
        self.workers.close()
        self.persistence.close()
        self.driver.close()

    def _until(self, reached: Callable[[], bool], limit_ns: int | None) -> Iterator[int | None]:
        deadline_ns = None if limit_ns is None else self.loop.now_ns() + limit_ns
        while not reached() and (deadline_ns is None or self.loop.now_ns() < deadline_ns):
            yield deadline_ns

    def _totals(self) -> None:
        usage = self.system.usage()
        self.log.info("server totals", bytes_received=self.loop.bytes_received,
                      bytes_sent=self.loop.bytes_sent, cpu_seconds=round(usage.cpu_seconds, 3),
                      peak_rss_bytes=usage.peak_rss_bytes, commits=self.driver.commits)


def open_tape(config: Config, system: System) -> Tape | None:
    """The event tape, if one is asked for. Raises `ConfigError`."""
    if config.event_tape is None:
        return None
    try:
        return Tape(config.event_tape, system.append(config.event_tape))
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
