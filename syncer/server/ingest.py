"""Frames of admitted learners: checked, decoded on the workers, and handed on as events in order.

It must not know rounds. Bytes are judged here only as bytes: lengths, ids, and whether every value
is finite.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from syncer.core import events
from syncer.errors import NoMemory, RemoteProtocolError
from syncer.merge.buffers import BufferPool
from syncer.protocol import HEADER_BYTES, Msg, bulk_dtype, tensor_bytes
from syncer.server import workers
from syncer.server.arrival import Arrival
from syncer.server.arrivals import Arrivals
from syncer.server.conn import Channel
from syncer.server.decoded import Decoded, memory_for
from syncer.server.group import Group, Reports
from syncer.server.small_push import small_push
from syncer.server.workers import Workers
from syncer.wire import messages
from syncer.wire.encode import encode_error
from syncer.wire.extended import LearnerReport, parse_report
from syncer.wire.frames import Partial, Sink
from syncer.wire.payload import Payload

LATER = Sink()
"""For messages that are looked at when they are whole."""
DECODING_MAX = 4
"""Payloads of one connection that are being decoded, or wait to be handed on behind one that is;
at the limit its sockets are not read."""
PUSH_HEADS_BYTES = HEADER_BYTES + messages.PUSH_HEAD.size
"""What must be there of a message before it is known what it says, but for its tensor."""


class Intake:
    """What `Ingest` keeps per group."""

    __slots__ = ("begun", "broken", "over", "pending")

    def __init__(self) -> None:
        self.begun: dict[Payload, tuple[Partial, Arrival]] = {}
        """By their memory: messages that come in pieces, and the tensor of each."""
        self.pending: deque[Arrival] = deque()
        """Whole messages, in their order."""
        self.broken = False
        """A payload was refused: those behind it are dropped."""
        self.over: tuple[str, str | None] | None = None
        """Reason and refusal of the group's end, to be reported behind its last payload."""


