"""Received bytes to frames: an incremental reader per socket, reassembly per connection group.

Every length is checked against `Limits` before memory is taken for it (wire 2.2, 8.5), and payloads
land where they stay: what follows a header in the staging buffer is copied once, the rest is
received in place (wire 8.7).
Must not know a socket, interpret a payload, or keep a frame after it was taken.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy, memmove

from syncer.wire.payload cimport Payload, allocate

from threading import Lock

from syncer.errors import LocalProtocolError, NoMemory, RemoteProtocolError
from syncer.protocol import (
    CHUNK_HEAD, HEADER_BYTES, MAGIC, PARTIAL_MESSAGES_MAX, Msg, msg_name,
)

cdef enum:
    HEADER = 13
    CHUNK_HEADER = 24
    CHUNK_TYPE = 9
    # Large enough for hundreds of small frames per receive, small enough that the start of a 4 MiB
    # piece that is copied out of it does not count.
    STAGING = 16384
    # A tensor starts 17, 25 or 61 bytes into an inner frame, so this lead aligns it to 4 bytes.
    INNER_LEAD = 3
    # Separate ranges of one message: honest senders cut at 4 MiB, so only an attacker meets it.
    RANGES_FLOOR = 16384
    RANGE_BYTES = 65536

# C constants for the compiler's sake; their home is syncer.protocol.
assert (HEADER, CHUNK_HEADER, CHUNK_TYPE) == (HEADER_BYTES, CHUNK_HEAD.size, Msg.CHUNK)
assert TYPE_COUNT > max(Msg)

cdef uint64_t FRAME_MAGIC = MAGIC
cdef uint64_t OPEN_MAX = PARTIAL_MESSAGES_MAX
cdef object NO_BYTES = memoryview(b"")


cdef inline uint64_t load_u64(const char* at) noexcept nogil:
    cdef const uint8_t* b = <const uint8_t*>at
    return (
        b[0] | (<uint64_t>b[1] << 8) | (<uint64_t>b[2] << 16) | (<uint64_t>b[3] << 24)
        | (<uint64_t>b[4] << 32) | (<uint64_t>b[5] << 40) | (<uint64_t>b[6] << 48)
        | (<uint64_t>b[7] << 56)
    )


cdef inline uint64_t load_u32(const char* at) noexcept nogil:
    cdef const uint8_t* b = <const uint8_t*>at
    return b[0] | (<uint64_t>b[1] << 8) | (<uint64_t>b[2] << 16) | (<uint64_t>b[3] << 24)


cdef class Sink:
    """Who takes what comes of one message, piece by piece; this one lets it lie in the message.

    With a `room` bytes are received into that, from `SINK_LEAD` on, each time again; without, into
    the message, as all that came before there was a sink.
    """

    def __init__(self, Payload room=None):
        self.room = room

    cpdef object came(self, Partial message, Py_ssize_t piece, Py_ssize_t start, Py_ssize_t end):
        """[start, end) of the message has come, and of its piece all from `piece` on."""


cdef class Partial:
    """One message in reassembly; a range is taken when its header is read, filled when it is in."""

    def __cinit__(self):
        self.coming = {}

    def __dealloc__(self):
        free(self.ranges)

    @property
    def there(self):
        """Bytes that are in without a gap, from the first one on."""
        cdef uint64_t most, at
        if self.range_count == 0 or self.ranges[0].start:
            return 0
        most = self.ranges[0].end
        for at in self.coming.values():
            most = min(most, at)
        return most

    @property
    def kind(self):
        """Type of the message inside; None until its header is in, and if that is a wrong one."""
        cdef const char* data = self.payload.data
        if (self.there < HEADER or load_u32(data) != FRAME_MAGIC
                or load_u64(data + 5) != self.total - HEADER):
            return None
        return <uint8_t>data[4]

    @property
    def inside(self):
        """What will be the payload of the message inside: as much of it as is in."""
        return memoryview(self.payload)[HEADER:]

    cdef int reserve(self, uint64_t start, uint64_t end) except -1:
        """Takes [start, end), which must not overlap a taken range; touching ranges are joined."""
        cdef Range* ranges = self.ranges
        cdef Py_ssize_t low = 0, high = self.range_count, middle
        while low < high:
            middle = (low + high) // 2
            if ranges[middle].start < start:
                low = middle + 1
            else:
                high = middle
        # low is the first range that starts at or behind `start`.
        cdef bint before = low > 0
        cdef bint behind = low < self.range_count
        if (before and ranges[low - 1].end > start) or (behind and ranges[low].start < end):
            raise RemoteProtocolError(
                f"chunk overlap: bytes {start}..{end} of message {self.msg_id} were already "
                "received"
            )
        cdef bint joins_left = before and ranges[low - 1].end == start
        cdef bint joins_right = behind and ranges[low].start == end
        if joins_left and joins_right:
            ranges[low - 1].end = ranges[low].end
            self.range_count -= 1
            memmove(&ranges[low], &ranges[low + 1], (self.range_count - low) * sizeof(Range))
        elif joins_left:
            ranges[low - 1].end = end
        elif joins_right:
            ranges[low].start = start
        else:
            self.insert(low, start, end)
        return 0

    cdef int insert(self, Py_ssize_t index, uint64_t start, uint64_t end) except -1:
        cdef Py_ssize_t most = RANGES_FLOOR + <Py_ssize_t>(self.total // RANGE_BYTES)
        cdef Py_ssize_t capacity = max(8, 2 * self.range_capacity)
        cdef Range* grown
        if self.range_count >= most:
            raise RemoteProtocolError(
                f"chunked message {self.msg_id} is in more than {most} separate ranges"
            )
        if self.range_count == self.range_capacity:
            grown = <Range*>realloc(self.ranges, capacity * sizeof(Range))
            if grown == NULL:
                raise NoMemory(f"cannot allocate {capacity} ranges of a chunked message: try "
                               "again later")
            self.ranges, self.range_capacity = grown, capacity
        memmove(
            &self.ranges[index + 1], &self.ranges[index], (self.range_count - index) * sizeof(Range)
        )
        self.ranges[index].start = start
        self.ranges[index].end = end
        self.range_count += 1
        return 0


cdef class Reassembly:
    """Messages in CHUNKs of one connection group and direction, from all its sockets.

    Sockets may be read by different threads, if nobody takes what comes. Dies with the group.
    """

    def __init__(self, limits, sink_of=None):
        """`sink_of(message)` is asked for the `Sink` of a message in pieces until it names one."""
        self.limits = limits
        self.sink_of = sink_of
        self.messages = {}
        self.lock = Lock()

    @property
    def messages_open(self):
        """Messages of which a first piece, but not everything, has arrived."""
        return len(self.messages)

    @property
    def progress(self):
        """Bytes that have arrived of each open message, by its id."""
        cdef Partial partial
        return {key: partial.filled for key, partial in self.messages.items()}

    @property
    def range_bytes(self):
        """Bytes of bookkeeping besides `bytes_open`."""
        cdef Partial partial
        cdef Py_ssize_t total = 0
        for partial in self.messages.values():
            total += partial.range_capacity * <Py_ssize_t>sizeof(Range)
        return total

    cdef Partial reserve(self, uint64_t msg_id, uint64_t total, uint64_t offset, uint64_t size):
        """The message a piece of `size` > 0 bytes belongs to, with the piece's range taken."""
        cdef Partial partial
        cdef object key = msg_id
        if total > <uint64_t>self.limits.inner_bytes_max:
            raise RemoteProtocolError(
                f"chunked message {msg_id} of {total} bytes exceeds limit "
                f"{self.limits.inner_bytes_max}"
            )
        if total < <uint64_t>self.limits.inner_bytes_min:
            raise RemoteProtocolError(
                f"chunked message {msg_id} of {total} bytes is shorter than a frame header"
            )
        if offset > total or size > total - offset:
            raise RemoteProtocolError(
                f"chunk of {size} bytes at offset {offset} passes the {total} bytes of "
                f"message {msg_id}"
            )
        with self.lock:
            partial = self.messages.get(key)
            if partial is None:
                partial = self.open(key, total)
            elif partial.total != total:
                raise RemoteProtocolError(
                    f"chunked message {msg_id} has total {total}, its first piece said "
                    f"{partial.total}"
                )
            partial.reserve(offset, offset + size)
        return partial

    cdef Partial open(self, object msg_id, uint64_t total):
        cdef Partial partial
        cdef uint64_t most = self.limits.open_bytes_max
        if <uint64_t>len(self.messages) >= OPEN_MAX:
            raise RemoteProtocolError(
                f"more than {OPEN_MAX} chunked messages are open, no room for message {msg_id}"
            )
        if total > most - self.bytes_open:
            raise RemoteProtocolError(
                f"chunked message {msg_id} of {total} bytes and {self.bytes_open} already open "
                f"exceed limit {most}"
            )
        partial = Partial.__new__(Partial)
        partial.msg_id = msg_id
        partial.total = total
        partial.payload = allocate(total, INNER_LEAD, True)
        self.messages[msg_id] = partial
        self.bytes_open += total
        return partial

    cdef tuple filled(self, Partial partial, uint64_t size):
        """Counts a piece that is in; the inner frame if it was the last one, else None."""
        cdef char* data = partial.payload.data
        with self.lock:
            partial.filled += size
            if partial.filled < partial.total:
                return None
            del self.messages[partial.msg_id]
            self.bytes_open -= partial.total
        if partial.total < HEADER:
            raise RemoteProtocolError(
                f"chunked message {partial.msg_id} of {partial.total} bytes is shorter than a "
                "frame header"
            )
        if load_u32(data) != FRAME_MAGIC:
            raise RemoteProtocolError(bad_magic(data) + f" inside chunked message {partial.msg_id}")
        cdef uint64_t inner = load_u64(data + 5)
        if inner != partial.total - HEADER:
            raise RemoteProtocolError(
                f"chunked message {partial.msg_id} has inner length {inner}, its total says "
                f"{partial.total - HEADER}"
            )
        partial.payload.sealed = True
        return <uint8_t>data[4], memoryview(partial.payload)[HEADER:]


