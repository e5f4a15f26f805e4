"""Which write is under way, which one waits for it, and what is on disk: rounds.md 10 and 12.

Pure bookkeeping; when to write is the scheduler's. There is one Save at a time: what comes while one
runs waits for its Saved. Kinds: "round" (before a step becomes visible), "periodic", "final",
"final-state", "budget-cutoff", "shutdown" (a signal) and "failure" (the last cut of a broken run).
"""


cdef class Saves:
    """config: of the run; durable_step: of the checkpoint it was resumed from, -1 for none."""

    def __init__(self, config, long long durable_step=-1):
        self.on = config.checkpoint_path is not None
        self.every = config.checkpoint_every
        self.every_commit = self.on and self.every == 1
        self.background = self.on and config.background_checkpoint
        self.durable_step = durable_step

    cdef bint hold_commits(self):
        """The cut that is written, or waits to be written, is the current one: it must stay so.

        A write in the background holds its versions itself.
        """
        return self.wanted is not None or (self.outstanding is not None and not self.in_background)

    cdef bint due(self, long long step):
        """Is a periodic save due after this step?"""
        return self.on and self.every > 1 and step % self.every == 0

    cdef int start(self, str kind, long long step) except -1:
        """The wanted save begins."""
        self.wanted = None
        self.outstanding = kind
        self.step = step
        self.in_background = self.background and kind == "periodic"
        return 0

    cdef str done(self, object error):
        """The save that was under way has ended; returns its kind."""
        cdef str kind = self.outstanding
        self.outstanding = None
        if error is not None:
            if self.in_background:
                self.failure = f"{kind} checkpoint of step {self.step} was not written: {error}"
        elif kind != "final-state":
            self.durable_step = self.step
        return kind
