"""One tensor that arrives: decoded and checked as far as it is there, to the values of one at once.

It must not know what a message is for, who works on it, nor when it counts.

Compiled because it is between a socket and the values: some ten lines of Python cost a twentieth of
what a core takes for 512 KiB.
"""

from libc.stdint cimport int64_t, uint8_t
from libc.string cimport memmove

from syncer.kernels._native cimport decode_part
from syncer.server.decoded cimport Decoded
from syncer.wire.frames cimport Partial, Sink, SINK_LEAD

from syncer import kernels
from syncer.protocol import DTYPE_BF16, DTYPE_F32, DTYPE_Q4, Q4_BLOCK, Q4_BLOCK_BYTES

UNITS = {DTYPE_F32: (64, 16), DTYPE_BF16: (64, 32), DTYPE_Q4: (Q4_BLOCK_BYTES, Q4_BLOCK)}
"""Bytes and elements of what is worked on as a whole: a block of q4, or of SHA-256."""
NEWS_BYTES = 512 * 1024
"""So much comes before what is there of a tensor that goes in order is worked on again: each time
costs some microseconds. A simulation sets it."""

assert SINK_LEAD >= Q4_BLOCK_BYTES


cdef class Arrival(Sink):
    """The tensor of one message of `group`; `event` makes its event of the whole values.

    It goes by what is there without a gap (`more`), or piece by piece: then whole units are decoded
    from where they were received, whatever pieces come before them, and only what begins or ends
    in another call, or came before it was known what comes, is put into the message, which at its
    end has all that is not decoded. Every step leaves it whole, so that work that finds no memory
    can be done again.

    Large: half of its attributes say what the message is, the others how far it is.
    """

    def __init__(self, group, str name, tensor, int dtype, *, Decoded decoded, event,
                 bint initial=False):
        cdef const uint8_t[::1] wire = tensor
        cdef float[::1] values = decoded.buffer
        self.group, self.name, self.decoded, self.event = group, name, decoded, event
        self.tensor, self.wire, self.values = tensor, <uint8_t*>&wire[0], &values[0]
        self.size = len(tensor)
        self.dtype, self.negate = dtype, not initial
        self.unit, self.elements = UNITS[dtype]
        self.sha = kernels.Sha256() if initial else None
        self.parts = {}
        self.bad = -1

    @property
    def finished(self):
        """Everything is decoded, and no worker has it."""
        return self.done == self.size and not self.working

    cpdef object expect(self, object room, object more):
        """It comes in pieces: to be decoded one by one, or in order by `more(arrival)`, called when
        there is more; room: where they are received, if not in the message."""
        self.room, self.more = room, more
        self.by_piece = more is None

    # ------------------------------------------------------------------------------ in order
    def ready(self, Py_ssize_t most):
        """Up to where it can be worked on now, `most` bytes at a time."""
        cdef Py_ssize_t end = min(self.there, self.done + most)
        return end if end == self.size else end - end % self.unit

    def bytes(self, Py_ssize_t start, Py_ssize_t end):
        return self.tensor[start:end]

    def decode_to(self, Py_ssize_t end):
        if end == self.done:
            return
        self.decode_units(self.done, end, self.wire + self.done)
        self.done = end
        if end == self.size:
            self.tensor = None

    # -------------------------------------------------------------------------- piece by piece
    cpdef object came(self, Partial message, Py_ssize_t piece, Py_ssize_t start, Py_ssize_t end):
        # The heads are there before there is an arrival: what comes is of the tensor.
        cdef Py_ssize_t heads = <Py_ssize_t>message.total - self.size
        if self.by_piece:
            start -= heads
            self.take(max(piece - heads, 0), start, end - heads,
                      self.wire + start if self.room is None
                      else <uint8_t*>self.room.data + SINK_LEAD)
            return
        self.news += end - start
        if self.news >= NEWS_BYTES:
            self.news = 0
            self.there = max(0, <Py_ssize_t>message.there - heads)
            self.more(self)

    cdef int take(self, Py_ssize_t piece, Py_ssize_t start, Py_ssize_t end,
                  uint8_t* data) except -1:
        """[start, end) is at `data`, behind some room; of the piece, all before that was taken, or
        is in the message."""
        cdef Py_ssize_t first = start - start % self.unit, last = end, before
        if end < self.size:
            last -= end % self.unit
        if first < piece:
            first += self.unit
        if first >= last:
            memmove(self.wire + start, data, end - start)
            return 0
        if first > start:
            memmove(self.wire + start, data, first - start)
        elif first not in self.parts:
            before = piece + self.unit - 1
            before -= before % self.unit
            if before < first:
                self.decode_units(before, first, self.wire + before)
                self.parts[first] = before
        data -= start - first
        if first < start:
            memmove(data, self.wire + first, start - first)
        self.decode_units(first, last, data)
        self.parts[last] = self.parts.pop(first, first)
        memmove(self.wire + last, data + (last - first), end - last)
        return 0

    def left(self):
        """What is not decoded: units in more than one piece, and pieces that nobody has taken."""
        cdef list found = []
        cdef Py_ssize_t at = self.done
        for start, end in sorted([(start, end) for end, start in self.parts.items()]):
            if start > at:
                found.append((at, start))
            at = end
        if at < self.size:
            found.append((at, self.size))
        return found

    def finish(self):
        """All is there: decode what is left."""
        cdef Py_ssize_t begin
        for start, end in self.left():
            self.parts[end] = end  # so that none is decoded without being counted
            begin = start
            self.decode_units(begin, end, self.wire + begin)
            self.parts[end] = start
        self.done, self.tensor = self.size, None

    # ---------------------------------------------------------------------------------- both
    cdef int decode_units(self, Py_ssize_t start, Py_ssize_t end, uint8_t* data) except -1:
        """[start, end), whole units of the tensor, from `data`."""
        cdef Py_ssize_t numel = self.decoded.numel
        cdef Py_ssize_t first = start // self.unit * self.elements
        cdef Py_ssize_t last = min(numel, (end + self.unit - 1) // self.unit * self.elements)
        cdef int64_t bad
        with nogil:
            bad = decode_part(self.dtype, data, self.values + first, last - first, numel,
                              self.negate)
        if bad >= 0 and (self.bad < 0 or first + bad < self.bad):
            self.bad = first + <Py_ssize_t>bad
        return 0
