"""One socket: frames in, buffers out, and who is told what became of it.

It moves bytes; it must not know learners or rounds, and decides only when a peer has stopped
reading.
"""

import errno
import os
import socket

from syncer.gather cimport advance, first_bytes

from syncer.errors import RemoteProtocolError
from syncer.server.loop import READ as _READ, WRITE as _WRITE
from syncer.tls import TlsSocket

cdef int READ = _READ
cdef int WRITE = _WRITE

# One readiness turn of a channel moves at most this much, so that a fast peer cannot starve others.
cdef Py_ssize_t READ_TURN_BYTES = 2 * 1024 * 1024
cdef Py_ssize_t READ_TURN_FRAMES = 256
cdef Py_ssize_t DISCARD_TURN_BYTES = 256 * 1024

# With less than this to send a channel has more of its piece encoded, if there is more.
cdef Py_ssize_t SEND_BYTES = 64 * 1024


# What the peer or the way to it did. Every other error is the system's own: it has refused a call.
cdef frozenset OF_THE_PEER = frozenset({
    errno.ECONNRESET, errno.EPIPE, errno.ETIMEDOUT, errno.ECONNABORTED, errno.ENOTCONN,
    errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.ENETRESET,
    errno.ECONNREFUSED, errno.EPROTO})


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


