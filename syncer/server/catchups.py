"""Whose catch-up is sent now, how many bytes of it may be on their way, and who waits for a turn.

It must not know rounds or choose what is sent: an outbox has that; here is decided when.

Those who train come first. A learner that joins is sent the whole model; sent as fast as the links
carry it, 32 joiners fill the server's link and each round waits for its broadcast behind them.

rule 15.1. Catch-ups stand in a line, and those in front are sent side by side: as many as
    --max-concurrent-catchups says, or else as many as have room for a share each in the bytes that
    may be on their way. A member that waits is held all the while and is sent nothing; in its turn
    it gets the versions of that moment. What is known to be with a member already takes no turn:
    the replay of rule 3.7, and the final cut, which ends the wait.
rule 15.2. While a broadcast of an open round is on its way nothing of a catch-up is given to the
    kernel, and the rest of the time only so much as leaves it short queues: what stands in them is
    in front of the next broadcast. How much that may be is measured. Now and then a broadcast goes
    out with the catch-ups paused, from the merge that makes it; the others are compared with
    those, and the bytes grow or shrink so that they take no more than 1.5 times as long. A
    broadcast that is under way for long may be so because of a slow link of its own, or of a peer
    that is gone: catch-ups have a third of such a time. With nobody to be hurt the bytes double
    every 100 ms. A member that was caught up and is waited for by a round is served like any other.
rule 15.3. A turn in which the peer acknowledges nothing for two seconds goes to the next in line: a
    dead link in front must not keep the others out. Its member goes to the end, with what it got.
rule 15.4. Readers stand behind everybody who joins, whenever he comes, and are served like them
    otherwise. No round waits for what they are sent, so none of it goes before its turn.
rule 15.7. Who waits for its turn is held by no fault of its own, and it may be long: its learner is
    told behind whom it stands, as anybody is for whom a run waits (rule 16.2).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from statistics import median

from syncer.protocol import NoticeCode
from syncer.server.group import Group
from syncer.server.log import Log
from syncer.server.loop import Loop, Timer
from syncer.server.wire_version import Image

MS = 10**6
SHARE_BYTES = 256 * 1024
"""Room of one more catch-up beside the others."""
BEGIN_BYTES = 128 * 1024
FLOOR_BYTES = 64 * 1024
"""On their way at least, whatever is measured: somebody is always served."""
LEAST_SHARE_BYTES = 16 * 1024
CEILING_BYTES = 2**40
TICK_NS, IDLE_TICK_NS = MS, 16 * MS
SHIELD_NS, SLICE_NS = 20 * MS, 10 * MS
"""Of a time in which there is always a broadcast under way: theirs, and the catch-ups'."""
PAUSE_NS = 1000 * MS
"""Longest pause for a broadcast that is measured undisturbed."""
STALLED_NS = 2 * 10**9
SILENT_NS = 5 * 10**9
TURN_SAID_NS, TURN_SAID_AGAIN_NS = 5 * 10**9, 30 * 10**9
GROW_BELOW, SHRINK_ABOVE = 1.2, 1.4
"""Times that a broadcast takes of what it takes undisturbed; 1.5 is what it may."""
ALONE_EVERY = 16
"""Of so many broadcasts of a size one is measured undisturbed."""
ALONE_MIN, ALONE_MAX = 3, 7
"""So many undisturbed times of a size are needed, and the last so many are kept."""
TRIES = 4
NEXT_NS = 100 * MS
"""So many broadcasts in a row, each within this time, may find the way not yet free."""
TAIL_BYTES = 4096
SAMPLE = 16
"""Connections that are looked at to know how a broadcast gets on."""
NAMED = 8
"""Learners in front that a log line names."""


class Turn:
    """A member's place in the line. `begun`: its catch-up is queued. `still`: it stands still, and
    the rounds know it, since by then (`lively_ns`) its peer had acknowledged no more than `lively`
    and a trifle. `front_ns`: it is in front since then. `reads`: it is a reader, who is
    behind every member, and through when its queue is empty."""

    __slots__ = ("acknowledged", "begun", "front_ns", "group", "lively", "lively_ns", "progress_ns",
                 "reads", "since_ns", "still", "tell_ns")

    def __init__(self, group: Group, now_ns: int, reads: bool = False):
        self.group = group
        self.begun = self.reads = reads
        self.still = False
        self.since_ns = self.progress_ns = self.front_ns = self.lively_ns = now_ns
        self.tell_ns = now_ns + TURN_SAID_NS
        self.acknowledged = self.lively = 0

    def look(self, acknowledged: int, idle: bool, now_ns: int) -> None:
        """So much has been acknowledged. idle: nothing is on its way, so there is nothing to be."""
        if idle or acknowledged != self.acknowledged:
            self.acknowledged, self.progress_ns = acknowledged, now_ns
        if idle or acknowledged - self.lively >= LEAST_SHARE_BYTES:
            self.lively, self.lively_ns = acknowledged, now_ns


