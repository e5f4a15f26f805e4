"""The pump: an event in, and what the scheduler decides goes to whoever carries it out.

It must decide nothing and carry nothing out itself. Everything here runs on the loop's thread; long
work goes to the workers and comes back as an event.

Compiled because it is called for every push and heartbeat: what it adds to them is half a
microsecond, two in Python.
"""

from collections import deque
from typing import NamedTuple

from syncer.core.run.scheduler cimport Scheduler
from syncer.server.loop cimport Loop

from syncer.core import actions, events

cdef object PUSH = events.Push, INIT = events.Init
cdef object PUBLISH = actions.Publish


class RunEnd(NamedTuple):
    """How the run ends: exit status, and the sentence that says why."""

    status: int
    text: str


cdef class Driver:
    """Events in their order, each one's actions carried out before the next event is looked at.

    `owners`, type of an action -> who carries it out, get the actions; a session brings more with
    `add_owners`. `ending` is set once the scheduler has said `Exit`; from then on events are
    ignored. `carried_out` is called behind every event that led to something, when that is done.
    """

    cdef readonly Scheduler scheduler
    cdef Loop loop
    cdef object watch, waiting
    cdef public object ending, carried_out
    cdef dict carry_out
    cdef bint stepping
    cdef list given             # of the event that is being carried out, up to its end, and
    cdef Py_ssize_t at          # how far

    def __init__(self, Scheduler scheduler, Loop loop, owners, watch=None):
        self.scheduler, self.loop, self.watch = scheduler, loop, watch
        self.carry_out = {actions.Exit: self._exit, **owners}
        self.waiting = deque()
        self.given = []
        self.carried_out = lambda: None
        if watch is not None:
            watch.begin(scheduler)

    def add_owners(self, owners):
        """Who carries out these actions from now on."""
        self.carry_out.update(owners)

    def handle(self, event):
        """Give the scheduler an event and carry out the answer; what that causes comes after it."""
        if self.stepping or self.waiting:
            self.waiting.append(event)
            if self.stepping:
                return
            event = self.waiting.popleft()
        self.stepping = True
        try:
            self._step(event)
            while self.waiting:
                self._step(self.waiting.popleft())
        finally:
            self.stepping = False

    def publish_undone(self):
        """Something raised while an event was carried out. A step that it has committed is
        published all the same, so that the fragments are the cut that the scheduler speaks of."""
        cdef list undone = self.given[self.at:]
        self.given = []
        for action in undone:
            if type(action) is PUBLISH:
                self.carry_out[PUBLISH](action)

    def broken(self, text):
        """Something raised while an event was carried out: what waited behind it is void."""
        self.waiting.clear()
        self.handle(events.Broken(text))

    cdef int _step(self, object event) except -1:
        cdef list given
        cdef Py_ssize_t at
        if self.ending is not None:
            if type(event) is PUSH or type(event) is INIT:
                event.payload.release()           # decoded when everything had ended
            return 0
        if self.watch is not None:
            self.watch.before(event)
        given = self.scheduler.step(self.loop.now_ns(), event)
        if given:
            self.given = given
            for at in range(len(given)):
                self.at = at
                self.carry_out[type(given[at])](given[at])
            self.given = []
        if type(event) is PUSH:
            event.payload.settle()
        if self.watch is not None:
            self.watch.after(event, given)
        if given:
            self.carried_out()
        return 0

    def deadline_ns(self):
        """When `tick_if_due` is due at the latest; None if only an event can change anything."""
        return self.scheduler.deadline_ns()

    def tick_if_due(self):
        """Tell the scheduler that its deadline has passed."""
        deadline_ns = self.scheduler.deadline_ns()
        if deadline_ns is not None and self.loop.now_ns() >= deadline_ns:
            self.handle(events.Tick())

    def _exit(self, action):
        if self.ending is None:
            self.ending = RunEnd(action.status, action.text)
