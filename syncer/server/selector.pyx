"""The loop over real sockets and the real clock: selectors, a wake-up socket, monotonic time.

Nothing but the system calls is here; what a turn does is `loop.Loop`'s.
"""

import selectors
import socket
from time import monotonic_ns

from posix.ioctl cimport ioctl

from syncer.server.loop cimport Handler, Loop
from syncer.server.loop import READ, SCRATCH_BYTES

cdef extern from "<sys/ioctl.h>":
    unsigned long TIOCOUTQ


LONGEST_WAIT_NS = 86_400 * 10**9
"""A selector counts milliseconds in 32 bits; to wake once a day costs nothing."""


cdef class _WakeUp(Handler):
    """Empties the wake-up socket; what woke the loop is in the posted queue."""
    cdef SelectorLoop loop

    cpdef object ready(self, int events):
        try:
            while self.loop.wake_read.recv_into(self.loop.scratch) == SCRATCH_BYTES:
                pass
        except OSError:
            pass  # empty, or no memory for a moment: what woke the loop is not in these bytes
        # Said before the queue is read: whoever posts later wakes again.
        self.loop.woken()


cdef class SelectorLoop(Loop):
    """Waits in the selector; `close` gives its descriptors back."""

    cdef object selector, wake_read
    cdef readonly object wake_write

    def __init__(self):
        cdef _WakeUp wake_up = _WakeUp()
        Loop.__init__(self)
        self.selector = selectors.DefaultSelector()
        self.wake_read, self.wake_write = socket.socketpair()
        self.wake_read.setblocking(False)
        self.wake_write.setblocking(False)
        wake_up.loop = self
        self.register(self.wake_read, READ, wake_up)

    cpdef long long now_ns(self):
        return monotonic_ns()

    cpdef object register(self, object sock, int events, Handler handler):
        self.selector.register(sock, events, handler)

    cpdef object modify(self, object sock, int events, Handler handler):
        self.selector.modify(sock, events, handler)

    cpdef object unregister(self, object sock):
        self.selector.unregister(sock)

    cpdef object wake(self):
        try:
            self.wake_write.send(b"\0")
        except (BlockingIOError, OSError):
            pass  # full: the loop is about to wake; closed: there is no loop any more

    cpdef long unacknowledged(self, object sock):
        cdef int count = 0, descriptor = sock.fileno()
        if descriptor < 0 or ioctl(descriptor, TIOCOUTQ, &count) < 0:
            return 0  # closed, or a system that does not tell
        return count

    def poll(self, deadline_ns=None):
        """Wait until something is ready, or `deadline_ns`, or the next timer; then make a turn."""
        due_ns = self.due_ns(deadline_ns)
        timeout = None
        if due_ns is not None:
            timeout = min(max(0, due_ns - monotonic_ns()), LONGEST_WAIT_NS) / 1e9
        self.turn([(key.data, events) for key, events in self.selector.select(timeout)])

    def close(self):
        self.selector.close()
        self.wake_read.close()
        self.wake_write.close()