class FlightKind(Enum):
    """What a broadcast is to tell."""

    USUAL = 1
    """How long they take beside catch-ups."""
    ALONE = 2
    """And how long when those are paused."""
    NOTHING = 3
    """They are paused, but what they have sent still stands in front of it."""


class Flight:
    """A broadcast of `size` bytes on its way to a sample of those who train.

    Its last bytes are not waited for: a peer may take 40 ms to acknowledge a packet that is alone.
    """

    __slots__ = ("begun_ns", "count", "free_ns", "kind", "left", "size", "took_ns")

    def __init__(self, size: int, groups: dict[Group, int], begun_ns: int, kind: FlightKind):
        self.size, self.begun_ns, self.kind = size, begun_ns, kind
        self.free_ns: int | None = None
        """When the way was free of catch-ups: its time counts from there."""
        self.left = [(group, group.sent + own - max(TAIL_BYTES, own // 32))
                     for group, own in groups.items()]
        """Whom it has not reached, and their bytes when it has."""
        self.count = len(groups)
        self.took_ns: list[int] = []

    def landed(self, now_ns: int) -> bool:
        """Whether it has arrived everywhere, but for those whose own link must be slow."""
        left = []
        for group, target in self.left:
            if group.ended:
                continue
            if group.sent - group.in_flight() >= target:
                self.took_ns.append(now_ns - (self.free_ns or self.begun_ns))
            else:
                left.append((group, target))
        self.left = left
        typical_ns = self.typical_ns
        patience_ns = 10_000 * MS if typical_ns is None else 4 * typical_ns + 50 * MS
        return not left or now_ns - self.begun_ns > patience_ns

    @property
    def typical_ns(self) -> int | None:
        """When half of them had it."""
        middle = (self.count - 1) // 2
        return self.took_ns[middle] if middle < len(self.took_ns) else None


class Headroom:
    """Bytes of all catch-ups that may be on their way, by what they did to broadcasts.

    A median is compared with a lower quartile: whatever else disturbs a broadcast adds to its time,
    and one slow one among many says something about the machine only.
    """

    def __init__(self) -> None:
        self.bytes = BEGIN_BYTES
        self.ceiling = CEILING_BYTES
        self.alone_ns: dict[int, deque[int]] = {}
        """Size -> times of its last broadcasts that were not disturbed."""
        self.since_alone: dict[int, int] = {}
        self.slower: list[float] = []
        """By what factors, since the last judgement."""
        self.alone = False
        """Whether a broadcast that is not compared was under way since then."""
        self.peak = 0
        """Most bytes that were on their way since the last judgement."""
        self.judged_ns = 0
        self.hurt = False

    def wants_alone(self, size: int) -> bool:
        """Whether the next broadcast of this size is to be measured undisturbed."""
        return (len(self.alone_ns.get(size, ())) < ALONE_MIN
                or self.since_alone[size] >= ALONE_EVERY)

    def measured(self, flight: Flight) -> None:
        took_ns = flight.typical_ns
        self.alone |= flight.kind is not FlightKind.USUAL
        if took_ns is None or flight.kind is FlightKind.NOTHING:
            return
        if flight.kind is FlightKind.ALONE:
            self.alone_ns.setdefault(flight.size, deque(maxlen=ALONE_MAX)).append(took_ns)
            self.since_alone[flight.size] = 0
        else:
            self.since_alone[flight.size] += 1
            alone = sorted(self.alone_ns[flight.size])
            self.slower.append(took_ns / max(alone[len(alone) // 4], 1))

    # rule 15.2
    def judge(self, now_ns: int, wanted: bool) -> None:
        """Grow or shrink, once there is something to go by. `wanted`: more would be used."""
        waited_ns, count = now_ns - self.judged_ns, len(self.slower)
        if count >= 8 or (count and waited_ns >= 250 * MS):
            slower = median(self.slower)
            self.hurt = slower > SHRINK_ABOVE
            if self.hurt:
                self.bytes = self.ceiling = max(FLOOR_BYTES, min(self.bytes, self.peak) // 2)
            elif slower < GROW_BELOW:
                self.ceiling = min(CEILING_BYTES, self.ceiling * 5 // 4)
                self._grow(wanted)
        elif not (count or self.hurt) and waited_ns >= 100 * MS:
            if not self.alone:
                self._grow(wanted)
        else:
            return
        self.judged_ns = now_ns
        self.slower.clear()
        self.alone, self.peak = False, 0

    def _grow(self, wanted: bool) -> None:
        if wanted or 2 * self.peak >= self.bytes:
            self.bytes = min(2 * self.bytes, self.ceiling)


class CatchUps:
    """The line of those who catch up. `limit`: how many at once, None for as many as do no harm.

    versions(), images(group): of every fragment, as it is now; nothing if that ends the group.
    notice(group, code, text): tells a learner what it waits for. stalled(group, is_still): what
    the rounds are to know of a turn. A member that has no sign of progress for
    `write_timeout_ns` is lost, as one is that takes no bytes.

    Large: the line, the broadcasts under way and the one timer belong together.
    """

    def __init__(self, loop: Loop, log: Log, *, versions: Callable[[], list[int]],
                 images: Callable[[Group], list[Image]], limit: int | None,
                 write_timeout_ns: int, notice: Callable[[Group, NoticeCode, str], None],
                 stalled: Callable[[Group, bool], None]):
        self.loop, self.log, self.versions, self.images = loop, log, versions, images
        self.limit, self.write_timeout_ns, self.notice = limit, write_timeout_ns, notice
        self.stalled = stalled
        self.line: dict[Group, Turn] = {}
        self.flights: list[Flight] = []
        self.headroom = Headroom()
        self.busy_since_ns = self.quiet_until_ns = self.tries = self.looked_ns = 0
        self.timer: Timer | None = None
        self.tick_ns = TICK_NS

    # ---- what the run does -----------------------------------------------------------------------

    def ask(self, group: Group) -> None:
        """A member is to be caught up: at once if it lacks nothing, else in its turn."""
        turn = self.line.get(group)
        if turn is not None:
            turn.still = False  # of this catch-up nothing is known yet
        if (turn is not None and turn.begun) or group.outbox.has_taken(self.versions()):
            self._queue(group)
            group.pump()
            return
        for other in list(self.line.values()):  # of a connection that has a successor
            if other.group.learner == group.learner and not other.begun:
                self.leave(other.group)
        turn = self._turn(group)
        members = {each: other for each, other in self.line.items() if not other.reads}
        self.line = members | {group: turn} | self.line
        self._serve()
        if not (turn.begun or group.ended):
            ahead = [other.learner for other in members if other in self.line]
            self.log.info("catch-up waits for its turn", learner=group.learner,
                          generation=group.generation, behind=named(ahead))

    # rule 15.4
    def read(self, group: Group, queue: Callable[[], object]) -> None:
        """`queue()` gives a reader something to send, which goes in its turn."""
        if group in self.line:
            queue()
        else:
            turn = self._turn(group, reads=True)
            queue()
            self.line[group] = turn
        self._serve()

    def _turn(self, group: Group, reads: bool = False) -> Turn:
        """A place for somebody who is not in the line: nothing goes to him before it is his."""
        group.grant(0)
        now_ns = self.loop.now_ns()
        if not self.line:
            self.headroom.judged_ns = now_ns
        return Turn(group, now_ns, reads)

    def waits(self, group: Group) -> bool:
        """Whether it is sent nothing before its turn."""
        turn = self.line.get(group)
        return turn is not None and not turn.begun

    def pulled(self, group: Group) -> None:
        """A round waits for this member, so it is served like any other."""
        if group in self.line and group.outbox.awaited():
            group.grant(-1)

    def merging(self, size: int) -> None:
        """A fragment of this size is being merged: its broadcast comes soon."""
        if self.line and self.headroom.wants_alone(size):
            self.quiet_until_ns = self.loop.now_ns() + PAUSE_NS
            self._serve()

    def broadcast(self, size: int, groups: Iterable[Group],
                  bytes_of: Callable[[Group], int]) -> None:
        """A fragment of this size, `bytes_of` for each, is queued for these, who have it first."""
        training = [group for group in groups if group not in self.line] if self.line else []
        if training:
            now_ns = self.loop.now_ns()
            step = -(-len(training) // SAMPLE)
            kind = self._kind(size, now_ns)
            sample = {group: bytes_of(group) for group in training[::step]}
            self.flights.append(Flight(size, sample, now_ns, kind))
            self._serve()

    def _kind(self, size: int, now_ns: int) -> FlightKind:
        """Of the broadcast that begins now. The pause goes on until the way is free, if the next
        one comes soon; after some tries the time is taken from when it is."""
        if not self.headroom.wants_alone(size):
            return FlightKind.USUAL
        if self._on_the_way() > TAIL_BYTES and self.tries < TRIES:
            self.tries += 1
            self.quiet_until_ns = now_ns + NEXT_NS
            return FlightKind.NOTHING
        self.tries = self.quiet_until_ns = 0
        return FlightKind.ALONE

    def _on_the_way(self) -> int:
        return sum(turn.group.in_flight() for turn in self.line.values() if turn.begun)

    def leave(self, group: Group) -> None:
        """It takes no turn any more: it has gone, or what it is sent now waits for nobody."""
        if self.line.pop(group, None) is not None:
            group.grant(-1)
            self._serve()

    def close(self) -> None:
        """The run ends: what is queued may go."""
        if self.timer is not None:
            self.timer.cancel()
        line, self.line = self.line, {}
        self.flights.clear()
        for group in line:
            group.grant(-1)

    # ---- the line --------------------------------------------------------------------------------

    @property
    # rule 15.1
    def at_once(self) -> int:
        """How many may be sent side by side."""
        return self.limit or max(1, self.headroom.bytes // SHARE_BYTES)

    def _serve(self) -> None:
        """Whose turn it is begins, and has leave to send what the moment admits."""
        now_ns = self.loop.now_ns()
        at_once = min(self.at_once, len(self.line))
        is_open = self._is_open(now_ns)
        share = max(self.headroom.bytes // max(at_once, 1), LEAST_SHARE_BYTES)
        moved, on_the_way = bool(self.flights), 0
        for place, turn in enumerate(list(self.line.values())):
            group = turn.group
            if self.line.get(group) is not turn:  # gone by what a grant to another one led to
                continue
            if place < at_once and not turn.begun:
                self._begin(turn, now_ns)
            if not turn.begun:
                self._tell_waiting(turn, place, now_ns)
                continue
            in_flight = group.in_flight()
            on_the_way += in_flight
            moved |= turn.acknowledged != group.sent - in_flight
            turn.look(group.sent - in_flight, not (in_flight or group.blocked), now_ns)
            if turn.reads and place < at_once:
                turn.tell_ns = now_ns + TURN_SAID_NS
            elif turn.reads and not group.outbox.empty:
                self._tell_waiting(turn, place, now_ns)
            if group.outbox.awaited() and not turn.reads:
                group.grant(-1)
            else:
                may_send = place < at_once and is_open
                group.grant(max(share - in_flight, 0) if may_send else 0)
        self.headroom.peak = max(self.headroom.peak, on_the_way)
        self.tick_ns = TICK_NS if moved else min(2 * self.tick_ns, IDLE_TICK_NS)
        self._arm(now_ns)

    # rule 15.7
    def _tell_waiting(self, turn: Turn, place: int, now_ns: int) -> None:
        """Its learner, or reader, sees nothing come, and is to know why."""
        if now_ns < turn.tell_ns:
            return
        turn.tell_ns = now_ns + TURN_SAID_AGAIN_NS
        group, waited_ns = turn.group, now_ns - turn.since_ns
        in_front = list(self.line.values())[:place]
        members = [other.group.learner for other in in_front if not other.reads]
        ahead = named(members)
        if turn.reads:
            readers = place - len(members)
            ahead = " and ".join(
                [f"learner{'s' * (len(members) > 1)} {ahead}"] * bool(members)
                + [f"{readers} reader{'s' * (readers > 1)}"] * bool(readers))
            self.log.info("reader waits for its turn", peer=group.control.peer, behind=ahead,
                          waited_s=waited_ns // 10**9)
            self.notice(group, NoticeCode.OTHER, (
                f"this reader waits for its turn to be sent a cut, behind {ahead}, without a "
                "limit; those who were there before, and learners, go first"))
            return
        self.log.info("catch-up waits for its turn", learner=group.learner,
                      generation=group.generation, behind=ahead, waited_s=waited_ns // 10**9)
        self.notice(group, NoticeCode.OTHER, (
            f"learner {group.learner} waits for its turn to be sent the model, behind {ahead}, "
            "without a limit; the rounds go on without it meanwhile; more catch-ups side by side "
            "(--max-concurrent-catchups) slow the rounds down"))

    def _begin(self, turn: Turn, now_ns: int) -> None:
        """Queue the current versions; what was committed since the HELLO is in them."""
        turn.begun, turn.progress_ns, turn.lively_ns = True, now_ns, now_ns
        group = turn.group
        if now_ns > turn.since_ns:
            self.log.info("catch-up begins after its wait", learner=group.learner,
                          generation=group.generation,
                          waited_s=round((now_ns - turn.since_ns) / 1e9, 3))
        self._queue(group)

    def _queue(self, group: Group) -> None:
        images = self.images(group)
        if images:  # otherwise there was no memory for it, and it has ended
            group.outbox.catch_up(images)

    def _is_open(self, now_ns: int) -> bool:
        """Whether catch-ups may send: nobody's broadcast is under way, or has been for long."""
        if now_ns < self.quiet_until_ns:
            return False
        if not self.flights:
            self.busy_since_ns = now_ns
            return True
        if any(flight.kind is FlightKind.ALONE and now_ns - flight.begun_ns < PAUSE_NS
               for flight in self.flights):
            return False
        return (now_ns - self.busy_since_ns) % (SHIELD_NS + SLICE_NS) >= SHIELD_NS

    def _arm(self, now_ns: int) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if self.line:
            self.timer = self.loop.call_at(now_ns + self.tick_ns, self._tick)
        else:
            self.flights.clear()

    def _tick(self) -> None:
        """Look at what has arrived, who is through and who is stuck; then serve on."""
        now_ns = self.loop.now_ns()
        flights = self.flights
        for flight in flights:
            if flight.kind is FlightKind.ALONE and not flight.free_ns and (
                    self._on_the_way() <= TAIL_BYTES):
                flight.free_ns = max(self.looked_ns, flight.begun_ns)
        self.looked_ns = now_ns
        self.flights = [flight for flight in flights if not flight.landed(now_ns)]
        for flight in flights:
            if flight not in self.flights:
                self.headroom.measured(flight)
        for turn in list(self.line.values()):
            outbox = turn.group.outbox
            if turn.group.ended or (outbox.empty if turn.reads else (
                    turn.begun and not outbox.catching_up and not outbox.trailing)):
                self.leave(turn.group)
        self._pass_on(now_ns)
        self.headroom.judge(now_ns, len(self.line) > self.at_once)
        self._serve()
        self._tell_stalled(now_ns)

    def _tell_stalled(self, now_ns: int) -> None:
        """The rounds are to know whose catch-up stands still, and whose moves again: rule 2.8."""
        for turn in list(self.line.values()):
            is_still = turn.begun and now_ns - turn.lively_ns >= SILENT_NS
            if is_still != turn.still and not turn.reads:
                turn.still = is_still
                self.stalled(turn.group, is_still)

    # rule 15.3
    def _pass_on(self, now_ns: int) -> None:
        """Turns without progress go to the next in line, and at last the connection goes."""
        for place, turn in enumerate(list(self.line.values())):
            group, stuck_ns = turn.group, now_ns - turn.progress_ns
            if place >= self.at_once:
                turn.front_ns = now_ns  # what did not move behind others may move in front
            if not turn.begun or stuck_ns < STALLED_NS:
                continue
            if stuck_ns >= self.write_timeout_ns:
                group.on_lost(group.control, "no queued byte could be sent for "
                                             f"{self.write_timeout_ns / 1e9:g} s")
            elif (now_ns - turn.front_ns >= STALLED_NS
                    and place < self.at_once < len(self.line)):
                turn.front_ns = now_ns
                self.log.warning("catch-up makes no progress: its turn goes to the next",
                                 learner=group.learner, generation=group.generation)
                self.line[group] = self.line.pop(group)


def named(learners: list[int]) -> str:
    """The first of them by id, and how many more."""
    more = len(learners) - NAMED
    return ", ".join(map(str, learners[:NAMED])) + (f" and {more} more" if more > 0 else "")
