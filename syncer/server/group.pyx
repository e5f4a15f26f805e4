"""The sockets of one learner's connection as one: frames in, its outbox out over the streams.

It must not know rounds, and decides only how bytes are shared out over streams.
"""

from functools import partial

from syncer.server.conn cimport Channel, Owner
from syncer.server.outbox cimport Bulk, Outbox

from syncer.tcp import link
from syncer.wire.frames import Reassembly
from syncer.wire.limits import Limits

# One turn of a group sends at most this much, so that a fast peer cannot starve others.
cdef Py_ssize_t WRITE_TURN_BYTES = 8 * 1024 * 1024

# A piece of no more is short: what is small may go behind it in the same call.
cdef Py_ssize_t SHORT_BYTES = 64 * 1024

# A grant is shared out over the streams in parts of no less, but for what is left.
cdef Py_ssize_t LEAST_GRANT_BYTES = 16 * 1024


cpdef tuple those_there(dict groups, members):
    """The groups of these members that have not ended, and the members without one."""
    cdef Group group
    cdef list found = [], missing = []
    for member in members:
        group = groups.get(member)
        if group is None or group.ended:
            missing.append(member)
        else:
            found.append(group)
    return found, missing


def broadcast_to(list groups, image):
    """Queue a version for each of them."""
    cdef Group group
    for group in groups:
        group.outbox.broadcast(image)


def pull_from(list groups, Py_ssize_t fragment, bytes frame):
    """Queue a PULL_REQ for each of them."""
    cdef Group group
    for group in groups:
        group.outbox.pull(fragment, frame)


def pump_each(groups):
    """Send what was queued for them."""
    cdef Group group
    for group in groups:
        group.pump()


cdef class Reports:
    """Who hears of a group. All are called in the loop's thread."""

    cpdef object frame(self, Group group, int kind, object payload):
        """One complete frame. Raises RemoteProtocolError to break the group."""
        raise NotImplementedError

    cpdef object arriving(self, Group group, object message):
        """Who takes what comes of a message in pieces (`frames.Sink`); None: ask again."""

    cpdef object caught_up(self, Group group, tuple delivered):
        """A catch-up has ended with these versions sent."""
        raise NotImplementedError

    cpdef object ended(self, Group group, str reason, str refusal):
        """Once, at the end. With a refusal the channels are still open: they need a `Farewell`."""
        raise NotImplementedError


