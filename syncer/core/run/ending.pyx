"""How a run comes to its end: every step committed, a learner budget spent, or a signal.

Must not know how a cut is written or a round dropped: that is `committing` and `gathering`. Who has
acknowledged is kept in `finishing`, who has reported in `budget`.

rule 12.1. When every step is committed the final checkpoint is written, then the final state, and
    only then is the final cut sent: a learner that has acknowledged may forget what it knows.
rule 12.2. In a dynamic roster those who are current then must acknowledge, and there must be one;
    in a fixed roster everybody, and the run waits for who is away. A run that is resumed after its
    last step begins with the first learner that comes, and the others dial again within seconds of
    each other: it waits for all that have contributed, or one of them would have the model. One
    that is resumed so short of it that somebody may not have dialed yet waits for him as well:
    nobody is there any more when he does, and he would dial for ever.
rule 12.4. An expected learner that comes again before it has acknowledged gets the cut again.
rule 12.5. When all have acknowledged, those still connected are shut down, and the run ends with
status 0.
rule 12.6. When --final-ack-timeout-s is over first, it ends with status 1 and names who is missing.
    Who was only waited for because it has contributed once, and never came, may have left for good,
    or have got its cut before: that is a warning.
rule 12.8. A supervisor starts a run again that is over, and must see it end well: nobody has to
    come. But learners that were cut off from their final cut dial for as long as they live, and
    others may ask later, so for a while whoever comes is served, one by one.

rule 11.1. The first BUDGET_DONE closes a gate: open rounds are dropped whole, and nothing is
    launched, merged or committed any more. A benchmark compares runs by what was merged when the
    budget was spent; a round that is open then belongs to no run.
rule 11.2. A report that the run cannot trust is refused: no budget was set, the step count is
    another one, its sender is not its learner's newest generation, nothing has begun yet. It ends
    its own connection and nothing else: one learner that counts wrongly must not cost the others
    their run, and who never reports is found out by its lease.
rule 11.3. Every learner has a lease of --quorum-timeout-s from then on, renewed by each sign of
    progress that is within the budget. One that runs out ends the run with status 1.
rule 11.4. When all have reported, an unmarked checkpoint is written once, and the run ends with
    status 0. There is no final cut: the learners' own budget has ended them.

rule 13.1. The first signal drops the open rounds and what waits, lets a write that is under way
    end, saves the last committed cut if there is anything to save, and ends with 128 + its number.
rule 13.7. A run whose files would not fit where they are to be ends with status 5 as soon as its
    layout is known, before anybody trains for a checkpoint that cannot be written.
rule 13.8. A defect of the program ends a run as a failed merge does (rule 13.4): what is committed
    is as good as before. Before the start there is nothing to save; while a run is ending already,
    it ends with this.
"""

from syncer.core import actions as act
from syncer.core.rounds.membership cimport Member
from syncer.core.run.budget cimport BudgetGate
from syncer.core.run.committing cimport Committing
from syncer.core.run.finishing cimport FinalCut
from syncer.core.run.phases cimport Phase
from syncer.exits import Exit

cdef int DONE = Exit.DONE
cdef int FAILED = Exit.FAILED
cdef int NOT_WRITTEN = Exit.NOT_WRITTEN
cdef long long RETURN_NS = 60_000_000_000        # a back-off, and a dial that hangs, are over
cdef object FINAL = act.SaveKind.FINAL, FINAL_STATE = act.SaveKind.FINAL_STATE
cdef object BUDGET_CUTOFF = act.SaveKind.BUDGET_CUTOFF, SHUTDOWN = act.SaveKind.SHUTDOWN


