"""Timers and results of other threads, in one thread, around whatever tells that sockets are ready.

It knows nothing of the protocol or of rounds; it must not decide anything, and makes no system
call: `selector.SelectorLoop` waits for real sockets, a simulation for simulated ones.
"""

from collections import deque
from heapq import heappop, heappush

READ = 1
WRITE = 2
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


cdef class Loop:
    """Timers, a queue that other threads may post to, and the port to a world with sockets.

    All state of the server belongs to the thread that calls `turn`. `scratch` is memory for bytes
    that are read only to be thrown away. A world brings a clock (`now_ns`), what is ready
    (`register`, `modify`, `unregister` by socket), what is on its way (`unacknowledged`) and a way
    to end its wait from another thread (`wake`); it waits until something is ready, or until
    `due_ns`, and then makes a `turn`.
    `refused(peer, text)` hears of every connection that the system, not its peer, has ended.
    """

    def __init__(self):
        self.posted = deque()
        self.timers = []
        self.refused = lambda peer, text: None
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))

    cpdef long long now_ns(self):
        raise NotImplementedError

    cpdef object register(self, object sock, int events, Handler handler):
        raise NotImplementedError

    cpdef object modify(self, object sock, int events, Handler handler):
        raise NotImplementedError

    cpdef object unregister(self, object sock):
        raise NotImplementedError

    cpdef object wake(self):
        """From any thread or signal handler: end the current wait."""
        raise NotImplementedError

    cpdef long unacknowledged(self, object sock):
        """Bytes given to this socket that its peer has not acknowledged."""
        raise NotImplementedError

    # ---------------------------------------------------------------------------------- in turn
    cpdef Timer call_at(self, long long when_ns, object callback):
        """Call `callback()` in the first turn at or after `when_ns` of the loop's clock."""
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

    def woken(self):
        """The wait has ended by `wake`: from here on another post wakes again."""
        self.waking = False

    cpdef object turn(self, list ready):
        """Run what is ready, a list of (handler, events), then due timers, then what was posted."""
        cdef Handler handler
        for found, events in ready:
            handler = found
            handler.ready(events)
        self._run_timers()
        self._run_posted()

    cpdef object due_ns(self, object deadline_ns):
        """When the next turn is due at the latest: now if something is posted, else the earlier of
        `deadline_ns` and the next timer; None if neither is set."""
        cdef Timer timer
        if self.posted:
            return self.now_ns()
        while self.timers:
            timer = self.timers[0][2]
            if timer.callback is not None:
                if deadline_ns is None or timer.when_ns < deadline_ns:
                    return timer.when_ns
                break
            heappop(self.timers)
        return deadline_ns

    def _run_timers(self):
        cdef Timer timer
        if not self.timers:
            return
        now_ns = self.now_ns()
        while self.timers and self.timers[0][0] <= now_ns:
            timer = heappop(self.timers)[2]
            callback, timer.callback = timer.callback, None
            if callback is not None:
                callback()

    def _run_posted(self):
        for _ in range(min(len(self.posted), POSTED_PER_TURN)):
            callback, args = self.posted.popleft()
            callback(*args)
