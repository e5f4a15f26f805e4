"""The readiness loop: sockets, timers and results of other threads, in one thread.

It knows nothing of the protocol or of rounds; it must not decide anything and must not block
anywhere but in the selector.
"""

import selectors
import socket
from collections import deque
from heapq import heappop, heappush
from time import monotonic_ns

READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE
SCRATCH_BYTES = 65536
POSTED_PER_TURN = 256
"""Results taken in one turn: sockets and timers get their chance in between."""


cdef class Timer:
    """A callback at a time; `cancel` makes it a no-op."""

    def __init__(self, when_ns, callback):
        self.when_ns = when_ns
        self.callback = callback

    cpdef void cancel(self):
        self.callback = None

    @property
    def active(self):
        return self.callback is not None


cdef class Handler:
    """Whoever owns a registered descriptor."""

    cpdef object ready(self, int events):
        raise NotImplementedError


cdef class _WakeUp(Handler):
    """Empties the wake-up socket; what woke the loop is in the posted queue."""
    cdef Loop loop

    cpdef object ready(self, int events):
        try:
            while self.loop.wake_read.recv_into(self.loop.scratch) == SCRATCH_BYTES:
                pass
        except BlockingIOError:
            pass
        # Cleared before the queue is read: whoever posts later sees False and wakes again.
        self.loop.waking = False


cdef class Loop:
    """Selector, timers and a queue that other threads may post to.

    All state of the server belongs to the thread that calls `poll`. `scratch` is memory for bytes
    that are read only to be thrown away.
    """

    def __init__(self):
        cdef _WakeUp wake_up = _WakeUp()
        self.selector = selectors.DefaultSelector()
        self.posted = deque()
        self.timers = []
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
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

    cpdef Timer call_at(self, long long when_ns, object callback):
        """Call `callback()` in the first turn at or after `when_ns` of the monotonic clock."""
        cdef Timer timer = Timer(when_ns, callback)
        self.timer_order += 1
        heappush(self.timers, (when_ns, self.timer_order, timer))
        return timer

    def post(self, callback, *args):
        """From any thread: call `callback(*args)` in the loop's thread, in posting order."""
        self.posted.append((callback, args))
        if not self.waking:
            self.waking = True
            self.wake()

    def wake(self):
        """From any thread or signal handler: end the current wait."""
        try:
            self.wake_write.send(b"\0")
        except (BlockingIOError, OSError):
            pass  # full: the loop is about to wake; closed: there is no loop any more

    def poll(self, deadline_ns=None):
        """Wait until something is ready, or `deadline_ns`, or the next timer; then run all of it."""
        cdef object timeout = self._timeout(deadline_ns)
        cdef Handler handler
        for key, events in self.selector.select(timeout):
            handler = key.data
            handler.ready(events)
        self._run_timers()
        self._run_posted()

    def _timeout(self, deadline_ns):
        cdef Timer timer
        if self.posted:
            return 0
        while self.timers:
            timer = self.timers[0][2]
            if timer.callback is not None:
                if deadline_ns is None or timer.when_ns < deadline_ns:
                    deadline_ns = timer.when_ns
                break
            heappop(self.timers)
        if deadline_ns is None:
            return None
        return max(0, deadline_ns - monotonic_ns()) / 1e9

    def _run_timers(self):
        cdef Timer timer
        if not self.timers:
            return
        now_ns = monotonic_ns()
        while self.timers and self.timers[0][0] <= now_ns:
            timer = heappop(self.timers)[2]
            callback, timer.callback = timer.callback, None
            if callback is not None:
                callback()

    def _run_posted(self):
        for _ in range(min(len(self.posted), POSTED_PER_TURN)):
            callback, args = self.posted.popleft()
            callback(*args)

    def close(self):
        self.selector.close()
        self.wake_read.close()
        self.wake_write.close()
