"""Readers: connections that are sent whole cuts of a run, and give nothing to it.

It must not send anything that a round waits for, nor tell the scheduler of a reader: rounds do not
know that there are any. Whose turn it is to send is `catchups`' business: readers come last.

A cut after step t has one version of each fragment, and commits go on while it is sent. Versions
never change, so a cut is kept whole by holding on to its versions: a reader takes one cut at a
time, from what is current between two commits, and looks at no newer version before it has all of
it. Those that are replaced first go first. A link as fast as the rounds so holds nothing but what
is current; a slow one holds what was replaced and is not sent yet: of each fragment one version at
most, parameters alone, so 4 bytes per parameter of the model and reader. Bytes in bf16 are made
when their turn comes, once for all who want them at the time.

A reader that follows takes the cuts whose step is a multiple of the number of fragments. Each of
them is sent as it is made, a fragment behind every commit; one that takes longer than that skips
whole cuts and goes on with the next one that it can still have (rule 15.5). At the end all get the
final cut (rule 15.6).

rule 14.12. What a reader says of a model is not looked at: it has none. It proves the key as a
    learner does, with a generation that nobody has used, or whoever has recorded its HELLO could
    read the parameters.
rule 16.5. Who reads sees as little as a learner does of why nothing comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from syncer.checkpoint.facts import NamedDims
from syncer.checkpoint.lineage import Lineage
from syncer.config import Config
from syncer.core.run.phases import Phase
from syncer.core.run.scheduler import Scheduler
from syncer.errors import RemoteProtocolError
from syncer.layout import Layout
from syncer.protocol import HELLO_FRAME_BYTES_MAX, Msg, RunState
from syncer.server.capacity import Capacity
from syncer.server.conn import Channel
from syncer.server.group import Group, Reports
from syncer.server.introducing import greeting
from syncer.server.log import Log
from syncer.server.run_session import RunSession
from syncer.server.seen import EverSeen
from syncer.server.telling import PacedNotices
from syncer.server.wire_version import Image, Source, WireVersion
from syncer.steps import fragment_of, version_at
from syncer.wire.encode import encode_error, encode_manifest, encode_shutdown
from syncer.wire.extended import SessionLayout, encode_session_layout
from syncer.wire.extension import Role
from syncer.wire.hello import Claim, Hello
from syncer.wire.limits import Limits
from syncer.wire.messages import Manifest
from syncer.wire.names import FragmentNames, Names, fingerprint

NO_LAYOUT = Layout(())
"""A reader's HELLO has one, since every HELLO has; nothing is asked of it."""
RUN_STATES = {Phase.WAITING: RunState.WAITING, Phase.RUNNING: RunState.RUNNING,
              Phase.CUTOFF: RunState.RUNNING}
LIVE = (Phase.RUNNING, Phase.SAVING, Phase.CUTOFF, Phase.FINISHING)
"""Every fragment has its values, and they are the run's."""


class Parameters(NamedTuple):
    """Of a version nothing but these, so that who holds one holds no optimizer state."""

    fragment: int
    version: int
    params: np.ndarray


class Pinned:
    """One version of a cut that a reader has not got yet, as an outbox takes it; its bytes are made
    when they are asked for."""

    __slots__ = ("_made", "_make", "fragment", "kind", "source", "version")
    change = None

    def __init__(self, source: Source, make: Callable[[Source], WireVersion]):
        self.kind = Msg.BCAST_FRAGMENT
        self.fragment, self.version = source.fragment, source.version
        self.source: Source | None = Parameters(source.fragment, source.version, source.params)
        self._make = make
        self._made: WireVersion | None = None

    def pieces(self, msg_id: int, streams: int) -> list[list[bytes | memoryview]]:
        """Raises MemoryError."""
        if self._made is None:
            assert self.source is not None  # it is there until it was made
            self._made, self.source = self._make(self.source), None
        return self._made.pieces(msg_id, streams)

    def is_ready(self, end: int) -> bool:
        """Whether the first `end` bytes of its body are final."""
        assert self._made is not None  # its pieces were asked for
        return self._made.is_ready(end)

    def ready(self, end: int) -> None:
        """Make the first `end` bytes of its body final."""
        assert self._made is not None  # its pieces were asked for
        self._made.ready(end)


