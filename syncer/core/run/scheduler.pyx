"""The round logic of the syncer: `Scheduler.step(now_ns, event)` returns the actions to carry out.

Pure: state, now and event in, actions out. Must not read a clock, touch a socket, file, thread or
float array, and never raises for what a peer did: that is a `Refuse`, `Release` or log action. The
one exception it raises is InvariantViolation, for a defect of this program.

Each call handles the event and then, while the run is under way, the main loop once:

    1. commit every computed round that is exactly the next step
    2. launch while depth, pace and candidates allow
    3. arm grace where quorum is seen, then close or relaunch what is due

Long work is two events: StartMerge out, MergeDone in; Save out, Saved in. So "persist before
broadcast" is an order of events, not a callback. Every payload handle that comes in leaves exactly
once, in `AdoptInit` or `Release`.

This file is the life of a run, from waiting to exit; the life of a round is in `gathering`, what
becomes of a push in `admission`, and both are layers of the same object.

    WAITING -> RUNNING -> [SAVING ->] FINISHING -> ENDED
               RUNNING -> CUTOFF -> ENDED            a learner budget was spent
               any -> [STOPPING ->] ENDED            a signal or a failed merge, saving the last cut
"""

from syncer.core import actions as act
from syncer.core import events as ev
from syncer.core.rounds.admission cimport Admission
from syncer.core.run.budget cimport BudgetGate
from syncer.core.run.finishing cimport FinalCut
from syncer.core.rounds.membership cimport Member
from syncer.core.rounds.closing cimport NEVER
from syncer.core.run.record cimport failure_record, merge_record
from syncer.core.rounds.round cimport Round, RoundState
from syncer.core.run.saving cimport Saves
from syncer.errors import InvariantViolation
from syncer.exits import Exit, after_signal

cdef int DONE = Exit.DONE
cdef int FAILED = Exit.FAILED
cdef int NOT_WRITTEN = Exit.NOT_WRITTEN
cdef int NEVER_STARTED = Exit.NEVER_STARTED
cdef object U64_MAX = 2**64 - 1

cdef object Push = ev.Push, Heartbeat = ev.Heartbeat, Tick = ev.Tick, MergeDone = ev.MergeDone
cdef object Synced = ev.Synced, Hello = ev.Hello, Disconnected = ev.Disconnected
cdef object CaughtUp = ev.CaughtUp, Init = ev.Init, Saved = ev.Saved, FinalAck = ev.FinalAck
cdef object Stop = ev.Stop, Folded = ev.Folded, BudgetDone = ev.BudgetDone