class Ingest(Reports):
    """Turns what groups report into events.

    `handle` takes the events, `report` what learners report; `left(group, reason, refusal)` is
    called once everything of a group was handed on, `say_farewell(channels, main, frames)` for a
    group that is told off.
    """

    def __init__(self, helpers: Workers, pool: BufferPool, *,
                 handle: Callable[[events.Event], None],
                 left: Callable[[Group, str, str | None], None],
                 say_farewell: Callable[[list[Channel], Channel, list[bytes]], None],
                 report: Callable[[Group, LearnerReport], None], keep_wire: bool = False):
        self.arrivals = Arrivals(helpers, self._hand_on)
        self.pool = pool
        self.handle, self.left, self.say_farewell = handle, left, say_farewell
        self.report, self.keep_wire = report, keep_wire
        """A late push may be parked: keep its bytes until the scheduler has judged it."""
        self.closed = False

    def close(self) -> None:
        """The run has ended: what still comes in is not looked at."""
        self.closed = True

    def caught_up(self, group: Group, delivered: tuple[int, ...]) -> None:
        self.handle(events.CaughtUp(group.learner, group.generation, delivered))

    def frame(self, group: Group, kind: int, payload: memoryview) -> None:
        """One frame of a group. Raises RemoteProtocolError with the text of the ERROR."""
        if self.closed:
            return
        if kind == Msg.PUSH_FRAGMENT and not (group.work.begun or group.work.pending):
            push = small_push(group, payload, self.pool, self.keep_wire)
            if push is not None:
                self.handle(push)
                return
        hello = group.hello
        who = hello.learner, hello.generation
        if kind in (Msg.PUSH_FRAGMENT, Msg.INIT_PARAMS):
            self._tensor(group, kind, payload)
        elif kind == Msg.HEARTBEAT:
            heartbeat = messages.parse_heartbeat(payload, hello.learner)
            self.handle(events.Heartbeat(*who, heartbeat.local_step))
        elif kind == Msg.FINAL_ACK:
            self.handle(events.FinalAck(*who, messages.parse_final_ack(payload).step))
        elif kind == Msg.BUDGET_DONE:
            self.handle(events.BudgetDone(*who, messages.parse_budget_done(payload).steps))
        elif kind == Msg.REPORT:
            self.report(group, parse_report(payload))
        else:
            # The limits of an admitted group let no other type through its reader.
            raise RemoteProtocolError(f"unexpected message type {kind}")  # impossible: the limits

    def ended(self, group: Group, reason: str, refusal: str | None) -> None:
        """The sockets are gone; what they brought in full still counts, and is handed on first."""
        if refusal is not None:
            self.say_farewell(group.channels, group.control, [encode_error(refusal)])
        self._drop_begun(group)
        group.work.over = reason, refusal
        self._hand_on(group)

    def _drop_begun(self, group: Group) -> None:
        for message, arrival in group.work.begun.values():
            self.arrivals.drop(arrival)
            message.sink = LATER
        group.work.begun.clear()

    def forget(self, group: Group) -> None:
        """Nothing is computed any more: what is no event by now will not be one, and holds no
        memory."""
        self._drop_begun(group)
        group.work.pending.clear()

    # ------------------------------------------------------------------------------- tensors
    def arriving(self, group: Group, message: Partial) -> Sink | None:
        """Who decodes its tensor while it comes; None: it is too early to say.

        Whatever is wrong with the message is said when it is whole.
        """
        if message.total <= tensor_bytes(workers.INLINE_ELEMENTS_MAX, group.hello.dtype):
            return LATER
        begun = group.work.begun
        if self.closed or message.there < PUSH_HEADS_BYTES or len(begun) >= DECODING_MAX:
            return None
        try:
            arrival = self._arrival(group, message.kind, message.inside)
        except NoMemory:
            return None  # there may be some when more has come
        except RemoteProtocolError:
            return LATER
        if arrival is None:
            return LATER
        self.arrivals.expect(arrival)
        begun[message.payload] = message, arrival
        return arrival

    def _arrival(self, group: Group, kind: int | None, payload: memoryview) -> Arrival | None:
        """The tensor of a message, if it has one."""
        if kind == Msg.INIT_PARAMS:
            return self._init(group, payload)
        if kind != Msg.PUSH_FRAGMENT:
            return None
        hello = group.hello
        return self._push(group, messages.parse_push(
            payload, hello.learner, hello.layout, hello.dtype))

    def _tensor(self, group: Group, kind: int, payload: memoryview) -> None:
        """A whole INIT or PUSH: if it is not decoded yet, it waits for that."""
        intake: Intake = group.work
        begun = None
        if intake.begun:
            begun = intake.begun.pop(payload.obj, None)  # type: ignore[call-overload]
        arrival = self._arrival(group, kind, payload) if begun is None else begun[1]
        assert arrival is not None  # both kinds have one
        intake.pending.append(arrival)
        if len(intake.pending) >= DECODING_MAX:
            group.pause()  # small ones as well: each waits for its turn behind a large one
        if not arrival.finished:
            self.arrivals.whole(arrival)
        if arrival.finished:
            self._hand_on(group)

    def _init(self, group: Group, payload: memoryview) -> Arrival:
        hello = group.hello
        dtype, who = bulk_dtype(hello.dtype), (hello.learner, hello.generation)
        init = messages.parse_init(payload, hello.learner, hello.layout, hello.dtype)
        decoded = self._decoded(group, init.fragment, init.tensor, dtype)
        fragment = init.fragment
        return Arrival(group, f"INIT_PARAMS fragment {fragment}", init.tensor, dtype,
                       decoded=decoded, initial=True,
                       event=lambda values: events.Init(*who, fragment, values))

    def _push(self, group: Group, push: messages.Push) -> Arrival:
        who, head, dtype = (push.learner, group.generation), push[1:-1], group.hello.dtype
        decoded = self._decoded(group, push.fragment, push.delta, dtype, self.keep_wire)
        return Arrival(group, f"PUSH_FRAGMENT fragment {push.fragment}", push.delta, dtype,
                       decoded=decoded,
                       event=lambda values: events.Push(*who, *head, values))

    def _decoded(self, group: Group, fragment: int, tensor: memoryview, dtype: int,
                 keep_wire: bool = False) -> Decoded:
        """Memory for a payload. Raises NoMemory, which ends the connection it came on."""
        numel = group.hello.layout.fragments[fragment].numel
        try:
            return memory_for(self.pool, numel, tensor, dtype, keep_wire)
        except MemoryError as error:
            raise NoMemory(f"cannot decode a payload: {error}: try again later") from None

    def _hand_on(self, group: Group) -> None:
        """Events of the payloads that are decoded, in the order in which they arrived."""
        intake: Intake = group.work
        waiting = intake.pending
        while waiting and waiting[0].finished:
            arrival = waiting.popleft()
            if intake.broken or arrival.bad >= 0:
                refusal = None if arrival.bad < 0 else (
                    f"{arrival.name} decodes to a value that is not finite (or has a negative q4 "
                    f"scale) at element {arrival.bad}")
                arrival.decoded.release()
                intake.broken = True
                group.end(refusal or "", refusal)
            else:
                self.handle(arrival.event(arrival.decoded))
        if intake.over is not None:
            if not waiting:
                (reason, refusal), intake.over = intake.over, None
                self.left(group, reason, refusal)
        elif not group.ended and group.control.paused and len(waiting) < DECODING_MAX:
            group.resume()
