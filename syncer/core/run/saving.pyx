"""Which write is under way, which one waits for it, and what is on disk.

Pure bookkeeping; must not decide when to write, which is `committing`'s. There is one Save at a
time: what comes while one runs waits for its Saved (rule 10.3). The kinds are `actions.SaveKind`.

rule 10.4. A periodic checkpoint is due after every N-th step, counted from the first step of the
    run and not of the process, so that a resumed run writes at the steps where an unbroken one
    would.
rule 10.5. Commits wait while a cut is written, or waits to be written: it is the current one and
    must stay it, since the writer reads the versions themselves, not copies. A write in the
    background holds its versions itself, at the price of memory, and rounds go on.
rule 10.8. The steps of a renumbered run (rule 1.8) are in no file yet. Where every step has to be
    durable before it is seen they are saved first, as version 0 is; elsewhere in the background,
    with the start: learners wait for a server that was gone, and the state may be large. Should it
    die before that, the next one counts on from what rule 1.10 has kept.
rule 10.6. When a write in the background fails, the run goes on: the file before is intact. It is
    told, and if a failure is to stop the run, it does when the next write is due, since from then
    on the promise that at most N steps can be lost is broken. The cut of that moment is tried all
    the same: whatever the disk takes is worth having.
rule 10.10. What is written in the background takes what the rounds leave, which may be very little.
    From the moment on that something waits for it, commits wait for it, too: then it is as urgent
    as any other write.
rule 10.9. A directory that is away for a moment must not end a run of weeks. Where more than one
    step may be lost in any case, a save that fails makes it some more, and the next one makes up
    for it; so only a run that asked for it, or that promised never to lose a step, ends over one.
"""

from syncer.core.actions import SaveKind

cdef object PERIODIC = SaveKind.PERIODIC, FINAL_STATE = SaveKind.FINAL_STATE
cdef object ROUND = SaveKind.ROUND


cdef class Saves:
    """config: of the run; durable_step: of the checkpoint it was resumed from, -1 for none."""

    def __init__(self, config, long long durable_step=-1):
        self.on = config.checkpoint_path is not None
        self.every = config.checkpoint_every
        self.every_commit = self.on and self.every == 1
        self.background = self.on and config.background_checkpoint
        self.goes_on = config.goes_on_unsaved
        self.durable_step = durable_step
        self.begun = durable_step >= 0

    # rule 10.5
    cdef bint hold_commits(self):
        """The cut that is written, or waits to be written, is the current one: it must stay so."""
        return self.wanted is not None or (self.outstanding is not None and not self.in_background)

    cdef bint first_due(self):
        """Is version 0 still to be written (rule 10.2)?"""
        return self.on and not self.begun

    # rule 10.10
    cdef bint gives_way(self):
        """Is there a write under way that has nobody waiting for it so far?"""
        return self.outstanding is not None and self.in_background and self.wanted is None

    # rule 10.9
    cdef bint forgives(self, object kind):
        """Does the run go on without a save of this kind? Not without its last one."""
        return self.goes_on and (kind is ROUND or kind is PERIODIC)

    # rule 10.4
    cdef bint due(self, long long step):
        """Is a periodic save due after this step?"""
        return self.on and self.every > 1 and step % self.every == 0

    # rule 10.8
    cdef int start(self, object kind, long long step, bint running) except -1:
        """The wanted save begins. While the run has no file of its steps at all, rounds go on in
        any case."""
        self.wanted = None
        self.outstanding = kind
        self.step = step
        self.in_background = running and kind is PERIODIC and (
            self.background or not self.begun)
        return 0

    # rule 10.6
    cdef object done(self, object error):
        """The save that was under way has ended; returns its kind."""
        kind = self.outstanding
        self.outstanding = None
        if kind is FINAL_STATE:
            return kind
        self.begun = True
        if error is None:
            self.durable_step = self.step
            self.failures = 0
            return kind
        self.failures += 1
        if self.in_background and not self.forgives(kind):
            self.failure = f"{kind} checkpoint of step {self.step} was not written: {error}"
        return kind
