"""Writes a learner's control socket, and repeats its last heartbeat in a pause, without the GIL.

Must not know what a frame or a step is: it is told what to repeat, and from when on.

A training loop may hold the GIL for minutes (a checkpoint in C, a compiler, a data loader), and no
Python thread can speak then. So a native thread does. Frames of two writers must not mix, so every
frame of this socket goes through `send`, which writes a whole frame under a native lock and needs
no GIL once it has begun. The thread skips its turn when that lock is taken: bytes are flowing then.

The thread is not woken while the loop runs: a step boundary moves the moment of the next repetition
into the future, and the thread looks at it when the one it knew has come.
"""

from cpython.buffer cimport (
    Py_buffer,
    PyBUF_C_CONTIGUOUS,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from libc.errno cimport EAGAIN, EINTR, EPIPE, errno
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec
from posix.unistd cimport close, getpid, read, write

import os


cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_t:
        pass
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_create(pthread_t *, const void *, void *(*)(void *) noexcept nogil, void *)
    int pthread_join(pthread_t, void **)
    int pthread_mutex_init(pthread_mutex_t *, const void *)
    int pthread_mutex_lock(pthread_mutex_t *)
    int pthread_mutex_trylock(pthread_mutex_t *)
    int pthread_mutex_unlock(pthread_mutex_t *)

cdef extern from "<signal.h>" nogil:
    ctypedef struct sigset_t:
        pass
    int SIG_SETMASK
    int sigfillset(sigset_t *)
    int pthread_sigmask(int, const sigset_t *, sigset_t *)

cdef extern from "<poll.h>" nogil:
    struct pollfd:
        int fd
        short events
        short revents
    short POLLIN
    short POLLOUT
    int poll(pollfd *, unsigned long, int)

cdef extern from "<sys/uio.h>" nogil:
    struct iovec:
        void *iov_base
        size_t iov_len

cdef extern from "<sys/socket.h>" nogil:
    struct msghdr:
        iovec *msg_iov
        size_t msg_iovlen
    int MSG_DONTWAIT
    int MSG_NOSIGNAL
    ssize_t sendmsg(int, const msghdr *, int)
    ssize_t send_some "send" (int, const void *, size_t, int)

cdef extern from "<sys/eventfd.h>" nogil:
    int EFD_CLOEXEC
    int EFD_NONBLOCK
    int eventfd(unsigned int, int)


cdef enum:
    FRAME_MAX = 64                                # bytes of a frame that is repeated
    BUFFERS_MAX = 16                              # buffers of one frame
    LOOK_MS = 60_000                              # how long the thread sleeps at most
cdef long long NEVER_NS = (<long long>1) << 61

cdef struct State:
    int fd
    int wake                                      # readable: the thread is to look again
    bint broken                                   # a frame was cut: nothing may follow it
    pthread_mutex_t writing                       # held while a frame is written
    pthread_mutex_t facts                         # held for moments, around what follows
    bint stopping
    long long until_ns                            # what the thread sleeps for
    long long due_ns
    long long every_ns
    unsigned long long beats
    size_t size
    unsigned char frame[FRAME_MAX]


cdef long long clock_ns() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return <long long>now.tv_sec * 1_000_000_000 + now.tv_nsec


cdef bint woken(State *state) noexcept nogil:
    """Takes back what has woken the thread; whether it is to end."""
    cdef unsigned long long count
    cdef bint stopping
    read(state.wake, &count, sizeof(count))
    pthread_mutex_lock(&state.facts)
    stopping = state.stopping
    pthread_mutex_unlock(&state.facts)
    return stopping


cdef void wake_up(State *state) noexcept nogil:
    cdef unsigned long long one = 1
    write(state.wake, &one, sizeof(one))


cdef void beat(State *state) noexcept nogil:
    """Writes the frame once, or nothing of it when the socket takes no byte."""
    cdef unsigned char frame[FRAME_MAX]
    cdef pollfd ready[2]
    cdef size_t size, done = 0
    cdef ssize_t count
    pthread_mutex_lock(&state.facts)
    size = state.size
    memcpy(frame, state.frame, size)
    pthread_mutex_unlock(&state.facts)
    while done < size:
        count = send_some(state.fd, frame + done, size - done, MSG_DONTWAIT | MSG_NOSIGNAL)
        if count >= 0:
            done += <size_t>count
        elif errno == EAGAIN and done == 0:
            return
        elif errno == EAGAIN:
            ready[0].fd, ready[0].events = state.fd, POLLOUT
            ready[1].fd, ready[1].events = state.wake, POLLIN
            poll(ready, 2, -1)
            if ready[1].revents and woken(state):
                break
        elif errno != EINTR:
            break
    if done < size:
        state.broken = True
    elif size:
        pthread_mutex_lock(&state.facts)
        state.beats += 1
        pthread_mutex_unlock(&state.facts)


cdef void *keep_beating(void *given) noexcept nogil:
    """The thread: sleeps until a repetition is due, and ends when it is told to."""
    cdef State *state = <State *>given
    cdef pollfd waiting
    cdef long long due, left
    waiting.fd, waiting.events = state.wake, POLLIN
    while True:
        pthread_mutex_lock(&state.facts)
        due = state.due_ns
        if due <= clock_ns():
            state.due_ns = clock_ns() + state.every_ns
        state.until_ns = state.due_ns
        left = state.until_ns - clock_ns()
        pthread_mutex_unlock(&state.facts)
        if due < state.until_ns and pthread_mutex_trylock(&state.writing) == 0:
            if not state.broken:
                beat(state)
            pthread_mutex_unlock(&state.writing)
        waiting.revents = 0
        left = left // 1_000_000 + 1 if left > 0 else 0
        poll(&waiting, 1, <int>min(left, <long long>LOOK_MS))
        if waiting.revents and woken(state):
            return NULL


cdef class Pulse:
    """The writing side of one connected, blocking socket, and the thread that repeats a frame.

    The socket must outlive it: `stop` comes before its close, or `forget` in a forked child.
    """

    cdef State *state
    cdef pthread_t thread
    cdef readonly bint running
    cdef int pid

    def __cinit__(self, int fd):
        self.state = <State *>calloc(1, sizeof(State))
        if self.state is NULL:
            raise MemoryError()
        self.pid = getpid()
        self.state.fd = fd
        self.state.every_ns = self.state.due_ns = self.state.until_ns = NEVER_NS
        self.state.wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
        if self.state.wake < 0:
            raise OSError(errno, os.strerror(errno))
        pthread_mutex_init(&self.state.writing, NULL)
        pthread_mutex_init(&self.state.facts, NULL)

    def __init__(self, fd):
        """fd: the socket's descriptor. Raises OSError when there is none left to wake a thread."""

    def __dealloc__(self):
        if self.state is NULL:
            return
        self._end()
        if self.state.wake >= 0:
            close(self.state.wake)
        free(self.state)

    cdef void _end(self) noexcept:
        if not self.running or getpid() != self.pid:
            return  # in a forked child there is no thread, and its locks are as they were
        self.running = False
        with nogil:
            pthread_mutex_lock(&self.state.facts)
            self.state.stopping = True
            pthread_mutex_unlock(&self.state.facts)
            wake_up(self.state)
            pthread_join(self.thread, NULL)

    def start(self):
        """Starts the thread, which takes no signals. Raises OSError when it cannot be made."""
        cdef sigset_t every, before
        cdef int error
        sigfillset(&every)
        pthread_sigmask(SIG_SETMASK, &every, &before)
        error = pthread_create(&self.thread, NULL, keep_beating, self.state)
        pthread_sigmask(SIG_SETMASK, &before, NULL)
        if error:
            raise OSError(error, os.strerror(error))
        self.running = True

    def repeat(self, bytes frame not None, double due_s, double every_s):
        """From `due_s` of the monotonic clock on, `frame` is sent every `every_s` seconds."""
        if len(frame) > FRAME_MAX:
            raise ValueError(f"a frame of {len(frame)} bytes cannot be repeated")
        cdef const unsigned char *text = frame
        cdef size_t size = len(frame)
        with nogil:
            pthread_mutex_lock(&self.state.facts)
            memcpy(self.state.frame, text, size)
            self.state.size = size
            self.state.due_ns = <long long>(min(due_s, 1e9) * 1e9)
            self.state.every_ns = <long long>(min(every_s, 1e9) * 1e9)
            if self.state.due_ns < self.state.until_ns:
                wake_up(self.state)
            pthread_mutex_unlock(&self.state.facts)

    @property
    def beats(self):
        """How often a frame was repeated."""
        cdef unsigned long long count
        with nogil:
            pthread_mutex_lock(&self.state.facts)
            count = self.state.beats
            pthread_mutex_unlock(&self.state.facts)
        return count

    def send(self, list buffers not None):
        """Hands one whole frame to the kernel; the number of its bytes. Raises OSError.

        buffers: at most 16 contiguous ones, in order. An error leaves the frame cut, and the
        socket of no more use.
        """
        cdef Py_buffer views[BUFFERS_MAX]
        cdef iovec parts[BUFFERS_MAX]
        cdef Py_ssize_t count = 0, total = 0
        cdef int error
        if len(buffers) > BUFFERS_MAX:
            raise ValueError(f"a frame of {len(buffers)} buffers, expected at most {BUFFERS_MAX}")
        try:
            for buffer in buffers:
                PyObject_GetBuffer(buffer, &views[count], PyBUF_C_CONTIGUOUS)
                parts[count].iov_base = views[count].buf
                parts[count].iov_len = views[count].len
                total += views[count].len
                count += 1
            with nogil:
                pthread_mutex_lock(&self.state.writing)
                error = write_all(self.state, parts, count)
                pthread_mutex_unlock(&self.state.writing)
        finally:
            while count:
                count -= 1
                PyBuffer_Release(&views[count])
        if error:
            raise OSError(error, os.strerror(error))
        return total

    def stop(self):
        """Ends the thread, also in the middle of a frame; waits until it is gone."""
        self._end()

    def forget(self):
        """In a forked child: closes its copy of what wakes the thread, which is the parent's."""
        if self.state.wake >= 0 and getpid() != self.pid:
            close(self.state.wake)
            self.state.wake = -1


cdef int write_all(State *state, iovec *parts, Py_ssize_t count) noexcept nogil:
    """Every byte of the parts, or the error number that stopped it."""
    cdef msghdr message
    cdef ssize_t sent
    cdef Py_ssize_t first = 0
    if state.broken:
        return EPIPE
    while first < count:
        if parts[first].iov_len == 0:
            first += 1
            continue
        memset(&message, 0, sizeof(message))
        message.msg_iov = parts + first
        message.msg_iovlen = <size_t>(count - first)
        sent = sendmsg(state.fd, &message, MSG_NOSIGNAL)
        if sent < 0:
            if errno == EINTR:
                continue
            state.broken = True
            return errno
        while first < count and sent >= <ssize_t>parts[first].iov_len:
            sent -= <ssize_t>parts[first].iov_len
            first += 1
        if sent:
            parts[first].iov_base = <char *>parts[first].iov_base + sent
            parts[first].iov_len -= <size_t>sent
    return 0
