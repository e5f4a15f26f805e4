"""Sockets: a channel reads frames and writes buffers, a group is the channels of one learner.

It moves bytes and says who did what; it must not know rounds, and decides only how bytes are shared
out over streams and when a peer has stopped reading.
"""

import errno
import os
import socket

from syncer.gather cimport advance

from syncer import tcp
from syncer.errors import RemoteProtocolError
from syncer.wire.frames import Reassembly
from syncer.wire.limits import Limits
from syncer.server.loop import READ as _READ, WRITE as _WRITE

cdef int READ = _READ
cdef int WRITE = _WRITE

# One readiness turn of a channel moves at most this much, so that a fast peer cannot starve others.
cdef Py_ssize_t READ_TURN_BYTES = 2 * 1024 * 1024
cdef Py_ssize_t READ_TURN_FRAMES = 256
cdef Py_ssize_t WRITE_TURN_BYTES = 8 * 1024 * 1024
cdef Py_ssize_t DISCARD_TURN_BYTES = 256 * 1024
cdef long long FAREWELL_NS = 2_000_000_000
FAREWELL_S = FAREWELL_NS / 1e9
"""Seconds that a peer gets to read its ERROR and close."""


cdef class Owner:
    """Reports of channels; the defaults ignore them."""

    cpdef object on_bytes(self, Channel channel, Py_ssize_t count):
        """`count` more bytes arrived."""

    cpdef object on_frame(self, Channel channel, int kind, object payload):
        """One complete frame. May pause the channel; raises RemoteProtocolError to break it."""

    cpdef object on_broken(self, Channel channel, str text):
        """The peer broke the protocol; `text` is what its ERROR has to say."""

    cpdef object on_lost(self, Channel channel, str reason):
        """The peer closed, the socket failed, or writing stalled."""

    cpdef object on_sent(self, Channel channel, Bulk bulk):
        """Everything given to `send` is with the kernel; `bulk` as given."""

    cpdef object on_writable(self, Channel channel):
        """The channel can take more."""


def configure(sock):
    """Non-blocking, and otherwise as the learners' sockets are."""
    sock.setblocking(False)
    tcp.configure(sock)


cdef class Channel(Handler):
    """One socket. Reads into its FrameReader; without one, what arrives is thrown away."""

    def __init__(self, Loop loop, sock, peer, Owner owner, reader, write_timeout_ns):
        self.loop = loop
        self.sock = sock
        self.peer = peer
        self.owner = owner
        self.reader = reader
        self.write_timeout_ns = write_timeout_ns
        self.out = []
        self._interest()

    def fileno(self):
        return self.sock.fileno()

    cpdef object ready(self, int events):
        if not self.closed and events & READ and not self.paused:
            self._read()
        if not self.closed and events & WRITE:
            self.again = False
            if self.blocked:
                self._flush()
            if not self.closed and not self.blocked:
                self.owner.on_writable(self)
            if not self.closed:
                self._interest()

    # -------------------------------------------------------------------------------- reading
    cdef object _read(self):
        cdef Py_ssize_t budget = READ_TURN_BYTES if self.reader is not None else DISCARD_TURN_BYTES
        cdef Py_ssize_t count, wanted, frames = 0
        while budget > 0 and not self.closed and not self.paused:
            buffer = self.loop.scratch if self.reader is None else self.reader.buffer()
            wanted = len(buffer)
            try:
                count = self.sock.recv_into(buffer)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self.owner.on_lost(self, _reason(error))
                return
            if count == 0:
                self.owner.on_lost(self, "closed by the peer")
                return
            budget -= count
            self.received += count
            self.loop.bytes_received += count
            if self.reader is not None:
                self.reader.received(count)
                self.owner.on_bytes(self, count)
                frames += self._take()
            if count < wanted or frames >= READ_TURN_FRAMES:
                return

    cdef Py_ssize_t _take(self) except -1:
        """Hand on the frames that are complete, until the channel is paused, broken or closed."""
        cdef Py_ssize_t frames = 0
        reader = self.reader
        try:
            while not (self.closed or self.paused or reader is None):
                frame = next(reader, None)
                if frame is None:
                    break
                frames += 1
                self.owner.on_frame(self, frame[0], frame[1])
                reader = self.reader
        except RemoteProtocolError as error:
            self.owner.on_broken(self, str(error))
        return frames

    cpdef object pause(self):
        """Stop reading: the peer's bytes stay in the kernel until `resume`."""
        self.paused = True
        self._interest()

    cpdef object resume(self):
        """Read again; frames that wait in the reader come first."""
        if not self.paused or self.closed:
            return
        self.paused = False
        self._take()
        self._interest()

    # -------------------------------------------------------------------------------- writing
    cdef bint idle(self):
        return not self.out and not self.again and not self.closed

    cpdef object send(self, list buffers, Bulk bulk=None):
        """Write buffers (whole frames) behind what is not sent yet; `owner.on_sent` when all is out."""
        self.out.extend(buffers)
        self.bulk = bulk
        if not self.blocked:
            self._flush()

    def send_later(self):
        """Ask for `owner.on_writable` in the loop's next turn."""
        self.again = True
        self._interest()

    cdef object _flush(self):
        cdef Py_ssize_t sent
        cdef Bulk bulk
        while self.out:
            try:
                sent = self.sock.sendmsg(self.out)
            except (BlockingIOError, InterruptedError):
                self._block()
                return
            except OSError as error:
                self.owner.on_lost(self, _reason(error))
                return
            self.loop.bytes_sent += sent
            self.progress_ns = self.loop.now_ns() if self.blocked else 0
            self._advance(sent)
        if self.blocked:
            self.blocked = False
            self._interest()
        bulk, self.bulk = self.bulk, None
        self.owner.on_sent(self, bulk)

    cdef object _advance(self, Py_ssize_t sent):
        """Drop what was sent from the front of `out`."""
        advance(self.out, sent)
        self.mid_frame = bool(self.out)

    cdef object _block(self):
        if self.blocked:
            return
        self.blocked = True
        self.progress_ns = self.loop.now_ns()
        if self.stall is None:
            self.stall = self.loop.call_at(self.progress_ns + self.write_timeout_ns, self._check)
        self._interest()

    def _check(self):
        """The stall timer: one is armed while a channel is blocked, not one per write."""
        self.stall = None
        if self.closed or not self.blocked:
            return
        deadline_ns = self.progress_ns + self.write_timeout_ns
        if self.loop.now_ns() >= deadline_ns:
            self.owner.on_lost(self, f"no queued byte could be sent for "
                                     f"{self.write_timeout_ns / 1e9:g} s")
        else:
            self.stall = self.loop.call_at(deadline_ns, self._check)

    def cut_queue(self):
        """Forget unsent frames, but not the rest of one that has begun: the peer needs its end."""
        if not self.mid_frame:
            self.out.clear()
        self.bulk = None

    @property
    def unsent(self):
        """Whether anything given to `send` has still to go."""
        return bool(self.out)

    # ------------------------------------------------------------------------------ life cycle
    cdef object _interest(self):
        """Tell the selector what this channel waits for."""
        cdef int mask = 0
        if self.closed:
            return
        if not self.paused:
            mask |= READ
        if self.blocked or self.again:
            mask |= WRITE
        if mask == self.mask:
            return
        if mask == 0:
            self.loop.unregister(self.sock)
        elif self.mask == 0:
            self.loop.register(self.sock, mask, self)
        else:
            self.loop.modify(self.sock, mask, self)
        self.mask = mask

    def half_close(self):
        """No more bytes will be sent."""
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the peer has reset it: there is nobody left to tell

    cpdef object close(self):
        if self.closed:
            return
        if self.mask:
            self.loop.unregister(self.sock)
            self.mask = 0
        self.closed = True
        if self.stall is not None:
            self.stall.cancel()
            self.stall = None
        self.out.clear()
        self.bulk = None
        self.reader = None
        self.sock.close()