cdef str bad_magic(const char* at):
    if at[1] == 3 and 0x14 <= at[0] <= 0x17:
        return ("these are bytes of TLS, and this end speaks plain TCP: give certificates to both "
                "ends, or to neither (--tls-cert, tls=)")
    return f"bad magic 0x{load_u32(at):08x}, expected 0x{FRAME_MAGIC:08x}"


cdef class FrameReader:
    """Frames of one socket: receive into `buffer()`, say `received(n)`, and iterate.

        while (count := sock.recv_into(reader.buffer())):
            for msg_type, payload in reader.received(count):
                ...

    Iteration gives (type, read-only memoryview) of complete frames; pieces of chunked messages are
    absorbed and come out as their inner frame, from the reader that got the last one. A frame is
    looked at only when it is asked for: `limits` and `reassembly` set in the loop (after a HELLO)
    hold for the next one, and a broken frame raises RemoteProtocolError only after all before it
    were given. Once raised, the same error is raised for good. Payloads stay valid for as long as
    they are referenced.
    """

    def __init__(self, limits, Reassembly reassembly=None):
        """`reassembly` is shared by the sockets of a group; None: this socket has its own."""
        self.staging = allocate(STAGING, 0, False)
        self.reassembly = reassembly
        self.limits = limits

    @property
    def limits(self):
        return self._limits

    @limits.setter
    def limits(self, limits):
        cdef int msg_type
        for msg_type in range(TYPE_COUNT):
            self.frame_bytes_max[msg_type] = limits.frame_bytes_max.get(msg_type, -1)
        if self.reassembly is None and limits.inner_bytes_max:
            self.reassembly = Reassembly(limits)
        self._limits = limits

    @property
    def bytes_held(self):
        """Memory of this reader apart from messages in reassembly."""
        cdef Py_ssize_t held = self.staging.size
        if self.target is not None and self.partial is None:
            held += self.target.size
        return held

    cdef bint waits(self):
        """Whether there is no frame before more has come."""
        return self.target_at < self.target_end and self.target is not None

    cpdef object buffer(self):
        """Writable memoryview where the next bytes go; its length is all that is wanted."""
        cdef Payload place = self.target
        cdef Py_ssize_t start = self.target_at, end = self.target_end
        if self.error is not None:
            raise self.error
        if place is None:
            if self.start:
                # At most a part of a header is left, unless the caller stopped iterating.
                memmove(
                    self.staging.data, self.staging.data + self.start, self.end - self.start
                )
                self.end -= self.start
                self.start = 0
            place, start, end = self.staging, self.end, STAGING
        elif self.partial is not None:
            if self.partial.sink is None and self.reassembly.sink_of is not None:
                self.partial.sink = self.reassembly.sink_of(self.partial)
            if self.partial.sink is not None and self.partial.sink.room is not None:
                place = self.partial.sink.room
                start, end = SINK_LEAD, min(SINK_LEAD + end - start, place.size)
        self.wanted = end - start
        if not self.wanted:
            raise LocalProtocolError(
                "frames that were received must be taken before more are received")
        return memoryview(place)[start:end]

    cpdef FrameReader received(self, Py_ssize_t count):
        """Says that `count` bytes were written into `buffer()`; returns self, to be iterated."""
        if count < 0 or count > self.wanted:
            raise LocalProtocolError(
                f"{count} bytes were received into a buffer of {self.wanted}")
        self.wanted -= count
        if self.target is None:
            self.end += count
            return self
        self.target_at += count
        if self.partial is not None:
            self.partial.coming[self.target_end] = self.target_at
            if self.partial.sink is not None:
                self.partial.sink.came(self.partial, self.target_end - self.piece_bytes,
                                       self.target_at - count, self.target_at)
        return self

    def feed(self, data):
        """Frames of `data`, for users without a socket; iterate to the end."""
        view = memoryview(data).cast("B")
        while view:
            window = self.buffer()
            count = min(len(window), len(view))
            window[:count] = view[:count]
            view = view[count:]
            yield from self.received(count)

    def eof(self):
        """True if the bytes so far end inside a frame or a chunked message's piece."""
        return self.target is not None or self.end > self.start

    def __iter__(self):
        return self

    def __next__(self):
        cdef tuple frame
        if self.error is not None:
            raise self.error
        try:
            frame = self.next_frame()
        except RemoteProtocolError as error:
            self.error = RemoteProtocolError(self._limits.prefix + str(error))
            self.target = self.partial = None
            raise self.error from None
        if frame is None:
            raise StopIteration
        return frame

    cdef tuple next_frame(self):
        """The next complete frame, None if more bytes are needed for it."""
        cdef char* at
        cdef int msg_type
        cdef uint64_t size
        cdef tuple frame
        if self.target is not None:
            if self.target_at < self.target_end:
                return None
            frame = self.finish_target()
            if frame is not None:
                return frame
        while self.target is None and self.end - self.start >= HEADER:
            at = self.staging.data + self.start
            if load_u32(at) != FRAME_MAGIC:
                raise RemoteProtocolError(bad_magic(at))
            msg_type = <uint8_t>at[4]
            if msg_type >= TYPE_COUNT or self.frame_bytes_max[msg_type] < 0:
                raise RemoteProtocolError(f"unexpected message type {msg_name(msg_type)}")
            size = load_u64(at + 5)
            if size > <uint64_t>self.frame_bytes_max[msg_type]:
                raise RemoteProtocolError(
                    f"message type {msg_name(msg_type)} of {size} payload bytes exceeds limit "
                    f"{self.frame_bytes_max[msg_type]}"
                )
            if msg_type != CHUNK_TYPE:
                return self.take_bare(msg_type, size)
            if size < CHUNK_HEADER:
                raise RemoteProtocolError(
                    f"CHUNK payload truncated: {size} bytes, expected at least {CHUNK_HEADER}"
                )
            if self.end - self.start < HEADER + CHUNK_HEADER:
                return None
            frame = self.take_chunk(size)
            if frame is not None:
                return frame
        return None

    cdef tuple take_bare(self, int msg_type, uint64_t size):
        """A frame whose header is at `start`: complete, or its payload becomes the target."""
        cdef char* at = self.staging.data + self.start + HEADER
        cdef Py_ssize_t here = self.end - self.start - HEADER
        if <uint64_t>here >= size:
            self.start += HEADER + <Py_ssize_t>size
            if size == 0:
                return msg_type, NO_BYTES
            return msg_type, memoryview(PyBytes_FromStringAndSize(at, <Py_ssize_t>size))
        # Large blocks are touched in huge pages, which a peer has to be admitted for.
        self.target = allocate(size, 0, self.reassembly is not None)
        memcpy(self.target.data, at, here)
        self.start = self.end = 0
        self.target_at, self.target_end = here, <Py_ssize_t>size
        self.target_type = msg_type
        return None

    cdef tuple take_chunk(self, uint64_t size):
        """A CHUNK whose heads are at `start`: into its message, whose rest becomes the target."""
        cdef char* at = self.staging.data + self.start + HEADER
        cdef Py_ssize_t here = self.end - self.start - HEADER - CHUNK_HEADER
        cdef Py_ssize_t piece = <Py_ssize_t>size - CHUNK_HEADER
        cdef uint64_t offset = load_u64(at + 16)
        cdef Partial partial
        if piece == 0:
            raise RemoteProtocolError(f"empty chunk of message {load_u64(at)} at offset {offset}")
        partial = self.reassembly.reserve(load_u64(at), load_u64(at + 8), offset, piece)
        if here >= piece:
            memcpy(partial.payload.data + offset, at + CHUNK_HEADER, piece)
            self.start += HEADER + CHUNK_HEADER + piece
            return self.checked_inner(self.reassembly.filled(partial, piece))
        memcpy(partial.payload.data + offset, at + CHUNK_HEADER, here)
        self.start = self.end = 0
        self.target, self.partial = partial.payload, partial
        self.target_at, self.target_end = <Py_ssize_t>offset + here, <Py_ssize_t>offset + piece
        partial.coming[self.target_end] = self.target_at
        self.piece_bytes = piece
        return None

    cdef tuple checked_inner(self, tuple frame):
        """An inner frame is treated like a bare one, but never a CHUNK again."""
        cdef int msg_type
        if frame is not None:
            msg_type = frame[0]
            if (msg_type >= TYPE_COUNT or msg_type == CHUNK_TYPE
                    or self.frame_bytes_max[msg_type] < 0):
                raise RemoteProtocolError(
                    f"unexpected message type {msg_name(msg_type)} inside a chunked message"
                )
        return frame

    cdef tuple finish_target(self):
        """The target is full: the bare frame, or what its last piece completes."""
        cdef Payload target = self.target
        cdef Partial partial = self.partial
        self.target = self.partial = None
        if partial is not None:
            del partial.coming[self.target_end]
            return self.checked_inner(self.reassembly.filled(partial, self.piece_bytes))
        target.sealed = True
        return self.target_type, memoryview(target)
