"""What becomes visible and what becomes durable, in which order, and how a run ends.

Must not decide when a run is complete or who hears of it: those are the layers above.

A computed round is *committed* when its result is the fragment's version. Long work is two events,
StartMerge out and MergeDone in, Save out and Saved in; so "durable before visible" is an order of
events that a test can write down, not a callback.

rule 5.9. A run that allows no stale base ends with the first one: what it is for, that every merge
    has everybody against the current version, has failed. The cut before that is as good as ever.

rule 9.1. Commits are in step order, whatever order the merges end in: a round that is computed
    waits for its predecessors. Every learner then sees the same history, and every cut is a prefix
    of it.
rule 9.2. A merge that fails for good publishes nothing. The last cut is saved and the run ends with
    status 1: going on without this step would be another run.
rule 9.3. A commit is published, and broadcast to every current member. Version T is not: the final
    cut follows, in full precision. Nor what is committed while a signal ends the run.
rule 9.4. The ledger counts, for each learner whose push or carried delta was merged, the merges,
    steps and tokens. A counter that is full stays full.
rule 9.5. Log and tape hear of a step when its broadcast is queued, or at once if the run is over,
    and in step order either way.

rule 10.1. With --checkpoint-every 1 a step is durable before it is visible: nobody ever holds a
    version that a restart would not know. The cut then holds the computed result of its step. Step
    T need not be: it has no broadcast, and the final checkpoint comes next.
rule 10.3. There is one write at a time. What is wanted meanwhile waits for its Saved, and then
    takes what is current, so that a slow disk writes fewer cuts, never older ones.
rule 10.7. A checkpoint that cannot be written ends the run with status 5, unless the run goes on
    (rule 10.9): its last one always does.

rule 12.7. A final state that cannot be written takes nothing from the learners: they get the final
    cut all the same, and only then does the run end with status 1.

rule 13.2. A signal that comes while a step is being made durable does not take it back: once it is
    on disk it is published, and is the last one.
rule 13.3. A signal or a failure writes no cut that is on disk already.
rule 13.4. A run that cannot go on saves its last cut before it ends, if it saves at all: no status
    but 0 may cost a step that was committed.
rule 13.6. Whatever ends a run, every payload that is still held is given back first, and every
    committed step is on the tape.
"""

from syncer.core import actions as act
from syncer.core.rounds.excluding cimport Excluding
from syncer.core.rounds.round cimport Round, RoundState
from syncer.core.run.phases cimport Phase
from syncer.core.run.record cimport failure_record, merge_record
from syncer.core.run.saving cimport Saves
from syncer.errors import InvariantViolation
from syncer.exits import Exit, after_signal
from syncer.protocol import PushFate

cdef int FAILED = Exit.FAILED
cdef int NOT_WRITTEN = Exit.NOT_WRITTEN
cdef object U64_MAX = 2**64 - 1
cdef object MERGED = PushFate.MERGED
cdef object ROUND = act.SaveKind.ROUND, PERIODIC = act.SaveKind.PERIODIC
cdef object FINAL_STATE = act.SaveKind.FINAL_STATE
cdef object SHUTDOWN = act.SaveKind.SHUTDOWN, FAILURE = act.SaveKind.FAILURE


