"""Goodbyes: the last frame of a connection reaches its peer before the connection ends.

It must not know why one ends.
"""

from syncer.server.conn cimport Channel, Owner
from syncer.server.outbox cimport Bulk

cdef long long FAREWELL_NS = 2_000_000_000
FAREWELL_S = FAREWELL_NS / 1e9
"""Seconds that a peer gets to read its ERROR and close."""
FAREWELLS_MAX = 1024
"""Goodbyes at a time; one more ends the oldest of them."""


cdef class Farewell(Owner):
    """Closes channels so that the last frame is not lost: flush, half-close, drain, then close.

    A socket closed with unread input is reset, and a reset can overtake the ERROR. The other
    sockets of a group stay open meanwhile: their end would make the learner tear down the control
    socket before it reads. After `FAREWELL_S` seconds everything is closed, read or not.
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


class Farewells:
    """The goodbyes that are under way, and their sockets."""

    def __init__(self):
        self.open = {}
        self.sockets = 0

    def say(self, channels, main, frames):
        """Send `frames` on the channel `main` and close all these channels without losing them."""
        count = len(channels)

        def done():
            if self.open.pop(farewell, 0) is None:
                self.sockets -= count

        farewell = Farewell(channels, main, done)
        self.open[farewell] = None
        self.sockets += count
        farewell.finish(frames)
        if len(self.open) > FAREWELLS_MAX:
            self.shorten()

    def shorten(self):
        """The oldest of them ends now."""
        next(iter(self.open)).close()