class WatchedRun(Protocol):
    """What readers need of the server behind them."""

    session: RunSession | None

    @property
    def scheduler(self) -> Scheduler:
        """Where the run is; nobody tells it anything here."""

    @property
    def lineage(self) -> Lineage:
        """Of this process: its run, and how often that was begun."""

    @property
    def names(self) -> Names | None:
        """What the parameters are called, once it is known."""


class ReaderGroup(Group):
    """A reader's one socket. Whenever its queue is empty, `drained` may put something into it."""

    def __init__(self, channel: Channel, hello: Hello, reader: Reader):
        super().__init__(channel, hello, reader, limits=Limits.for_reader_group())
        self.drained: Callable[[], bool] = reader.drained

    @property
    def extended(self) -> bool:
        """Nobody reads who has not said so in a block."""
        return True

    def pump(self) -> None:
        """As of any group; who cannot be sent a version for want of memory is ended."""
        try:
            super().pump()
            while not self.ended and self.outbox.empty and self.drained():
                super().pump()
        except MemoryError:
            self.end("no memory for what it is to be sent")


class Reader(Reports):
    """One reader: which cut it is being sent, and what it has of it.

    Large: what it is, what it has, and what it is to be told are each a few values.
    """

    def __init__(self, channel: Channel, claim: Claim, readers: Readers):
        assert claim.extension is not None  # that is how it is known
        self.readers = readers
        self.dtype, self.run = claim.dtype, claim.extension.run
        self.follows = claim.extension.role is Role.FOLLOWER
        self.client = claim.extension.client or ""
        self.knows_layout = False
        self.target: int | None = None
        """Step of the cut that it is being sent; None: of none, yet or any more."""
        self.has: list[int] = []
        """Per fragment the version that it was sent, or that is queued; -1: none."""
        self.cuts = 0
        self.is_ending = False
        """It gets the final cut, or has got what it came for: nothing follows."""
        self.told_end = False
        hello = Hello(claim.learner, claim.generation, claim.dtype, NO_LAYOUT, claim.fingerprint,
                      claim.contract)
        self.group = ReaderGroup(channel, hello, self)

    # ---------------------------------------------------------------------- what its group reports
    def frame(self, group: Group, kind: int, payload: memoryview) -> None:
        """A HEARTBEAT: the limits let nothing else through, and there is nothing in it."""

    def ended(self, group: Group, reason: str, refusal: str | None) -> None:
        self.readers.left(self, reason, refusal)

    @property
    def is_served(self) -> bool:
        """It has the one cut that it wanted, and may hang up whenever it likes."""
        return self.cuts > 0 and not self.follows and self.group.in_flight() == 0

    # --------------------------------------------------------------------------------- one cut
    def queue(self, sources: Sequence[Source]) -> None:
        """More versions of its cut."""
        for source in sources:
            self.has[source.fragment] = source.version
            self.group.outbox.broadcast(Pinned(source, self._wire))

    def _wire(self, source: Source) -> WireVersion:
        return self.readers.session.outgoing.wire(Msg.BCAST_FRAGMENT, source, self.dtype)

    def drained(self) -> bool:
        """Everything queued is with the kernel. Whether there is more to send now."""
        if self.is_ending and self.target is None:
            return self._say_end()
        if self.target is None:
            return False
        fragments = len(self.has)
        cut = [version_at(self.target, p, fragments) for p in range(fragments)]
        if self.has != cut:
            return False  # the rest of it is still to be merged
        self.readers.log.debug("reader has a cut", peer=self.group.control.peer, step=self.target)
        self.group.outbox.frame(encode_manifest(Manifest(self.target, tuple(cut))))
        self.cuts += 1
        done, self.target = self.target, None
        if self.follows:
            self.readers.next_cut(self, done)
        return True

    def _say_end(self) -> bool:
        told, self.told_end = self.told_end, True
        if not told:
            self.group.outbox.frame(encode_shutdown())
        return not told

    def finish(self, cut: list[Image], step: int) -> None:
        """The final cut, in place of whatever was queued, and the end behind it."""
        self.target, self.is_ending = None, True
        if cut:
            manifest = Manifest(step, tuple(version.version for version in cut))
            self.group.outbox.final_cut(cut, encode_manifest(manifest))