cdef class Channel(Handler):
    """One socket. Reads into its FrameReader; without one, what arrives is thrown away.

    A call that fails on its behalf ends it and nobody else: whoever owns it is told that it is
    lost, and the loop's `refused` if the system was to blame.

    Large: reading, writing and the stall timer share the socket's one interest mask.
    """

    def __init__(self, Loop loop, sock, peer, Owner owner, reader, write_timeout_ns):
        self.loop = loop
        self.sock = sock
        self.tls = sock if isinstance(sock, TlsSocket) else None
        self.peer = peer
        self.owner = owner
        self.reader = reader
        self.write_timeout_ns = write_timeout_ns
        self.out = []
        self.allowance = -1
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
        cdef FrameReader reader
        while budget > 0 and not self.closed and not self.paused:
            try:
                reader = self.reader
                buffer = self.loop.scratch if reader is None else reader.buffer()
                wanted = len(buffer)
                count = self.sock.recv_into(buffer)
            except (BlockingIOError, InterruptedError):
                return
            except (OSError, MemoryError) as error:
                self._fail(error)
                return
            if count == 0:
                self.owner.on_lost(self, "closed by the peer")
                return
            budget -= count
            self.received += count
            self.loop.bytes_received += count
            if reader is not None:
                reader.received(count)
                self.owner.on_bytes(self, count)
                if not reader.waits():
                    frames += self._take()
            if frames >= READ_TURN_FRAMES or (count < wanted and self.tls is None):
                break  # TLS has given what it took at once: the kernel may well have more
        self._read_on()

    cdef object _read_on(self):
        """What TLS holds already is read in the next turn: the selector does not know of it."""
        if self.tls is not None and not (self.closed or self.paused) and self.tls.more:
            self.loop.call_at(self.loop.now_ns(), self._go_on)

    def _go_on(self):
        self.read_now()

    cpdef object read_now(self):
        """Take what has come, before the selector says so."""
        if not (self.closed or self.paused):
            self._read()

    cdef Py_ssize_t _take(self) except -1:
        """Hand on the frames that are complete, until the channel is paused, broken or closed."""
        cdef Py_ssize_t frames = 0
        cdef FrameReader reader = self.reader
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
        self._read_on()

    # -------------------------------------------------------------------------------- writing
    cdef bint idle(self):
        return not self.out and not self.again and not self.closed and self.allowance != 0

    cpdef object send(self, list buffers, Bulk bulk=None):
        """Write buffers (whole frames) behind what is not sent yet; then `owner.on_sent`.

        Once it is half-closed nothing more can be said, also not what a payload that was still
        being decoded would deserve.
        """
        if self.half_closed:
            return
        self.out.extend(buffers)
        self.bulk = bulk
        if bulk is not None:
            self.rough, self.piece_end = bulk.rough, bulk.offset
        if not self.blocked:
            self._flush()

    cpdef object grant(self, Py_ssize_t count):
        """So many bytes of bulk messages may go from now on, and no more; < 0: any number.

        What has no leave stays in `out`, without a claim on the selector: that is no stall.
        """
        self.allowance = count
        if self.out and not self.blocked and not self.closed:
            self._flush()

    def send_later(self):
        """Ask for `owner.on_writable` in the loop's next turn."""
        self.again = True
        self._interest()

    cdef object _flush(self):
        cdef Py_ssize_t sent, most
        cdef Bulk bulk
        cdef bint limited = self.allowance >= 0 and self.bulk is not None
        while self.out:
            if limited and self.allowance == 0:
                self._unblock()
                return
            most = self.allowance if limited else -1
            if self.rough:
                most = self._encoded(most)
            try:
                sent = self.sock.sendmsg(
                    first_bytes(self.out, most) if most >= 0 else self.out)
            except (BlockingIOError, InterruptedError):
                if self.tls is not None and self.tls.owed:
                    self.mid_frame = True  # in part of it that nobody can take back
                self._block()
                return
            except (OSError, MemoryError) as error:
                self._fail(error)
                return
            self.loop.bytes_sent += sent
            self.sent += sent
            if limited:
                self.allowance = max(0, self.allowance - sent)  # TLS may have begun with more
            self.progress_ns = self.loop.now_ns() if self.blocked else 0
            self._advance(sent)
        self._unblock()
        bulk, self.bulk = self.bulk, None
        self.owner.on_sent(self, bulk)

    cdef Py_ssize_t _encoded(self, Py_ssize_t most) except -2:
        """How much of `out` may go, if it may be `most` (< 0: any number): what is encoded, and
        when that is little, so much more."""
        cdef Py_ssize_t count, there = -self.rough
        for buffer in self.out:
            there += len(buffer)
        if there < SEND_BYTES:
            count = self.bulk.refine(self.piece_end, self.rough)
            self.rough -= count
            there += count
        return there if most < 0 else min(there, most)

    cdef object _advance(self, Py_ssize_t sent):
        """Drop what was sent from the front of `out`."""
        advance(self.out, sent)
        self.mid_frame = bool(self.out)

    cdef object _unblock(self):
        if self.blocked:
            self.blocked = False
            self._interest()

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
        elif self.rough:
            self.bulk.image.ready(self.piece_end)
        self.bulk = None
        self.rough = 0

    @property
    def unsent(self):
        """Whether anything given to `send` has still to go."""
        return bool(self.out)

    # ------------------------------------------------------------------------------ life cycle
    cdef object _interest(self):
        """Tell the selector what this channel waits for."""
        cdef int mask = 0
        if self.closed or self.failure is not None:
            return
        if not self.paused:
            mask |= READ
        if self.blocked or self.again:
            mask |= WRITE
        if mask == self.mask:
            return
        try:
            if mask == 0:
                self.loop.unregister(self.sock)
            elif self.mask == 0:
                self.loop.register(self.sock, mask, self)
            else:
                self.loop.modify(self.sock, mask, self)
        except (OSError, MemoryError) as error:  # the selector has forgotten the socket
            self.mask = 0
            self._fail_later(error)
            return
        self.mask = mask

    cdef object _fail(self, error):
        """A call for this socket has failed: its owner loses it."""
        if not isinstance(error, OSError) or error.errno not in OF_THE_PEER:
            self.loop.refused(self.peer, _reason(error))
        self.owner.on_lost(self, _reason(error))

    cdef object _fail_later(self, error):
        """The same at the end of the turn: whoever changes what a channel waits for, or has just
        made it, is not ready to lose it."""
        if self.failure is None:
            self.failure = self.loop.call_at(self.loop.now_ns(), lambda: self._fail(error))

    def half_close(self):
        """No more bytes will be sent."""
        self.half_closed = True
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except (OSError, MemoryError) as error:
            # Of the peer: there is nobody left to tell.
            if isinstance(error, MemoryError) or error.errno not in OF_THE_PEER:
                self._fail_later(error)

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
        if self.failure is not None:
            self.failure.cancel()
        self.out.clear()
        self.bulk = None
        self.rough = 0
        self.reader = None
        try:
            self.sock.close()
        except OSError:
            pass  # the descriptor is free all the same


cdef str _reason(error):
    if isinstance(error, MemoryError):
        return os.strerror(errno.ENOMEM)
    if error.errno in (errno.ECONNRESET, errno.EPIPE):
        return "connection reset by the peer"
    if error.errno == errno.EPROTO and error.strerror:
        return error.strerror  # of TLS: a sentence
    return os.strerror(error.errno) if error.errno else str(error)