cdef class Group(Owner):
    """The control socket and the data sockets of one (learner, generation).

    in_order: tensors go out over the control socket alone, so that nothing overtakes them.
    limits: of what may come in, if not what a learner of this layout may send.

    Large: half of its attributes say who the group is, the others what is under way on it.
    """

    def __init__(self, Channel control, hello, Reports reports, bint in_order=False, limits=None):
        self.loop = control.loop
        self.control = control
        self.hello = hello
        self.learner, self.generation = hello.learner, hello.generation
        self.reports = reports
        self.data = {}
        self.streams = [control]
        self.outbox = Outbox(len(hello.layout.fragments))
        self.in_order = in_order
        self.limits = limits or Limits.for_server(
            hello.layout, hello.dtype, extended=self.extended)
        self.reassembly = Reassembly(self.limits, partial(reports.arriving, self))
        self.heard_ns = self.loop.now_ns()
        control.owner = self

    @property
    def extended(self):
        """Whether it has introduced itself (wire 19.1)."""
        return self.hello.extension is not None

    @property
    def sockets(self):
        """How many it may have, by its HELLO."""
        return 1 + self.hello.num_streams

    @property
    def channels(self):
        return [self.control, *self.data.values()]

    def attach(self, index, Channel channel):
        """A data socket joins; from the next piece on it takes its share."""
        if self.ended:  # by what its control socket brought meanwhile
            channel.close()
            return
        self.data[index] = channel
        if not self.in_order:
            self.streams = [self.data[i] for i in sorted(self.data)]
            if self.extended:
                self.outbox.stripes = len(self.streams)
        channel.owner = self
        if self.throttled:
            channel.grant(0)
        if self.control.paused:
            channel.pause()
        self.pump()

    # -------------------------------------------------------------------------- what came in
    cpdef object on_bytes(self, Channel channel, Py_ssize_t count):
        self.heard_ns = self.loop.now_ns()

    cpdef object on_frame(self, Channel channel, int kind, object payload):
        self.reports.frame(self, kind, payload)

    cpdef object on_broken(self, Channel channel, str text):
        self.end(text, text)

    cpdef object on_lost(self, Channel channel, str reason):
        if channel is not self.control:
            # Of sockets that were closed one after the other the last may be ready first: what was
            # said before, on the control socket, is heard all the same. It may be a FINAL_ACK.
            self.control.read_now()
        self.end(reason)

    def pause(self):
        for channel in self.channels:
            channel.pause()

    def resume(self):
        for channel in self.channels:
            channel.resume()
            if self.control.paused:
                return  # the first channels' waiting frames were enough to pause it again

    # -------------------------------------------------------------------------- what goes out
    cpdef object on_sent(self, Channel channel, Bulk bulk):
        if bulk is not None:
            self.outbox.piece_sent(bulk)
        if not self.pumping:
            self.pump()

    cpdef object on_writable(self, Channel channel):
        self.pump()

    cpdef object pump(self):
        """Give idle streams their next piece, and the control socket its small frames.

        Pieces go round robin over the streams that can take one; a stream whose kernel buffer is
        full is passed over until it drains.
        """
        cdef Py_ssize_t budget = WRITE_TURN_BYTES, count
        cdef Channel stream
        if self.pumping or self.ended:
            return
        self.pumping = True
        try:
            while not self.ended:
                if (self.streams[0] is self.control and budget > 0 and self.control.idle()
                        and not self.throttled):
                    count = self._send_together()
                    budget -= count
                    if count == 0:
                        break
                    continue
                if not self.control.out:
                    small = self.outbox.take_small()
                    if small:
                        self.control.send([b"".join(small)])
                        continue
                stream = self._idle_stream()
                if stream is None:
                    break
                if budget <= 0:
                    if self.outbox.has_pieces():
                        stream.send_later()
                    break
                piece = self.outbox.next_piece()
                if piece is None:
                    break
                self.turn += 1
                bulk, buffers = piece
                budget -= len(buffers[0]) + len(buffers[1])
                stream.send(buffers, bulk)
        finally:
            self.pumping = False
        self._report()

    cdef Py_ssize_t _send_together(self) except -1:
        """Where there is one socket, one call for what can go: small frames, the next piece, and
        pulls, which come behind a short piece and before a long one. Returns its bytes, 0 for
        nothing."""
        cdef list lead = self.outbox.take_frames(), buffers, behind = []
        cdef bytes front, back
        cdef Py_ssize_t count = 0
        cdef Bulk bulk = None
        piece = self.outbox.next_piece()
        if piece is None:
            buffers = []
            lead = lead + self.outbox.take_pulls()
        else:
            bulk, buffers = piece
            count = len(buffers[0]) + len(buffers[1])
            if len(buffers[1]) <= SHORT_BYTES:
                behind = self.outbox.take_pulls(bulk)
            else:
                lead = lead + self.outbox.take_pulls()
        if lead:
            front = b"".join(lead)
            count += len(front)
            buffers = [front, *buffers]
        if behind:
            back = b"".join(behind)
            count += len(back)
            buffers = [*buffers, back]
        if count:
            self.control.send(buffers, bulk)
        return count

    cpdef object grant(self, Py_ssize_t count):
        """So many bytes of tensors may go on all streams from now on; < 0: as many as fit.

        What a socket has begun goes first, also on the control socket, which has no more pieces
        once data sockets are there. One that joins later has no leave before the next grant.
        """
        cdef Py_ssize_t share, part
        cdef Channel stream
        if self.ended:
            return
        self.throttled = count >= 0
        share = max(count // len(self.streams), min(count, LEAST_GRANT_BYTES))
        begun = [stream for stream in self.channels if stream.unsent]
        pumping, self.pumping = self.pumping, True  # not before every stream knows its part
        try:
            for stream in begun + [stream for stream in self.streams if stream not in begun]:
                part = min(share, count)
                count -= max(part, 0)
                stream.grant(part)
                if self.ended:
                    return
        finally:
            self.pumping = pumping
        self.pump()

    cpdef Py_ssize_t in_flight(self):
        """Bytes that were given to the kernel and that the peer has not acknowledged."""
        cdef Py_ssize_t count = 0
        for channel in self.channels:
            if not channel.closed:
                count += self.loop.unacknowledged(channel.sock)
        return count

    cdef Channel _idle_stream(self):
        cdef Py_ssize_t count = len(self.streams), i
        cdef Channel stream
        for i in range(count):
            stream = self.streams[(self.turn + i) % count]
            if stream.idle():
                self.turn = (self.turn + i) % count
                return stream
        return None

    cdef object _report(self):
        if not self.ended and self.outbox.catching_up:
            delivered = self.outbox.caught_up()
            if delivered is not None:
                self.reports.caught_up(self, delivered)

    @property
    def blocked(self):
        """Whether a kernel buffer was full when it was last tried."""
        return any([channel.blocked for channel in self.channels])

    @property
    def sent(self):
        """Bytes that were given to the kernel, since the beginning."""
        return sum([channel.sent for channel in self.channels])

    @property
    def link(self):
        """What its sockets are seen to carry, or were when it ended."""
        return self._link or link([channel.sock for channel in self.channels])

    @property
    def flushed(self):
        """Everything queued is with the kernel."""
        return self.ended or (
            self.outbox.empty and not any(channel.unsent for channel in self.channels))

    # ------------------------------------------------------------------------------ life cycle
    cpdef object end(self, str reason, str refusal=None):
        """End the whole group: at once, or with ERROR `refusal` on the control socket first."""
        if self.ended:
            return
        self.ended = True
        self._link = self.link
        self.outbox.drop()
        self.reassembly = None  # half-received messages go now, not when the collector comes
        if refusal is None:
            for channel in self.channels:
                channel.close()
        self.reports.ended(self, reason, refusal)
