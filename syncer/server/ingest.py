"""Frames of admitted learners: checked, decoded on the workers, and handed on as events in order.

It must not know rounds. Bytes are judged here only as bytes: lengths, ids, and whether every value
is finite.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from syncer import kernels
from syncer.core import events
from syncer.errors import NoMemory, RemoteProtocolError
from syncer.merge.buffers import BufferPool
from syncer.protocol import DTYPE_BF16, DTYPE_F32, DTYPE_Q4, Msg, bulk_dtype
from syncer.server import workers
from syncer.server.conn import Channel
from syncer.server.decoded import Decode, Decoded
from syncer.server.group import Group, Reports
from syncer.server.workers import Job, Workers
from syncer.wire import messages
from syncer.wire.encode import encode_error
from syncer.wire.extended import LearnerReport, parse_report

DECODING_MAX = 4
"""Payloads of one connection that are being decoded, or wait to be handed on behind one that is;
at the limit its sockets are not read."""
DECODERS: dict[int, Decode] = {
    DTYPE_F32: kernels.decode_f32, DTYPE_BF16: kernels.decode_bf16, DTYPE_Q4: kernels.decode_q4,
}


class Pending:
    """A payload on its way through the workers; `event` makes its event once it is decoded."""

    __slots__ = ("decoded", "event", "finished", "name", "refusal", "tensor")

    def __init__(self, name: str, tensor: memoryview, decoded: Decoded,
                 event: Callable[[Decoded], events.Event]):
        self.name, self.decoded, self.event = name, decoded, event
        self.tensor: memoryview | None = tensor
        """The wire bytes, until they are decoded."""
        self.finished = False
        self.refusal: str | None = None


class Intake:
    """What `Ingest` keeps per group."""

    __slots__ = ("broken", "over", "pending")

    def __init__(self) -> None:
        self.pending: deque[Pending] = deque()
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

    def __init__(self, helpers: Workers, pool: BufferPool, threads: int, *,
                 handle: Callable[[events.Event], None],
                 left: Callable[[Group, str, str | None], None],
                 say_farewell: Callable[[list[Channel], Channel, list[bytes]], None],
                 report: Callable[[Group, LearnerReport], None], keep_wire: bool = False):
        self.workers, self.pool, self.threads = helpers, pool, threads
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
        hello = group.hello
        who = hello.learner, hello.generation
        about = hello.learner, hello.layout, hello.dtype
        if kind == Msg.PUSH_FRAGMENT:
            self._push(group, messages.parse_push(payload, *about))
        elif kind == Msg.INIT_PARAMS:
            self._init(group, messages.parse_init(payload, *about))
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
        group.work.over = reason, refusal
        self._hand_on(group)

    def _init(self, group: Group, init: messages.Init) -> None:
        who = group.learner, group.generation
        decode = DECODERS[bulk_dtype(group.hello.dtype)]
        tensor, threads = init.tensor, self.threads
        decoded = self._decoded(group, init.fragment)

        def run() -> int:
            if decoded.digest is None:
                decoded.digest = kernels.sha256(tensor)
            return decode(tensor, decoded.buffer, False, threads)

        pending = Pending(f"INIT_PARAMS fragment {init.fragment}", tensor, decoded,
                          lambda payload: events.Init(*who, init.fragment, payload))
        self._submit(group, pending, run, hash_pair)

    def _push(self, group: Group, push: messages.Push) -> None:
        generation, decode = group.generation, DECODERS[group.hello.dtype]
        tensor = push.delta
        decoded = self._decoded(group, push.fragment, tensor if self.keep_wire else None, decode)
        head = push[1:-1]
        bad: int | None = None
        if decoded.numel <= workers.INLINE_ELEMENTS_MAX:
            bad = decode(tensor, decoded.buffer, True, 1)
            if bad < 0 and not group.work.pending:  # nothing to wait for: as nearly always
                self.handle(events.Push(push.learner, generation, *head, decoded))
                return

        del tensor  # no job holds the bytes that are decoded

        def run() -> int:
            return bad if bad is not None else decode(pending.tensor, decoded.buffer, True, 1)

        pending = Pending(f"PUSH_FRAGMENT fragment {push.fragment}", push.delta, decoded,
                          lambda payload: events.Push(push.learner, generation, *head, payload))
        self._submit(group, pending, run, None, inline=bad is not None)

    def _decoded(self, group: Group, fragment: int, tensor: memoryview | None = None,
                 decode: Decode | None = None) -> Decoded:
        """Memory for a payload. Raises NoMemory, which ends the connection it came on."""
        try:
            return Decoded(self.pool, group.hello.layout.fragments[fragment].numel, tensor, decode)
        except MemoryError as error:
            raise NoMemory(f"cannot decode a payload: {error}: try again later") from None

    def _submit(self, group: Group, pending: Pending, run: Callable[[], int],
                pair: Callable[[Pending, Pending], None] | None, inline: bool = False) -> None:
        intake: Intake = group.work
        intake.pending.append(pending)
        if len(intake.pending) >= DECODING_MAX:
            group.pause()  # small ones as well: each waits for its turn behind a large one
        if inline:
            self._done(group, pending, run(), None)
            return
        self.workers.submit(Job(run, lambda *done: self._done(group, pending, *done), pair,
                                pending))

    def _done(self, group: Group, pending: Pending, bad: int | None,
              error: BaseException | None) -> None:
        if error is not None:
            raise error  # no peer can cause it
        pending.finished = True
        pending.tensor = None
        assert bad is not None  # one of both is None
        if bad >= 0:
            pending.refusal = (f"{pending.name} decodes to a value that is not finite (or has a "
                               f"negative q4 scale) at element {bad}")
        self._hand_on(group)

    def _hand_on(self, group: Group) -> None:
        """Events of the payloads that are decoded, in the order in which they arrived."""
        intake: Intake = group.work
        waiting = intake.pending
        while waiting and waiting[0].finished:
            pending = waiting.popleft()
            if intake.broken or pending.refusal is not None:
                pending.decoded.release()
                intake.broken = True
                group.end(pending.refusal or "", pending.refusal)
            else:
                self.handle(pending.event(pending.decoded))
        if intake.over is not None:
            if not waiting:
                (reason, refusal), intake.over = intake.over, None
                self.left(group, reason, refusal)
        elif not group.ended and group.control.paused and len(waiting) < DECODING_MAX:
            group.resume()


def hash_pair(first: Pending, second: Pending) -> None:
    """Digests of two INIT payloads in one go: two interleaved streams cost less than one by one."""
    assert first.tensor is not None  # neither has been decoded
    assert second.tensor is not None
    digests = kernels.sha256_pair(first.tensor, second.tensor)
    first.decoded.digest, second.decoded.digest = digests