cdef class Ending(Committing):
    """The ways to the end, on top of commits and saves."""

    def __init__(self, config, resumed=None):
        Committing.__init__(self, config, resumed)
        self.lingers = resumed is not None and resumed.is_over
        self.resumed = resumed is not None and not self.lingers
        self.resumed_at_end = self.resumed and resumed.step >= self.policy.total_steps
        self.born_ns = -1
        self.linger_deadline_ns = -1
        self.hoped = frozenset()

    # ---- every step is committed ---------------------------------------------------------------

    # rule 12.1
    cdef int finish(self) except -1:
        """Every step is committed: write what must be written, then send the final cut."""
        if self.lingers:
            return self.send_final_cut()
        self.release_all(self.free_everything())  # late pushes of a round that never comes
        self.members.run_is_over(self.now_ns)
        self.phase = Phase.SAVING
        if self.saves.on:
            return self.save(FINAL)
        return self.save(FINAL_STATE) if self.policy.final_state else self.send_final_cut()

    # rule 12.2, rule 12.4
    cdef int send_final_cut(self) except -1:
        """Send the cut to every current member that must still acknowledge and has not got it."""
        cdef Member member
        if self.final_cut is None:
            expected = (set(range(self.policy.learners))
                        if self.policy.fixed_roster or self.lingers
                        else {key[0] for key in self.members.current_keys()})
            if not expected:
                return self.end(FAILED, "no learner is connected to receive the final cut")
            self.hope_for(self.away() - expected)
            expected |= self.hoped
            self.phase = Phase.FINISHING
            self.final_cut = FinalCut(self.global_step,
                                      self.now_ns + self.policy.final_ack_timeout_ns, expected)
        for member in self.members.current:
            if (member is not None and self.final_cut.wants(member.learner)
                    and member.key not in self.final_cut.eligible):
                self.emit(act.SendFinal(member.learner, member.generation, self.global_step))
                self.final_cut.eligible.add(member.key)
        return 0

    cdef set away(self):
        """Who has contributed, and may still be about to dial this process for the first time."""
        if not self.resumed or not (self.resumed_at_end
                                    or self.now_ns < self.born_ns + RETURN_NS):
            return set()
        return {learner for learner in self.ledger if learner < self.policy.learners and (
            self.resumed_at_end or not self.members.latest[learner])}

    cdef int hope_for(self, learners) except -1:
        """They may be about to dial again, or have ended long ago."""
        self.hoped = frozenset(learners)
        return self.warn("the final cut waits for learners that contributed before", {
            "learners": sorted(self.hoped),
            "seconds": self.policy.final_ack_timeout_ns / 1e9}) if self.hoped else 0

    # rule 12.5
    cdef int acknowledged(self, object event) except -1:
        """A FINAL_ACK while the final cut is out."""
        cdef dict fields = {"learner": event.learner, "generation": event.generation,
                            "step": event.step}
        if event.learner in self.final_cut.acknowledged:
            return 0
        if not self.final_cut.acknowledge(event.learner, event.generation, event.step):
            return self.warn("final acknowledgement ignored: not of this final cut", fields)
        self.log("INFO", "learner finalized", fields)
        if self.lingers:
            return self.emit(act.SendShutdown(((event.learner, event.generation),)))
        if not self.final_cut.complete():
            return 0
        self.log("INFO", "all learners acknowledged final cut",
                 {"learners": len(self.final_cut.acknowledged)})
        return self.complete()

    cdef int complete(self) except -1:
        """Everybody who was awaited has the final cut."""
        there = [key for key in sorted(self.final_cut.acknowledged.values())
                 if key in self.members.members]
        if there:
            self.emit(act.SendShutdown(tuple(there)))
        if self.unwritten is not None:  # rule 12.7
            return self.end(FAILED, f"final-state could not be written: {self.unwritten}")
        return self.end(DONE, f"training complete after {self.global_step} outer steps")

    # rule 12.6
    cdef int final_cut_overdue(self) except -1:
        if self.now_ns < self.final_cut.deadline_ns:
            return 0
        missing = frozenset(self.final_cut.missing())
        if missing <= self.hoped - {key[0] for key in self.final_cut.eligible}:
            self.warn("the run ends without learners that did not come back",
                      {"learners": sorted(missing)})
            return self.complete()
        return self.end(FAILED, "final cut not acknowledged in time; missing learners "
                        f"{self.final_cut.missing()}")

    # rule 12.8
    cdef int linger(self) except -1:
        """The run was over when it was started again: how long it serves the final cut."""
        if self.linger_deadline_ns < 0:
            self.linger_deadline_ns = self.now_ns + self.policy.linger_ns
        if self.now_ns < self.linger_deadline_ns and not (
                self.policy.lingers_until_all_have_it and self.all_have_it()):
            return 0
        if self.now_ns < self.linger_due_ns() and self.is_serving():
            return 0
        return self.end(DONE, f"training was complete after {self.global_step} outer steps; "
                        f"learners that asked for the final parameters again: {self.served()}")

    cdef long long linger_due_ns(self):
        """When lingering ends, whoever is being served: who is gets as long as in any run."""
        if self.linger_deadline_ns < 0 or self.now_ns < self.linger_deadline_ns:
            return max(self.linger_deadline_ns, 0)
        return self.linger_deadline_ns + self.policy.final_ack_timeout_ns

    cdef bint is_serving(self):
        """Is the cut on its way to somebody?"""
        return self.final_cut is not None and any(
            self.final_cut.wants(key[0]) and key in self.members.members
            for key in self.final_cut.eligible)

    cdef bint all_have_it(self):
        """Has everybody who contributed said so in this process?"""
        return self.final_cut is not None and all(
            learner in self.final_cut.acknowledged for learner in self.ledger
            if learner < self.policy.learners)

    cdef int served(self):
        return 0 if self.final_cut is None else len(self.final_cut.acknowledged)

    # ---- a learner budget is spent -------------------------------------------------------------

    # rule 11.2
    cdef int budget_done(self, object event) except -1:
        """A BUDGET_DONE, of a learner that did what it was asked for or of one that did not."""
        cdef str problem = self.budget_problem(event)
        if problem is not None:
            self.warn("report of a spent budget refused", {
                "learner": event.learner, "generation": event.generation, "steps": event.steps,
                "reason": problem})
            return self.emit(act.Close(event.learner, event.generation, (
                f"BUDGET_DONE({event.steps}) of learner {event.learner}: {problem}"), told=True))
        if self.phase == Phase.RUNNING:
            self.close_gate()
        self.budget.report(event.learner)
        if self.budget.complete() and self.saves.outstanding is not BUDGET_CUTOFF:
            return self.save(BUDGET_CUTOFF)
        return 0

    cdef str budget_problem(self, object event):
        """Why a report cannot be trusted, or None."""
        if not self.policy.learner_budget_steps:
            return "the run has no --learner-budget-steps"
        if event.steps != self.policy.learner_budget_steps:
            return (f"expected {self.policy.learner_budget_steps} steps, as "
                    "--learner-budget-steps says")
        if (event.generation != self.members.newest[event.learner]
                and event.generation != self.members.latest[event.learner]):
            return (f"generation {event.generation} has been superseded; report on the newest "
                    "connection, or try again later")
        if self.phase == Phase.WAITING:
            return "the run has not begun: there is nothing to save"
        return None

    # rule 11.1
    cdef int close_gate(self) except -1:
        self.release_all(self.free_everything())
        self.phase = Phase.CUTOFF
        self.budget = BudgetGate(self.policy.learners, self.now_ns, self.policy.quorum_timeout_ns)
        return 0

    # rule 11.4
    cdef int budget_saved(self) except -1:
        self.log("INFO", "learner-budget cutoff checkpoint written", {"step": self.global_step})
        return self.end(DONE, f"learner budget spent after {self.global_step} outer steps")

    cdef int budget_overdue(self) except -1:
        if self.now_ns < self.budget.deadline_ns():
            return 0
        return self.fail("learner budget not reported in time; missing learners "
                         f"{self.budget.expired(self.now_ns)}")

    # ---- a signal ------------------------------------------------------------------------------

    # rule 13.1
    cdef int stop(self, object event) except -1:
        """The first SIGTERM, SIGINT or SIGHUP; a second is the driver's, which then just ends."""
        cdef bint unsaved = (
            self.saves.on and (self.phase == Phase.RUNNING or self.phase == Phase.CUTOFF)
            or self.saves.wanted is FINAL)
        self.stop_signal = event.signal
        if self.committing is None:              # otherwise its step is the last one (rule 13.2)
            self.record_shutdown()
        self.release_all(self.free_everything())
        self.phase = Phase.STOPPING
        if unsaved:
            return self.save(SHUTDOWN)
        return self.end_stopping() if self.saves.outstanding is None else 0

    # ---- the run cannot go on ------------------------------------------------------------------

    # rule 13.7
    cdef int no_room(self, object event) except -1:
        return self.end(NOT_WRITTEN, event.text)

    # rule 13.8
    cdef int broken(self, object event) except -1:
        if self.phase == Phase.WAITING:
            return self.end(FAILED, event.text)
        if self.phase != Phase.STOPPING:
            return self.fail(event.text)
        if self.failure is None:
            self.failure_status = FAILED
            self.failure = event.text            # the save that it waits for goes on
        return 0