cdef str _reason(error):
    if error.errno in (errno.ECONNRESET, errno.EPIPE):
        return "connection reset by the peer"
    return os.strerror(error.errno) if error.errno else str(error)


cdef class Group(Owner):
    """The control socket and the data sockets of one (learner, generation).

    `delegate` gets `frame(group, kind, payload)`, `caught_up(group, delivered)`, and once
    `ended(group, reason, refusal)`: with a refusal it has to close the group's channels in a
    `Farewell`. All are called in the loop's thread.
    """

    def __init__(self, Channel control, hello, delegate):
        self.loop = control.loop
        self.control = control
        self.hello = hello
        self.learner, self.generation = hello.learner, hello.generation
        self.delegate = delegate
        self.data = {}
        self.streams = [control]
        self.outbox = Outbox(len(hello.layout.fragments))
        self.limits = Limits.for_server(hello.layout, hello.dtype)
        self.reassembly = Reassembly(self.limits)
        control.owner = self

    @property
    def channels(self):
        return [self.control, *self.data.values()]

    def attach(self, index, Channel channel):
        """A data socket joins; from the next piece on it takes its share."""
        if self.ended:  # by what its control socket brought meanwhile
            channel.close()
            return
        self.data[index] = channel
        self.streams = [self.data[i] for i in sorted(self.data)]
        channel.owner = self
        if self.control.paused:
            channel.pause()
        self.pump()

    # -------------------------------------------------------------------------- what came in
    cpdef object on_frame(self, Channel channel, int kind, object payload):
        self.delegate.frame(self, kind, payload)

    cpdef object on_broken(self, Channel channel, str text):
        self.end(text, text)

    cpdef object on_lost(self, Channel channel, str reason):
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
        cdef Py_ssize_t budget = WRITE_TURN_BYTES
        cdef Channel stream
        if self.pumping or self.ended:
            return
        self.pumping = True
        try:
            while not self.ended:
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
                self.delegate.caught_up(self, delivered)

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
        self.outbox.drop()
        self.reassembly = None  # half-received messages go now, not when the collector comes
        if refusal is None:
            for channel in self.channels:
                channel.close()
        self.delegate.ended(self, reason, refusal)


cdef class Farewell(Owner):
    """Closes channels so that the last frame is not lost: flush, half-close, drain, then close.

    A socket closed with unread input is reset, and a reset can overtake the ERROR. The other sockets
    of a group stay open meanwhile: their end would make the learner tear down the control socket
    before it reads. After `FAREWELL_S` seconds everything is closed, read or not.
    """

    def __init__(self, channels, Channel main, done=None):
        cdef Channel channel
        self.channels = list(channels)
        self.main = main
        self.done = done
        for channel in self.channels:
            channel.owner = self
            channel.reader = None
            channel.cut_queue()
            if channel.paused:
                channel.resume()
        self.timer = main.loop.call_at(main.loop.now_ns() + FAREWELL_NS, self.close)

    def finish(self, frames):
        """Send frames on the main channel and half-close it once they are out."""
        if frames:
            self.main.send(frames)
        elif not self.main.out:
            self.main.half_close()

    cpdef object on_sent(self, Channel channel, Bulk bulk):
        if channel is self.main:
            channel.half_close()

    cpdef object on_lost(self, Channel channel, str reason):
        if channel is self.main:
            self.close()
        else:
            channel.close()

    def close(self):
        self.timer.cancel()
        for channel in self.channels:
            channel.close()
        self.channels = []
        done, self.done = self.done, None
        if done is not None:
            done()
