"""What every layer of the scheduler stands on: the policy, the members, the time, and the answer.

One scheduler is one object in layers, each a class on top of the one before and in a file of its
own:

    Ground -> Gathering -> Joining -> Admission -> Excluding     rounds/: a round, who is in it,
                                                    what it accepts, what its merge leaves out
           -> Committing -> Ending              run/: what becomes visible and durable, the end,
           -> Waiting -> Scheduler              what is waited for, what each event means

A layer may call those below it, never one above; what the layers above must know, a method returns.
So a rule is looked for in one file, and the file says at its head which rules those are. Must not
hold a rule itself.
"""

from syncer.core import actions as act
from syncer.core.rounds.membership cimport Membership
from syncer.core.rounds.policy cimport Policy


cdef class Ground:
    """The answer to the event at hand is `out`; `now_ns` is its time."""

    def __init__(self, config, resumed=None):
        self.policy = Policy(config, resumed)
        self.members = Membership(self.policy.learners)
        self.out = []

    cdef int emit(self, object action) except -1:
        self.out.append(action)
        return 0

    cdef int log(self, str level, str text, dict fields) except -1:
        self.out.append(act.Log(level, text, fields))
        return 0

    cdef int warn(self, str text, dict fields) except -1:
        self.out.append(act.Log("WARNING", text, fields))
        return 0

    cdef int release_all(self, list payloads) except -1:
        """Give payloads back that nobody needs any more."""
        for payload in payloads:
            self.out.append(act.Release(payload))
        return 0
