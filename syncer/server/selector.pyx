"""The loop over real sockets and the real clock: epoll, a wake-up socket, monotonic time.

Nothing but the system calls is here; what a turn does is `loop.Loop`'s. Python's `selectors` would
do, at 1 us for every socket that is ready and 4 us for every wait: as much as the wait itself.
"""

import socket

from cpython.exc cimport PyErr_CheckSignals, PyErr_SetFromErrno
from libc.errno cimport EINTR, errno
from libc.stdint cimport uint32_t
from posix.ioctl cimport ioctl
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec
from posix.unistd cimport close

from syncer.server.loop cimport Handler, Loop
from syncer.server.loop import READ as _READ, SCRATCH_BYTES, WRITE as _WRITE

cdef extern from "<sys/ioctl.h>":
    unsigned long TIOCOUTQ

cdef extern from "<sys/epoll.h>" nogil:
    enum: EPOLL_CLOEXEC, EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD
    enum: EPOLLIN, EPOLLOUT
    ctypedef union epoll_data_t:
        int fd
    struct epoll_event:
        uint32_t events
        epoll_data_t data
    int epoll_create1(int flags)
    int epoll_ctl(int epfd, int op, int fd, epoll_event* event)
    int epoll_wait(int epfd, epoll_event* events, int maxevents, int timeout)


LONGEST_WAIT_NS = 86_400 * 10**9
"""epoll counts milliseconds in 32 bits; to wake once a day costs nothing."""

cdef int READ = _READ
cdef int WRITE = _WRITE

cdef enum:
    READY_PER_TURN = 256        # of more, the others are first in the next turn


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


cdef class _Watched:
    """A descriptor that is waited for."""
    cdef Handler handler
    cdef int mask


cdef class SelectorLoop(Loop):
    """Waits in epoll; `close` gives its descriptors back.

    Large: every port of a `Loop` is here, and the system calls behind them.
    """

    cdef int epoll
    cdef dict watched           # descriptor -> _Watched
    cdef object wake_read
    cdef readonly object wake_write
    cdef epoll_event found[READY_PER_TURN]

    def __cinit__(self):
        self.epoll = -1

    def __init__(self):
        cdef _WakeUp wake_up = _WakeUp()
        Loop.__init__(self)
        self.watched = {}
        self.epoll = epoll_create1(EPOLL_CLOEXEC)
        if self.epoll < 0:
            PyErr_SetFromErrno(OSError)
        self.wake_read, self.wake_write = socket.socketpair()
        self.wake_read.setblocking(False)
        self.wake_write.setblocking(False)
        wake_up.loop = self
        self.register(self.wake_read, READ, wake_up)

    def __dealloc__(self):
        if self.epoll >= 0:
            close(self.epoll)

    cpdef long long now_ns(self):
        cdef timespec now
        clock_gettime(CLOCK_MONOTONIC, &now)
        return now.tv_sec * 1_000_000_000 + now.tv_nsec

    cdef int control(self, int operation, int descriptor, int events) except -1:
        cdef epoll_event event
        event.data.fd = descriptor
        event.events = (EPOLLIN if events & READ else 0) | (EPOLLOUT if events & WRITE else 0)
        if epoll_ctl(self.epoll, operation, descriptor, &event) < 0:
            PyErr_SetFromErrno(OSError)
        return 0

    cpdef object register(self, object sock, int events, Handler handler):
        cdef _Watched watched = _Watched()
        cdef int descriptor = sock.fileno()
        self.control(EPOLL_CTL_ADD, descriptor, events)
        watched.handler, watched.mask = handler, events
        self.watched[descriptor] = watched

    cpdef object modify(self, object sock, int events, Handler handler):
        cdef int descriptor = sock.fileno()
        cdef _Watched watched = self.watched[descriptor]
        try:
            self.control(EPOLL_CTL_MOD, descriptor, events)
        except OSError:
            self.unregister(sock)
            raise
        watched.handler, watched.mask = handler, events

    cpdef object unregister(self, object sock):
        cdef int descriptor = sock.fileno()
        del self.watched[descriptor]
        try:
            self.control(EPOLL_CTL_DEL, descriptor, 0)
        except OSError:
            pass  # there is nothing to wait for any more

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
        cdef object due_ns = self.due_ns(deadline_ns)
        cdef long long left_ns
        cdef int timeout_ms = -1, count, i, events
        cdef _Watched watched
        cdef list ready = []
        if due_ns is not None:
            left_ns = min(max(0, <long long>due_ns - self.now_ns()), LONGEST_WAIT_NS)
            timeout_ms = <int>((left_ns + 999_999) // 1_000_000)
        with nogil:
            count = epoll_wait(self.epoll, self.found, READY_PER_TURN, timeout_ms)
        if count < 0:
            if errno != EINTR:
                PyErr_SetFromErrno(OSError)
            PyErr_CheckSignals()
        for i in range(count):
            watched = self.watched.get(self.found[i].data.fd)
            if watched is not None:
                # An error or a hang-up is for whoever waits, to read or to write.
                events = ((READ if self.found[i].events & ~<uint32_t>EPOLLOUT else 0)
                          | (WRITE if self.found[i].events & ~<uint32_t>EPOLLIN else 0))
                ready.append((watched.handler, events & watched.mask))
        self.turn(ready)

    def close(self):
        if self.epoll >= 0:
            close(self.epoll)
            self.epoll = -1
        self.wake_read.close()
        self.wake_write.close()