class Readers:
    """All of them. `look` is called whenever the run may have moved, and finds out how far.

    Large: who is let in, what moves a cut on, and the end are a few methods each.
    """

    def __init__(self, host: WatchedRun, config: Config, log: Log, capacity: Capacity,
                 *, notices: PacedNotices,
                 say_farewell: Callable[[list[Channel], Channel, list[bytes]], None]):
        self.host, self.config, self.log = host, config, log
        self.capacity, self.notices, self.say_farewell = capacity, notices, say_farewell
        self.open: dict[Reader, None] = {}
        self.generations = EverSeen()
        """Of all that were ever let in: a HELLO that somebody has recorded is no key."""
        self.said_count = 0
        """Of the waits of the run that were said, those that readers were told of."""
        self.step = 0
        """Of the newest cut that was looked at."""
        self.over = False
        """The run has ended: nobody is begun another cut."""

    @property
    def session(self) -> RunSession:
        session = self.host.session
        assert session is not None  # nothing is sent before there is one
        return session

    # ------------------------------------------------------------------------ who comes and goes
    # rule 14.12
    def check(self, claim: Claim) -> None:
        """Raises RemoteProtocolError for a reader that is not let in."""
        limit = self.config.max_readers
        if sum(not reader.is_served for reader in self.open) >= limit:
            few = f"has {limit} readers already, as many as" if limit else "takes no readers, as"
            raise RemoteProtocolError(f"this syncer {few} --max-readers says"
                                      + ("; try again later" if limit else ""))
        if claim.generation in self.generations:
            raise RemoteProtocolError(f"duplicate connection generation {claim.generation} of a "
                                      "reader, or one that looks so: draw a new one for every "
                                      "connection, and try again later with that")
        if not self.capacity.has_room(1):
            raise RemoteProtocolError(
                "this syncer has no room for one more socket of a reader within its "
                f"{self.capacity.limit} descriptors; try again later")
        assert claim.extension is not None  # that is how it is known
        refusal = self._run_refusal(claim.extension.run and claim.extension.run.name)
        if refusal:
            raise RemoteProtocolError(refusal)

    def _run_refusal(self, name: str | None) -> str | None:
        ours = self.host.lineage.run
        if not name or name == ours or not (ours or self.host.session):
            return None
        return f"session mismatch: expected {f'run {ours}' if ours else 'no run'}, got run {name}"

    def admit(self, channel: Channel, claim: Claim) -> Group:
        """One that `check` has passed; who has what he came for gives his place to it."""
        self.generations.add(claim.generation)
        served = [reader for reader in self.open if reader.is_served]
        if len(self.open) >= self.config.max_readers and served:
            served[0].group.end("it has its cut, and another reader needs its place")
        reader = Reader(channel, claim, self)
        self.open[reader] = None
        self.capacity.promise(1)
        group = reader.group
        self.log.info("reader connected", peer=channel.peer, follows=reader.follows,
                      dtype=reader.dtype, client=reader.client, readers=len(self.open))
        scheduler = self.host.scheduler
        group.outbox.frame(greeting(self.config, self.host.lineage, scheduler.global_step,
                                    RUN_STATES.get(scheduler.phase, RunState.FINISHING)))
        group.pump()
        self._tell_wait(reader)
        self._serve(reader)
        return group

    def give_way(self) -> bool:
        """A learner needs a socket: the reader that came last goes, if there is one."""
        if not self.open:
            return False
        text = "this syncer needs the place of a reader for a learner; try again later"
        list(self.open)[-1].group.end(text, text)
        return True

    def left(self, reader: Reader, reason: str, refusal: str | None) -> None:
        """Its connection has ended."""
        del self.open[reader]
        self.capacity.promise(-1)
        self.notices.leave(reader.group)
        if self.host.session is not None:
            self.session.outgoing.catchups.leave(reader.group)
        self.log.info("reader left", peer=reader.group.control.peer, reason=reason,
                      cuts=reader.cuts, bytes=reader.group.sent)
        if refusal is not None:
            self.say_farewell(reader.group.channels, reader.group.control,
                              [encode_error(refusal)])

    # ------------------------------------------------------------------------------- what they get
    def look(self) -> None:
        """The run may have gone on: versions, the start, the end."""
        if self.said_count != self.host.scheduler.said_count:
            self.said_count = self.host.scheduler.said_count
            for reader in list(self.open):
                self._tell_wait(reader)
        if not self.open or self.host.session is None:
            return
        store, fragments = self.session.merging.store, self._fragments
        newest = self.host.scheduler.global_step if self._is_live else 0
        for step in range(max(self.step, newest - fragments) + 1, newest + 1):
            source = store.current(fragment_of(step, fragments))
            for reader in list(self.open):
                if reader.target is not None and (
                        reader.has[source.fragment] < source.version <= reader.target):
                    self._send(reader, [source])
        self.step = newest
        for reader in list(self.open):
            self._serve(reader)

    # rule 16.5
    def _tell_wait(self, reader: Reader) -> None:
        """Whoever waits for a cut waits for what the run waits for."""
        wait = self.host.scheduler.told_wait()
        if wait is not None and not (reader.is_served or reader.is_ending):
            self.notices.say(reader.group, *wait)

    @property
    def _fragments(self) -> int:
        return len(self.session.hello.layout.fragments)

    @property
    def _is_live(self) -> bool:
        return self.host.scheduler.phase in LIVE

    def _serve(self, reader: Reader) -> None:
        """Whatever this moment has for it that it has not got."""
        if self.host.session is None or reader.group.ended:
            return
        if not reader.knows_layout and not self._tell_layout(reader):
            return
        if self.host.scheduler.phase is Phase.FINISHING:
            self._finish(reader)
        elif self._is_live and not (reader.has or reader.is_ending):
            self._begin(reader)

    def _tell_layout(self, reader: Reader) -> bool:
        refusal = self._run_refusal(reader.run and reader.run.name)
        if refusal:
            reader.group.end(refusal, refusal)
            return False
        reader.knows_layout = True
        hello = self.session.hello
        layout = SessionLayout(hello.dtype, hello.layout, hello.fingerprint, hello.contract,
                               self.host.names)
        frame = encode_session_layout(layout)
        if len(frame) > HELLO_FRAME_BYTES_MAX:  # names are what it can do without
            frame = encode_session_layout(layout._replace(names=None))
        reader.group.outbox.frame(frame)
        reader.group.pump()
        return not reader.group.ended

    def _begin(self, reader: Reader) -> None:
        """The cut of this moment, in the order in which its versions will be replaced."""
        store, fragments = self.session.merging.store, self._fragments
        step = self.host.scheduler.global_step
        reader.has, reader.target = [-1] * fragments, step
        self._send(reader, [store.current(fragment_of(step + 1 + i, fragments))
                            for i in range(fragments)])

    # rule 15.5
    def next_cut(self, reader: Reader, done: int) -> None:
        """The first cut after `done` that the reader can have whole, as far as it is made; none
        once the run has ended, since nobody would complete it."""
        if self.over:
            return
        store, fragments = self.session.merging.store, len(reader.has)
        step = self.host.scheduler.global_step
        target = max(-(-step // fragments), done // fragments + 1) * fragments
        reader.target = target
        made = [store.current(fragment_of(t, fragments))
                for t in range(max(target - fragments, 0) + 1, step + 1)]
        self._send(reader, [source for source in made
                            if source.version > reader.has[source.fragment]])

    def _send(self, reader: Reader, sources: Sequence[Source]) -> None:
        """Queue versions of its cut; they go in the reader's turn."""
        group = reader.group
        if group.ended or not sources:
            return
        self.session.outgoing.catchups.read(group, lambda: reader.queue(sources))

    # rule 15.6
    def _finish(self, reader: Reader) -> None:
        if reader.is_ending:
            return
        if reader.cuts and not reader.follows:
            reader.finish([], 0)
            reader.group.pump()
            return
        outgoing = self.session.outgoing
        cut = outgoing.final_images(reader.group)
        if cut:
            outgoing.catchups.read(reader.group, lambda: reader.finish(
                cut, self.host.scheduler.global_step))

    # ------------------------------------------------------------------------------------- the end
    def goodbye(self, trained: bool) -> list[ReaderGroup]:
        """Those who are still to take something; after a run that has reached its end they are told
        so."""
        self.over = True
        for reader in list(self.open):
            if trained and reader.target is None:
                reader.finish([], 0)
                reader.group.pump()
        return self.groups

    @property
    def groups(self) -> list[ReaderGroup]:
        """Of those that are connected."""
        return [reader.group for reader in self.open]


def names_of(layout: Layout, known: Sequence[NamedDims], expected: bytes) -> Names:
    """Names and shapes as a LAYOUT tells them: whether a fingerprint is over all dimensions is not
    kept with them, but one of both gives it."""
    names: Names = ()
    for identity in (False, True):
        names = tuple(FragmentNames(tensors, identity) for tensors in known)
        if fingerprint(layout, names) == expected:
            break
    return names