cdef class Committing(Excluding):
    """Commits, saves and the end of a run, on top of the rounds.

    Large: commit and save wait for each other in both directions, so they are one class.
    """

    def __init__(self, config, resumed=None):
        Excluding.__init__(self, config, resumed)
        self.phase = Phase.WAITING
        self.unsynced = {}
        self.ledger = {}
        self.fingerprint = b""
        self.saves = Saves(config, -1 if resumed is None or resumed.unsaved else resumed.step)
        if resumed is not None:
            self.fingerprint = resumed.fingerprint
            self.ledger = {learner: list(entry) for learner, entry in resumed.ledger.items()}

    # ---- commit --------------------------------------------------------------------------------

    # rule 9.1
    cdef int commit_in_order(self) except -1:
        cdef Round round
        while self.phase == Phase.RUNNING and not self.saves.hold_commits():
            round = self.rounds.get(self.global_step + 1)
            if round is None or round.state != RoundState.READY:
                return 0
            self.commit(round)
        return 0

    # rule 9.2, rule 10.1
    cdef int commit(self, Round round) except -1:
        """A computed round is next: make it durable first if every step is, then visible."""
        cdef Py_ssize_t fragment = round.fragment
        if round.error is not None:
            return self.fail(f"merge of step {round.step} failed: {round.error}")
        if self.versions[fragment] != round.base:
            raise InvariantViolation(
                f"step {round.step} merged onto version {round.base} of fragment {fragment}, but "
                f"the fragment is at {self.versions[fragment]}")
        if self.saves.every_commit and round.step != self.policy.total_steps:
            self.committing = round
            return self.save(ROUND)
        return self.publish(round)

    # rule 9.4
    cdef int add_to(self, dict ledger, Round round) except -1:
        """What a round that becomes visible, or is about to, adds to a ledger."""
        for c in round.contributions:
            entry = ledger.setdefault(c.learner, [0, 0, 0])
            for i, count in enumerate((1, c.c_steps, c.c_tokens)):
                entry[i] = min(entry[i] + count, U64_MAX)
        return 0

    # rule 9.3
    cdef int publish(self, Round round) except -1:
        """The round becomes visible; to nobody any more once a signal ends the run."""
        self.committed(round)
        self.add_to(self.ledger, round)
        self.emit(act.Publish(round.step, round.fragment))
        for contribution in round.contributions:
            if not contribution.carried:
                self.tell_fate(contribution, round.fragment, round.step, round.attempt, MERGED)
        if round.step == self.policy.total_steps or self.phase != Phase.RUNNING:
            self.report_unsynced()
            return self.report(round, round.compute_ns)
        self.unsynced[round.step] = round
        self.emit(act.Broadcast(round.step, round.fragment, self.members.current_keys()))
        return self.save(PERIODIC) if self.saves.due(round.step) else 0

    # rule 9.5
    cdef int synced(self, object event) except -1:
        """The broadcast of a step is queued: now its record says how long all of it took."""
        cdef Round round = self.unsynced.pop(event.step, None)
        if round is not None:
            self.report(round, round.compute_ns + event.elapsed_ns)
        return 0

    cdef int report_unsynced(self) except -1:
        """Steps committed in this very call: the tape has them too, and in step order."""
        cdef Round round
        for step in sorted(self.unsynced):
            round = self.unsynced[step]
            self.report(round, round.compute_ns)
        self.unsynced.clear()
        return 0

    cdef int report(self, Round round, long long sync_ns) except -1:
        self.sync_took(sync_ns)
        self.log("INFO", "outer step", {
            "step": round.step, "fragment": round.fragment, "attempt": round.attempt,
            "responders": round.pushed, "expected": len(round.slots),
            "ms": (round.committed_ns - round.launch_ns) / 1e6, "gnorm": round.gnorm})
        return self.emit(act.Record(merge_record(round, self.fingerprint.hex(),
                                                 self.policy.quorum, sync_ns,
                                                 self.saves.failures)))

    # ---- save ----------------------------------------------------------------------------------

    cdef int save(self, object kind) except -1:
        """Write the current cut, once the write that may be under way has ended."""
        if self.saves.gives_way():
            self.emit(act.Hasten(self.saves.step))
        self.saves.wanted = kind
        return self.save_next()

    # rule 10.3, rule 13.3
    cdef int save_next(self) except -1:
        cdef object kind = self.saves.wanted
        cdef long long step = self.global_step if self.committing is None else self.committing.step
        cdef dict ledger
        if kind is None or self.saves.outstanding is not None:
            return 0
        if self.saves.failure is not None:
            return self.give_up_saving()
        if (kind is SHUTDOWN or kind is FAILURE) and self.saves.durable_step == step:
            self.saves.wanted = None
            return self.end_stopping()
        self.saves.start(kind, step, self.phase == Phase.RUNNING)
        ledger = {learner: list(entry) for learner, entry in self.ledger.items()}
        if self.committing is not None:
            self.add_to(ledger, self.committing)
        return self.emit(act.Save(
            kind, step, {learner: tuple(entry) for learner, entry in ledger.items()},
            self.saves.in_background))

    # rule 13.2
    cdef object saved(self, object event):
        """A write has ended.

        Returns its kind if it is durable and nothing else is to be written: what the phase waits
        for may go on.
        """
        cdef Round round = self.committing
        if self.saves.outstanding is None:
            raise InvariantViolation(f"{event}, but nothing was being written")
        kind = self.saves.done(event.error)
        if event.error is None and kind is not FINAL_STATE:
            self.emit(act.Record({"event": "checkpoint", "at_step": self.saves.durable_step,
                                  "kind": kind}))
        elif self.saves.forgives(kind):
            self.without_it(kind, event.error)
        elif event.error is not None and kind is not FINAL_STATE:
            self.not_saved(kind, event.error)
            return None
        elif event.error is not None:
            self.no_final_state(event.error)
        if kind is ROUND and round is not None:
            self.committing = None
            self.publish(round)
            if self.phase == Phase.STOPPING:
                self.record_shutdown()
        if self.saves.wanted is None:
            return kind
        self.save_next()
        return None

    cdef int without_it(self, object kind, str error) except -1:
        """A save has failed, and the next one may succeed (rule 10.9)."""
        return self.warn("the run goes on without a checkpoint", {
            "kind": kind, "step": self.saves.step, "failures": self.saves.failures,
            "on_disk": None if self.saves.durable_step < 0 else self.saves.durable_step})

    cdef int give_up_saving(self) except -1:
        """A write in the background has failed, and the next is due: it is the last (rule 10.6)."""
        cdef str failure = self.saves.failure
        self.saves.failure = None
        return self.fail_with(NOT_WRITTEN, failure)

    # rule 10.7
    cdef int not_saved(self, object kind, str error) except -1:
        if self.saves.in_background and kind is PERIODIC:
            self.emit(act.Log("ERROR", "background checkpoint failed",
                              {"step": self.saves.step, "error": error}))
            return self.save_next()
        if kind is FAILURE:
            return self.end(self.failure_status,
                            f"{self.failure}; and the last cut could not be saved: {error}")
        return self.end(NOT_WRITTEN, f"checkpoint ({kind}) of step {self.saves.step} could not be "
                        f"written: {error}")

    # rule 12.7
    cdef int no_final_state(self, str error) except -1:
        """The run goes on to its end as if it had been written; that end says so."""
        self.unwritten = error
        return self.emit(act.Log("ERROR", "final state not written",
                                 {"step": self.saves.step, "error": error}))

    # ---- the end -------------------------------------------------------------------------------

    cdef int record_shutdown(self) except -1:
        return self.emit(act.Record({"event": "shutdown", "step": self.global_step,
                                     "signal": self.stop_signal}))

    cdef int fail(self, str text) except -1:
        """The run cannot go on: save the last cut, then end with status 1."""
        return self.fail_with(FAILED, text)

    # rule 13.4
    cdef int fail_with(self, int status, str text) except -1:
        """As `fail`, with another status. Before the start there is no cut to save."""
        if not self.saves.on or self.phase == Phase.WAITING:
            return self.end(status, text)
        self.release_all(self.free_everything())
        self.failure = text
        self.failure_status = status
        self.phase = Phase.STOPPING
        return self.save(FAILURE)

    # rule 5.9
    cdef int strict_failure(self, int status, str metric, str text) except -1:
        """A rule without exception was broken: the run ends, and the tape says by what."""
        self.emit(act.Record(failure_record(metric, text)))
        return self.fail_with(status, text)

    cdef int end_stopping(self) except -1:
        if self.failure is not None:
            return self.end(self.failure_status, self.failure)
        return self.end(after_signal(self.stop_signal),
                        f"stopped by signal {self.stop_signal} after {self.global_step} outer "
                        "steps")

    # rule 13.6
    cdef int end(self, int status, str text) except -1:
        """Free every payload that is still held, then leave."""
        self.release_all(self.free_everything())
        self.report_unsynced()
        self.phase = Phase.ENDED
        return self.emit(act.Exit(status, text))
