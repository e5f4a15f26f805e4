"""One run of the server from start to exit status: opens what it needs, serves, flushes, ends.

It makes no system call of its own: those are the ports of a `System`. What happens between the
start and the end is the driver's. Only who could be a learner of such a run may end it (rule 14.8).
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack

from syncer.checkpoint.atomic import WriteError
from syncer.checkpoint.lineage import Lineage
from syncer.config import Config
from syncer.core import actions, events
from syncer.core.run.phases import Phase
from syncer.core.run.scheduler import Scheduler
from syncer.errors import CheckpointError, ConfigError
from syncer.exits import NO_FAILURES, Exit
from syncer.layout import Layout
from syncer.server.addresses import BindError, listen, reachable
from syncer.server.capacity import USUAL_SOCKETS, Capacity
from syncer.server.conn import Channel
from syncer.server.door import Door
from syncer.server.driver import Driver, RunEnd
from syncer.server.farewell import Farewells
from syncer.server.group import Group
from syncer.server.introducing import versions_held
from syncer.server.listener import Listener
from syncer.server.log import Log
from syncer.server.onlookers import InvariantsWatch, Watch
from syncer.server.persistence import Persistence
from syncer.server.readers import Readers, names_of
from syncer.server.run_session import Parts, RunSession
from syncer.server.secured import secured
from syncer.server.system import Signals, System
from syncer.server.tape import Recorder, Tape
from syncer.server.telling import PacedNotices
from syncer.server.unix_place import UnixPlace
from syncer.streams import complain
from syncer.tcp import UNIX
from syncer.wire.hello import Claim, Hello
from syncer.wire.identity import (
    Identity,
    Pins,
    identity_refusal,
    is_of_another_run,
    mismatch,
    pins_refusal,
)
from syncer.wire.names import Names

FLUSH_NS = 2 * 10**9
"""At the end, queued bytes get this long to leave; then peers get a `Farewell` to read them."""
READERS_END_NS = 60 * 10**9
"""Readers get so much longer for the final cut of a run, as long as they take some of it in every
`FLUSH_NS`: nothing waits for them, but a process that has nothing else to do."""


class Server:
    """A bound server in a world: `system` has its ports, `watch` sees what the scheduler does.

    `session` is None until the first HELLO of a layout that can be merged, `address` is (host,
    port) as bound, `status` the exit status once `life` has ended. Raises `BindError` when the
    address cannot be listened on, `ConfigError` when a file cannot be opened or a thread not be
    made, `CheckpointError` when a checkpoint cannot be resumed. The log is closed with the run.

    Large: the parts of a server, their life, and the answers that the door asks for.
    """

    def __init__(self, config: Config, log: Log | None = None, system: System | None = None,
                 watch: Watch | None = None):
        self.config = config
        self.system = system or System()
        self.log = log or Log(config.log_level, config.log_format, self.system.log_lines())
        if wrong := self.system.restore_floats():  # first of all: threads inherit it
            self._floats_restored("main", wrong)
        with ExitStack() as undo:
            undo.callback(self.log.close)
            self.loop = self.system.loop()
            undo.callback(self.loop.close)
            self.loop.refused = lambda peer, error: self.log.warning(
                "the system failed a connection", peer=peer, error=error)
            self.persistence = Persistence(config, self.log, self.system.files, self.system.lane,
                                           self.system.origin)
            undo.callback(self.persistence.close)
            self.secured = secured(config, self.loop, self.log)
            self.place_lacks = self.system.place(config.numa)
            """What --numa has no effect without."""
            self.workers = self.system.workers(self.loop, config.merge_threads)
            undo.callback(self.workers.close)
            self.workers.floats_restored = self._floats_restored
            socks = listen(self.system, config.bind_host, config.port)
            for sock in socks:
                undo.callback(sock.close)
            self.places: list[UnixPlace] = []
            if config.listen is not None:
                self.places.append(self.system.listen_unix(config.listen.removeprefix(UNIX)))
                undo.callback(self.places[0].close)
                socks.append(self.places[0].sock)
            self.recorder = Recorder(open_tape(config, self.system), self.log,
                                     self.system.aside)
            undo.callback(self.recorder.close)
            self.persistence.begin()
            self.capacity = Capacity(self.system.descriptors())
            undo.pop_all()
        self.farewells = Farewells()
        self.door = Door(self.loop, self.workers, config, log=self.log,
                         farewells=self.farewells, capacity=self.capacity, host=self,
                         secured=self.secured)
        self.reachable = reachable(self.system, socks)
        self.listeners = [Listener(self.loop, self.log, sock, self.door.welcome) for sock in socks]
        self.driver = Driver(Scheduler(config, self.persistence.resumed), self.loop, {
            actions.Log: lambda action: self.log.write(*action),
            actions.Record: lambda action: self.recorder.write(action.fields),
            actions.Refuse: self.door.refuse_arrival,
            actions.Notice: lambda action: None,  # nobody is there: the log has it
        }, watch or (InvariantsWatch() if self.system.checks() else None))
        self.session: RunSession | None = None
        self.notices = PacedNotices(self.loop)
        self.readers = Readers(self, config, self.log, self.capacity,
                               notices=self.notices, say_farewell=self.farewells.say)
        self.driver.carried_out = self._carried_out
        self.is_broken = False
        self.pins = Pins(config.profile_hash, config.require_profile_binding,
                         config.expected_island_contract, config.run)
        self.address = self.listeners[0].address
        self.status: int = Exit.FAILED
        self.manager = self.system.service_manager()

    def run(self) -> int:
        """Serve until the run ends and return the exit status; then everything is closed.

        In the main thread the first SIGTERM or SIGINT ends the run gracefully, a second one ends
        the process at once.
        """
        life = self.life()
        try:
            with Signals(self.loop, self.stop, None if self.secured is None else self.read_again):
                deadline_ns = next(life)
                while True:
                    try:
                        self.loop.poll(deadline_ns)
                    except Exception as error:
                        deadline_ns = life.throw(error)
                    else:
                        deadline_ns = next(life)
        except StopIteration:
            pass  # the life has ended
        finally:
            self.loop.close()
            self.log.close()
        return self.status

    def _carried_out(self) -> None:
        """An event has led to all that it leads to: learners, then readers are sent theirs."""
        if self.session is not None:
            self.session.outgoing.flush()
        self.readers.look()

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Ask for a graceful end, as the first signal does. From any thread."""
        self.loop.post(lambda: self.driver.handle(events.Stop(int(signum))))

    def read_again(self) -> None:
        """The certificates anew, as SIGHUP asks for. From any thread."""
        if self.secured is not None:
            self.loop.post(self.secured.reload)

    # -------------------------------------------------------------------- what the door asks for
    def handle(self, event: events.Event) -> None:
        self.driver.handle(event)

    @property
    def identity(self) -> Identity | None:
        """Of the session, or of what was resumed before it has one."""
        identity = self.persistence.identity if self.session is None else self.session.identity
        return None if identity is None else identity.of_run(self.persistence.lineage.run)

    @property
    def layout(self) -> Layout | None:
        """Of the session."""
        return None if self.session is None else self.session.hello.layout

    @property
    def scheduler(self) -> Scheduler:
        """For those who only look."""
        return self.driver.scheduler

    @property
    def names(self) -> Names | None:
        """What the parameters are called, as far as it is known."""
        known, session = self.persistence.names, self.session
        if known is None or session is None:
            return None
        return names_of(session.hello.layout, known, session.hello.fingerprint)

    @property
    def lineage(self) -> Lineage:
        return self.persistence.lineage

    def take_reader(self, channel: Channel, claim: Claim) -> Group:
        """Somebody who reads is let in. Raises RemoteProtocolError, with nothing done."""
        self.readers.check(claim)
        return self.readers.admit(channel, claim)

    # rule 14.8
    def identity_refusal(self, claim: Claim) -> str | None:
        """Text of the ERROR for a HELLO that does not belong to this run, else None. What no run of
        this server would take ends nothing but its connection."""
        run = self.persistence.lineage.run
        pins = self.pins._replace(known_run=run)
        refusal = identity_refusal(self.identity, claim, pins)
        resumed = self.persistence.identity
        if refusal is not None and resumed is not None and pins_refusal(claim, pins) is None:
            resumed = resumed.of_run(run)
            misfit = mismatch(resumed, claim)
            if misfit is not None and not is_of_another_run(resumed, claim):
                self.handle(events.Misfit(misfit))
        return refusal

    def versions_held(self, hello: Hello) -> tuple[int, ...]:
        """Of each fragment the version of this run that its learner has, -1 for none."""
        return versions_held(hello, self.persistence.lineage, self.config.downlink != "whole")

    def open_session(self, hello: Hello, identity: Identity) -> None:
        """The first HELLO that belongs to the run makes the session. Raises `ConfigError`."""
        self.session = RunSession(hello, identity, Parts(
            self.config, self.loop, self.workers, self.log, self.recorder, self.persistence,
            self.door, self.farewells, self.notices, self.driver.handle))
        self.driver.add_owners(self.session.owners())
        try:
            self.persistence.check_space([f.numel for f in hello.layout.fragments])
        except WriteError as error:
            self.handle(events.NoRoom(str(error)))

    def make_room(self, learner: int, sockets: int) -> None:
        """End the oldest connection of a learner that dials again, if it has one; readers go before
        that, as many as its sockets take."""
        while not self.capacity.has_room(sockets):
            if not self.readers.give_way():
                if self.session is not None:
                    self.session.make_room(learner)
                return

    def find_group(self, learner: int, generation: int) -> Group | None:
        """The admitted, still connected group."""
        return None if self.session is None else self.session.find(learner, generation)

    # -------------------------------------------------------------------------------- the life
    def life(self) -> Generator[int | None, None, None]:
        """The run from its first log line to its last.

        Whoever drives it makes a turn of the loop after each value, a time of the loop's clock by
        which that turn is due at the latest (None: when something is ready), and throws in here
        what the turn raised.
        """
        self._announce()
        if self.manager is not None:
            self.manager.ready(self._situation())
        self.log.restrain(self.loop)
        driver, ending = self.driver, None
        while ending is None:
            try:
                while driver.ending is None:
                    if self.manager is not None:
                        self.manager.stands(self._situation(), self.loop.now_ns())
                    yield driver.deadline_ns()
                    driver.tick_if_due()
                ending = driver.ending
            except Exception as error:
                ending = self._broken(error)
        self._say(ending)
        try:
            yield from self._say_goodbye()
        except Exception as error:
            ending = self._defect(error)
            self._say(ending)
        self._close()
        self.log.restrain(None)
        self._totals()
        self.recorder.close()
        self.log.close()
        self.status = ending.status

    def _announce(self) -> None:
        config = self.config
        self.log.info("syncer listening", host=self.address[0], port=self.address[1],
                      learners=config.learners, total_steps=config.total_steps,
                      fixed_roster=config.fixed_roster, authenticated=bool(config.key_bytes),
                      tls=self.secured is not None,
                      profile_hash=config.profile_hash.hex(),
                      addresses=",".join(self.reachable))
        fit, limit = self.capacity.learners_fit, self.capacity.limit
        if fit < config.learners:
            self.log.warning("not every learner fits in the limit of descriptors", limit=limit,
                             learners=config.learners, learners_fit=fit,
                             sockets_each=USUAL_SOCKETS)
        else:
            self.log.info("room for learners", learners_fit=fit, sockets_each=USUAL_SOCKETS,
                          descriptors=limit)
        if config.preset is not None:
            self.log.info("a preset sets what was not given", preset=config.preset,
                          **config.from_preset)
        for setting, needs in config.without_effect:
            self.log.warning("a setting has no effect", setting=setting, needs=needs)
        if self.place_lacks:
            self.log.warning("a setting has no effect", setting="--numa", needs=self.place_lacks)
        for setting, value, usual in config.unusual:
            self.log.warning("a setting is far beyond what is usual", setting=setting, value=value,
                             usual=usual)
        if config.host is None and not (config.is_guarded or config.allow_unauthenticated):
            self.log.info("only this machine can connect: no key is set (SYNCER_HMAC_KEY)")

    def _floats_restored(self, thread: str, wrong: str) -> None:
        self.log.warning("a library changed how floats are computed; this is undone",
                         thread=thread, wrong=wrong)

    def _defect(self, error: Exception) -> RunEnd:
        """An error nobody should be able to cause: one line for people, the rest at debug level."""
        for line in "".join(traceback.format_exception(error)).splitlines():
            self.log.debug(line)
        return RunEnd(Exit.FAILED, f"internal error: {type(error).__name__}: {error}")

    def _broken(self, error: Exception) -> RunEnd | None:
        """How the run ends after a defect; None: with the last cut, which is being saved.

        Not where the fragments cannot be made the cut that the scheduler speaks of, since the
        defect came between them, and not a second time: a run that cannot even end must not
        spin.
        """
        ending = self._defect(error)
        first, self.is_broken = not self.is_broken, True
        scheduler, session = self.driver.scheduler, self.session
        try:
            self.driver.publish_undone()
        except Exception as another:
            self._defect(another)
        if first and (session is None or scheduler.phase == Phase.WAITING
                      or session.merging.versions == scheduler.versions):
            try:
                self.driver.broken(ending.text)
            except Exception as another:
                self._defect(another)
            else:
                return self.driver.ending
        return ending

    def _situation(self) -> str:
        """Where the run stands, for whoever looks at the process from outside."""
        scheduler = self.driver.scheduler
        there = scheduler.members.current_count if scheduler.fragments else 0
        where = (f"step {scheduler.global_step} of {self.persistence.total_steps}"
                 if scheduler.phase != Phase.WAITING else "waiting")
        return f"{where}, {there} of {self.config.learners} learners are here"

    def _say(self, ending: RunEnd) -> None:
        if self.manager is not None:
            self.manager.stopping(ending.text)
            self.manager = None
        self.log.write("INFO" if ending.status in NO_FAILURES else "ERROR", ending.text,
                       {"status": ending.status})

    # --------------------------------------------------------------------------------- the end
    def _say_goodbye(self) -> Iterator[int | None]:
        """Flush what is queued, and let peers read it."""
        self.driver.ending = self.driver.ending or RunEnd(Exit.FAILED, "")
        for listener in self.listeners:
            listener.close()
        for place in self.places:
            place.close()
        self.door.close()
        if self.secured is not None:
            self.secured.close()
        groups: list[Group] = []
        # before `outgoing` lets everybody send: who has a cut then must not ask for the next one
        readers = self.readers.goodbye(trained=self.driver.ending.status == Exit.DONE)
        if self.session is not None:
            self.session.ingest.close()
            self.session.outgoing.close()
            groups = self.session.open_groups
        groups += readers
        yield from self._until(lambda: all(group.flushed for group in groups), FLUSH_NS)
        yield from self._until_read(readers)
        for group in groups:
            if not group.ended:
                if self.session is not None and group not in readers:
                    self.session.say_link(group)
                self.farewells.say(group.channels, group.control, [])
        yield from self._until(lambda: not self.farewells.open, None)

    def _close(self) -> None:
        """Close every socket and thread, also what a defect during the goodbye has left open."""
        for farewell in list(self.farewells.open):
            farewell.close()
        for group in [*([] if self.session is None else self.session.open_groups),
                      *self.readers.groups]:
            group.outbox.drop()                   # what a peer that is gone would not take
            for channel in group.channels:
                channel.close()
        self.notices.close()
        self.workers.close()
        self.persistence.close(self.driver.scheduler.global_step)
        if self.session is not None:
            self.session.close()

    def _until_read(self, groups: Sequence[Group]) -> Iterator[int | None]:
        """The process stays while readers that take the final cut get on with it."""
        end_ns = self.loop.now_ns() + READERS_END_NS
        taken = -1
        while not all(group.flushed for group in groups) and self.loop.now_ns() < end_ns:
            before, taken = taken, sum(group.sent for group in groups)
            if taken == before:
                return
            yield from self._until(lambda: all(group.flushed for group in groups), FLUSH_NS)

    def _until(self, reached: Callable[[], bool], limit_ns: int | None) -> Iterator[int | None]:
        deadline_ns = None if limit_ns is None else self.loop.now_ns() + limit_ns
        while not reached() and (deadline_ns is None or self.loop.now_ns() < deadline_ns):
            yield deadline_ns

    def _totals(self) -> None:
        usage = self.system.usage()
        commits = 0 if self.session is None else self.session.merging.published
        self.log.info("server totals", bytes_received=self.loop.bytes_received,
                      bytes_sent=self.loop.bytes_sent, cpu_seconds=round(usage.cpu_seconds, 3),
                      peak_rss_bytes=usage.peak_rss_bytes, commits=commits)


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
        complain(str(error))
        return Exit.NOT_BINDABLE
    except CheckpointError as error:
        complain(str(error))
        return Exit.NOT_WRITTEN if isinstance(error, WriteError) else Exit.NOT_RESUMABLE
    return server.run()