cdef class Scheduler(Admission):
    """All rules of one run.

    config: a validated `syncer.config.Config`; resumed: the `events.Resumed` state of a checkpoint,
    None for a fresh run. Times are ns of one monotonic clock; a `now_ns` that runs back is taken as
    no time passed.
    """

    def __init__(self, config, resumed=None):
        Admission.__init__(self, config, resumed)
        self.config = config
        self.phase = Phase.WAITING
        self.initialized = []
        self.unsynced = {}
        self.ledger = {}
        self.fingerprint = b""
        self.start_deadline_ns = -1
        self.saves = Saves(config, -1 if resumed is None else resumed.step)
        if resumed is None:
            return
        self.open_session(resumed.fragments)
        self.fingerprint = resumed.fingerprint
        self.ledger = {learner: list(entry) for learner, entry in resumed.ledger.items()}
        self.initialized = [True] * resumed.fragments
        self.global_step = resumed.step
        self.next_step = resumed.step + 1
        for step in range(max(1, resumed.step - resumed.fragments + 1), resumed.step + 1):
            self.versions[(step - 1) % resumed.fragments] = step

    def step(self, now_ns, event):
        """Handle one event at `now_ns` and return the actions it leads to, in order."""
        cdef list out = []
        self.now_ns = max(self.now_ns, <long long>now_ns)
        self.out = out
        self.handle(event)
        if self.phase == Phase.RUNNING:
            self.commit_in_order()
        if self.phase == Phase.RUNNING:
            self.launch_due()
            self.settle_all()
        elif self.phase != Phase.ENDED:
            self.run_timers()
        return out

    def deadline_ns(self):
        """When the next `Tick` is due at the latest, or None if only an event can change anything."""
        cdef long long due = NEVER
        if self.phase == Phase.RUNNING:
            due = self.gathering_deadline_ns()
        elif self.phase == Phase.WAITING and self.policy.start_timeout_ns:
            due = max(self.start_deadline_ns, 0)
        elif self.phase == Phase.FINISHING:
            due = self.final_cut.deadline_ns
        elif self.phase == Phase.CUTOFF:
            due = self.budget.deadline_ns()
        return None if due == NEVER else due

    cdef int run_timers(self) except -1:
        """What ends a phase, other than running, when its time is over."""
        if self.phase == Phase.WAITING and self.policy.start_timeout_ns:
            if self.start_deadline_ns < 0:
                self.start_deadline_ns = self.now_ns + self.policy.start_timeout_ns
            elif self.now_ns >= self.start_deadline_ns:
                self.end(NEVER_STARTED, f"{self.members.current_count} of "
                         f"{self.policy.start_learners} learners came before --start-timeout-s")
        elif self.phase == Phase.FINISHING and self.now_ns >= self.final_cut.deadline_ns:
            self.end(FAILED, "final cut not acknowledged in time; missing learners "
                     f"{self.final_cut.missing()}")
        elif self.phase == Phase.CUTOFF and self.now_ns >= self.budget.deadline_ns():
            self.end(FAILED, "learner budget not reported in time; missing learners "
                     f"{self.budget.expired(self.now_ns)}")
        return 0

    # ---- events --------------------------------------------------------------------------------

    cdef int handle(self, object event) except -1:
        cdef object kind = type(event)
        if kind is Push:
            if self.phase <= Phase.RUNNING:
                self.on_push(event)
                return self.sign_of_life(event)
            self.emit(act.Release(event.payload))
            return self.on_progress(event)
        if kind is Tick:
            return 0
        if kind is Heartbeat:
            return self.on_progress(event)
        if kind is MergeDone:
            return self.on_merge_done(event)
        if kind is Synced:
            return self.on_synced(event)
        if kind is Folded:
            return self.on_folded(event)
        if kind is Hello:
            return self.on_hello(event)
        if kind is Disconnected:
            return self.on_disconnected(event)
        if kind is CaughtUp:
            return self.on_caught_up(event)
        if kind is Init:
            return self.on_init(event)
        if kind is FinalAck:
            return self.on_final_ack(event)
        if kind is Saved:
            return self.on_saved(event)
        if kind is BudgetDone:
            return self.on_budget_done(event)
        if kind is Stop:
            return self.on_stop(event)
        raise InvariantViolation(f"the scheduler was given {event!r}, which is no event")

    cdef int on_hello(self, object event) except -1:
        cdef Member member
        if self.phase >= Phase.STOPPING:
            # An ERROR would end the learner. That is for the end of training; after anything else
            # the run may be resumed, so this HELLO stays unanswered and the learner dials again.
            if self.final_cut is None or not self.final_cut.complete():
                return 0
            return self.emit(act.Refuse(event.connection, "the run has ended"))
        if not 0 <= event.learner < self.policy.learners:
            return self.emit(act.Refuse(
                event.connection, f"learner id {event.learner} is outside configured range "
                f"0..{self.policy.learners - 1}"))
        if self.members.find(event.learner, event.generation) is not None:
            return self.emit(act.Refuse(
                event.connection, f"duplicate connection generation {event.generation} of learner "
                f"{event.learner}: draw a new one for every connection"))
        if self.fragments == 0:
            self.open_session(event.fragments)
            self.fingerprint = event.fingerprint
            self.initialized = [False] * self.fragments
        member = self.members.admit(event.learner, event.generation)
        self.emit(act.Admit(event.connection, event.learner, event.generation))
        self.log("INFO", "learner connected",
                 {"learner": event.learner, "generation": event.generation})
        if self.phase == Phase.WAITING:
            return self.start_if_ready()
        if self.phase == Phase.RUNNING:
            return self.catch_up(member)
        if self.phase == Phase.FINISHING:
            return self.send_final_cut()
        if self.phase == Phase.CUTOFF:
            self.budget.renew(event.learner, self.now_ns)
        return 0

    cdef int on_disconnected(self, object event) except -1:
        cdef Member member = self.members.leave(event.learner, event.generation)
        cdef Member newer
        if member is None or self.phase == Phase.ENDED:
            return 0
        self.log("INFO", "learner disconnected",
                 {"learner": event.learner, "generation": event.generation})
        if self.phase != Phase.RUNNING or self.policy.fixed_roster:
            return 0
        if self.policy.capacity_quorum is not None:
            return self.shrink(member)
        newer = self.members.current[member.learner]
        if newer is not None and not newer.held and self.recovers(member):
            # Its slot could not be rebound while it lived. A held newer member needs nothing here:
            # its own tail is still to come and will find the slot dead.
            self.log("INFO", "recovery replay", {
                "learner": newer.learner, "generation": newer.generation,
                "died": member.generation})
            self.catch_up(newer)
        return 0

    cdef int on_init(self, object event) except -1:
        """First value of a fragment wins; only the newest generation of learner 0 may give it."""
        cdef Member member = self.members.find(event.learner, event.generation)
        if member is not None and event.generation != self.members.newest[event.learner]:
            member.init_dropped = True
        if (self.phase != Phase.WAITING or event.learner != 0
                or not 0 <= event.fragment < self.fragments
                or event.generation != self.members.newest[0] or self.initialized[event.fragment]):
            return self.emit(act.Release(event.payload))
        self.initialized[event.fragment] = True
        self.emit(act.AdoptInit(event.fragment, event.payload))
        if all(self.initialized):
            self.log("INFO", "global parameters initialized", {"fragments": self.fragments})
            self.start_if_ready()
        return 0

    cdef int on_progress(self, object event) except -1:
        """A sign of life with a step count: a heartbeat, or a push that comes after the gate."""
        cdef Member member
        if self.phase == Phase.ENDED:
            return 0
        if self.phase == Phase.CUTOFF:
            if event.local_step <= self.policy.budget_steps:
                self.budget.renew(event.learner, self.now_ns)
            return 0
        member = self.members.find(event.learner, event.generation)
        if member is None:
            return 0
        if self.members.is_current(member):
            member.observe(self.now_ns, event.local_step)
        return self.sign_of_life(event)

    cdef int sign_of_life(self, object event) except -1:
        """A push or heartbeat. Of a learner whose newest connection has gone it says that the
        learner is on this older one: two HELLOs had overtaken each other. It is current again.

        Not done when the newer one goes, because an older one may be open only on this side: nobody
        is there, and a round would wait for it.
        """
        cdef Member member = self.members.find(event.learner, event.generation)
        if member is None or self.members.current[member.learner] is not None:
            return 0
        if member.init_dropped and not all(self.initialized):
            return self.emit(act.Close(member.learner, member.generation, (
                "its initial values came while a newer connection was current; it is to dial "
                "again and give them anew")))
        self.members.promote(member)
        self.log("INFO", "older connection is current again",
                 {"learner": member.learner, "generation": member.generation})
        if self.phase == Phase.WAITING:
            return self.start_if_ready()
        if self.phase == Phase.RUNNING:
            return self.catch_up(member)
        return self.send_final_cut() if self.phase == Phase.FINISHING else 0

    cdef int on_caught_up(self, object event) except -1:
        """Still current? Then the member is held no more and gets its tail."""
        cdef Member member = self.members.find(event.learner, event.generation)
        if member is None or not member.held or not self.members.is_current(member):
            return 0
        if len(event.delivered) != self.fragments:
            raise InvariantViolation(f"{event} names {len(event.delivered)} versions, the session "
                                     f"has {self.fragments} fragments")
        self.members.unhold(member, tuple(event.delivered))
        return self.tail(member) if self.phase == Phase.RUNNING else 0

    cdef int on_merge_done(self, object event) except -1:
        cdef Round round = self.rounds.get(event.step)
        if round is None or round.state != RoundState.COMPUTING:
            return 0
        round.finish_computing(event)
        for payload in round.free_all():
            self.emit(act.Release(payload))
        return 0

    # ---- start and commit ----------------------------------------------------------------------

    cdef int start_if_ready(self) except -1:
        """Every fragment is there and enough learners are: send the initial cut and begin."""
        cdef Py_ssize_t fragment
        cdef tuple members
        if (self.members.current_count < self.policy.start_learners
                or not all(self.initialized)):
            return 0
        if self.saves.every_commit and self.saves.durable_step < 0:
            return self.save("round") if self.saves.outstanding is None else 0
        members = self.members.current_keys()
        self.emit(act.Record({"event": "init" if self.global_step == 0 else "resume",
                              "step": self.global_step, "fragments": self.fragments,
                              "learners": [key[0] for key in members]}))
        if self.global_step >= self.policy.total_steps:
            return self.finish()
        self.phase = Phase.RUNNING
        for fragment in range(self.fragments):
            self.emit(act.Broadcast(self.versions[fragment], fragment, members))
        return 0

    cdef int commit_in_order(self) except -1:
        cdef Round round
        while self.phase == Phase.RUNNING and not self.saves.hold_commits():
            round = self.rounds.get(self.global_step + 1)
            if round is None or round.state != RoundState.READY:
                return 0
            self.commit(round)
        return 0

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
            return self.save("round")
        return self.publish(round)

    cdef dict ledger_after(self, Round round):
        """The ledger, with what a round that is about to be visible adds to it."""
        cdef dict found = {learner: list(entry) for learner, entry in self.ledger.items()}
        if round is not None:
            for c in round.contributions:
                entry = found.setdefault(c.learner, [0, 0, 0])
                for i, count in enumerate((1, c.c_steps, c.c_tokens)):
                    entry[i] = min(entry[i] + count, U64_MAX)
        return found

    cdef int publish(self, Round round) except -1:
        """The round becomes visible; nobody sees it any more once a signal or a budget ends the run."""
        cdef Py_ssize_t fragment = round.fragment
        self.rounds.pop(round.step, None)
        self.global_step = round.step
        self.versions[fragment] = round.step
        round.committed_ns = self.now_ns
        self.ledger = self.ledger_after(round)
        if self.policy.late_carry:
            self.late.note_merged(round.step, frozenset(
                [c.learner for c in round.contributions if not c.carried]))
        self.emit(act.Publish(round.step, fragment))
        if round.step == self.policy.total_steps or self.phase != Phase.RUNNING:
            self.report_unsynced()
            self.report(round, round.compute_ns)
            return self.finish() if self.phase == Phase.RUNNING else 0
        self.unsynced[round.step] = round
        self.emit(act.Broadcast(round.step, fragment, self.members.current_keys()))
        return self.save("periodic") if self.saves.due(round.step) else 0

    cdef int on_synced(self, object event) except -1:
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
        self.sync_ns = sync_ns
        self.log("INFO", "outer step", {
            "step": round.step, "fragment": round.fragment, "attempt": round.attempt,
            "responders": round.pushed, "expected": len(round.slots),
            "ms": (round.committed_ns - round.launch_ns) / 1e6, "gnorm": round.gnorm})
        return self.emit(act.Record(merge_record(round, self.fingerprint.hex(),
                                                 self.policy.quorum, sync_ns)))

    # ---- finishing -----------------------------------------------------------------------------

    cdef int finish(self) except -1:
        """Every step is committed: write what must be written, then send the final cut."""
        cdef list held = self.free_everything()
        for payload in held:                     # late pushes that wait for a round that never comes
            self.emit(act.Release(payload))
        self.phase = Phase.SAVING
        if self.saves.on:
            return self.save("final")
        return self.save("final-state") if self.policy.final_state else self.send_final_cut()

    # ---- saving --------------------------------------------------------------------------------

    cdef int save(self, str kind) except -1:
        """Write the current cut, once the write that may be under way has ended."""
        self.saves.wanted = kind
        return self.save_next()

    cdef int save_next(self) except -1:
        cdef str kind = self.saves.wanted
        cdef long long step = self.global_step if self.committing is None else self.committing.step
        if kind is None or self.saves.outstanding is not None:
            return 0
        if self.saves.failure is not None:
            return self.end(NOT_WRITTEN, self.saves.failure)
        if kind in ("shutdown", "failure") and self.saves.durable_step == step:
            self.saves.wanted = None
            return self.end_stopping()
        self.saves.start(kind, step)
        ledger = {learner: tuple(entry)
                  for learner, entry in self.ledger_after(self.committing).items()}
        return self.emit(act.Save(kind, step, ledger, self.saves.in_background))

    cdef int on_saved(self, object event) except -1:
        cdef str kind
        cdef Round round = self.committing
        if self.saves.outstanding is None or self.phase == Phase.ENDED:
            return 0
        kind = self.saves.done(event.error)
        if event.error is not None:
            return self.not_saved(kind, event.error)
        if kind != "final-state":
            self.emit(act.Record({"event": "checkpoint", "step": self.saves.durable_step,
                                  "kind": kind}))
        if kind == "round" and round is not None:
            self.committing = None
            self.publish(round)
            if self.phase == Phase.STOPPING:
                self.record_shutdown()
        if self.saves.wanted is not None:
            return self.save_next()
        return self.after_save(kind)

    cdef int after_save(self, str kind) except -1:
        """What the phase waits for, now that nothing is being written."""
        if self.phase == Phase.WAITING:
            return self.start_if_ready()
        if self.phase == Phase.STOPPING:
            return self.end_stopping()
        if self.phase == Phase.SAVING:
            return self.save("final-state") if (
                kind == "final" and self.policy.final_state) else self.send_final_cut()
        if self.phase == Phase.CUTOFF and kind == "budget-cutoff":
            self.log("INFO", "learner-budget cutoff checkpoint written", {"step": self.global_step})
            return self.end(DONE, f"learner budget spent after {self.global_step} outer steps")
        return 0

    cdef int not_saved(self, str kind, str error) except -1:
        if self.saves.in_background and kind == "periodic":
            self.emit(act.Log("ERROR", "background checkpoint failed",
                              {"step": self.saves.step, "error": error}))
            return self.save_next()
        if kind == "failure":
            return self.end(FAILED, f"{self.failure}; and the last cut could not be saved: {error}")
        if kind != "final-state":
            return self.end(NOT_WRITTEN, f"checkpoint ({kind}) of step {self.saves.step} could not "
                            f"be written: {error}")
        if self.phase == Phase.STOPPING:
            return self.end_stopping()
        return self.end(FAILED, f"{kind} could not be written: {error}")

    cdef int send_final_cut(self) except -1:
        """Send the cut to every current member that must still acknowledge and has not got it."""
        cdef Member member
        if self.final_cut is None:
            expected = (range(self.policy.learners) if self.policy.fixed_roster
                        else [key[0] for key in self.members.current_keys()])
            if not expected:
                return self.end(FAILED, "no learner is connected to receive the final cut")
            self.phase = Phase.FINISHING
            self.final_cut = FinalCut(self.global_step,
                                      self.now_ns + self.policy.final_ack_timeout_ns, expected)
        for member in self.members.current:
            if (member is not None and self.final_cut.wants(member.learner)
                    and member.key not in self.final_cut.eligible):
                self.emit(act.SendFinal(member.learner, member.generation, self.global_step))
                self.final_cut.eligible.add(member.key)
        return 0

    cdef int on_final_ack(self, object event) except -1:
        cdef dict fields = {"learner": event.learner, "generation": event.generation,
                            "step": event.step}
        if self.phase < Phase.FINISHING:
            return self.warn("final acknowledgement ignored: too early", fields)
        if self.phase != Phase.FINISHING or event.learner in self.final_cut.acknowledged:
            return 0
        if not self.final_cut.acknowledge(event.learner, event.generation, event.step):
            return self.warn("final acknowledgement ignored: not of this final cut", fields)
        self.log("INFO", "learner finalized", fields)
        if not self.final_cut.complete():
            return 0
        self.log("INFO", "all learners acknowledged final cut",
                 {"learners": len(self.final_cut.acknowledged)})
        there = [key for key in sorted(self.final_cut.acknowledged.values())
                 if key in self.members.members]
        if there:
            self.emit(act.SendShutdown(tuple(there)))
        return self.end(DONE, f"training complete after {self.global_step} outer steps")

    # ---- learner budget ------------------------------------------------------------------------

    cdef int on_budget_done(self, object event) except -1:
        """The first report closes the gate: open rounds are dropped whole, nothing starts any more."""
        cdef str who = f"BUDGET_DONE({event.steps}) of learner {event.learner}"
        if self.phase in (Phase.SAVING, Phase.FINISHING, Phase.STOPPING, Phase.ENDED):
            return 0
        if not self.policy.budget_steps:
            return self.end(FAILED, f"{who}: the run has no --learner-budget-steps")
        if event.steps != self.policy.budget_steps:
            return self.end(FAILED, f"{who}: expected {self.policy.budget_steps} steps, as "
                            "--learner-budget-steps says")
        if not (0 <= event.learner < self.policy.learners
                and event.generation == self.members.newest[event.learner]):
            return self.end(FAILED, f"{who} comes from generation {event.generation}, which has "
                            "been superseded")
        if self.phase == Phase.WAITING:
            return self.end(FAILED, f"{who} before the run had begun: there is nothing to save")
        if self.phase == Phase.RUNNING:
            for payload in self.free_everything():
                self.emit(act.Release(payload))
            self.phase = Phase.CUTOFF
            self.budget = BudgetGate(self.policy.learners, self.now_ns,
                                     self.policy.quorum_timeout_ns)
        self.budget.report(event.learner)
        if self.budget.complete() and self.saves.outstanding != "budget-cutoff":
            return self.save("budget-cutoff")
        return 0

    # ---- ending --------------------------------------------------------------------------------

    cdef int on_stop(self, object event) except -1:
        if self.phase >= Phase.STOPPING:
            return 0
        self.stop_signal = event.signal
        if self.committing is None:              # otherwise its step is the last one
            self.record_shutdown()
        for payload in self.free_everything():
            self.emit(act.Release(payload))
        unsaved = (self.saves.on and self.phase in (Phase.RUNNING, Phase.CUTOFF)
                   or self.saves.wanted == "final")
        self.phase = Phase.STOPPING
        if unsaved:
            return self.save("shutdown")
        return self.end_stopping() if self.saves.outstanding is None else 0

    def record_shutdown(self):
        self.emit(act.Record({"event": "shutdown", "step": self.global_step,
                              "signal": self.stop_signal}))

    cdef int fail(self, str text) except -1:
        """The run cannot go on: save the last cut, then end with status 1."""
        if not self.saves.on:
            return self.end(FAILED, text)
        for payload in self.free_everything():
            self.emit(act.Release(payload))
        self.failure = text
        self.phase = Phase.STOPPING
        return self.save("failure")

    cdef int end_stopping(self) except -1:
        if self.failure is not None:
            return self.end(FAILED, self.failure)
        return self.end(after_signal(self.stop_signal),
                        f"stopped by signal {self.stop_signal} after {self.global_step} outer steps")

    cdef int strict_failure(self, str metric, str text) except -1:
        self.emit(act.Record(failure_record(metric, text)))
        return self.end(FAILED, text)

    cdef int end(self, int status, str text) except -1:
        """Free every payload that is still held, then leave."""
        for payload in self.free_everything():
            self.emit(act.Release(payload))
        self.report_unsynced()
        self.phase = Phase.ENDED
        return self.emit(act.Exit(status, text))
