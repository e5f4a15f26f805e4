"""The round logic of the syncer: `Scheduler.step(now_ns, event)` returns the actions to carry out.

Pure: state, now and event in, actions out. Must not read a clock, touch a socket, file, thread or
float array, and never raises for what a peer did: that is a `Refuse`, `Release` or log action. The
one exception it raises is InvariantViolation, for a defect of this program.

All rules are in docs/rules.md, by number; a rule's home is the function under its number. This file
is the top layer: what each event means, who comes, how a run starts, and the order of things after
every event. The layers below are listed in `rounds.ground`, the phases in `phases`.

rule 1.7. After every event, until the run is ending: who is current (rule 2.4). And while it is
    under way, in this order:

    1. commit every computed round that is exactly the next step
    2. if every step is committed, finish
    3. launch while depth, pace and candidates allow
    4. arm grace where quorum is seen, then close or relaunch what is due
    5. give slots of silent connections to the current ones
    6. ask again whose answer was of no use

    Commits come first, since they make room for launches; closing comes behind launching, since a
    launch may bring a carried delta that closes its round; who is asked must have a round that is
    still open. In the other phases the deadline of the phase is looked at instead. Time alone is an
    event too: `Tick`, at the latest when `deadline_ns` says.

Every payload handle that comes in leaves exactly once, in `AdoptInit` or `Release`.

rule 1.3. Initial values come from learner 0. The first value of a fragment wins, and only the
    newest generation may give it: an older connection may be a process that has died.
rule 1.5. Training starts when every fragment has its value and enough learners are current. The
    initial cut goes to each of them, fragment by fragment, and they are launchable at once: their
    first pull is queued behind it. A run resumed with no step left goes straight to its end.
rule 10.2. Version 0 is durable before that: a crash in the first steps must not cost the initial
    values that the learners train from, whose learner has moved on from them.

rule 2.5. An older connection that is to be current again (rule 2.4, rule 2.7) gets all that a HELLO
    brings. But before the start, if its initial values were dropped meanwhile, it is closed without
    an ERROR instead. Its learner dials again and gives them anew.

rule 3.10. A learner that comes back, after an outage or to a process that went on from a file, has
    most fragments already, and knows of which version of which process. What is current of them is
    kept: it counts as delivered, and no byte of it is sent. Before the start that is left out of
    the first broadcasts, later its connection passes over it in every catch-up. Nothing is kept of
    a run that has made its last step: the final cut is whole, since it is compared as a whole.

rule 7.4. The worker's answer makes a round ready; the payloads it was computed from go back.

rule 12.9. Somebody may go back to an earlier checkpoint of a run that was over, or ask for more
    steps. A learner that has its final cut, and only waits to be let go, would be pulled, never
    answer and be waited for: it is told, so that whoever runs it starts it again.

rule 13.5. A HELLO while a run is ending stays unanswered, so that its learner dials again and finds
    the resumed run. Only after training is complete does it get an ERROR, which ends it.

rule 14.6. A HELLO of another session than the one that was resumed is refused at the door. In a
    strict run (--max-base-lag 0), before the start, it also ends the run with status 4: such a run
    is one experiment with one model, and a learner of another one says that the wrong file was
    resumed. Later it is a stray learner, which must not end a run that is under way.
"""

from syncer.core import actions as act
from syncer.core.run.phases import phases as phase_names
from syncer.core.deadlines cimport NEVER
from syncer.core.rounds.membership cimport Member
from syncer.core.rounds.round cimport Round, RoundState
from syncer.core.run.phases cimport Handler, Phase, handler_of
from syncer.core.run.waits cimport Waiting
from syncer.errors import InvariantViolation
from syncer.exits import Exit
from syncer.protocol import RunState

cdef int FAILED = Exit.FAILED
cdef int NOT_RESUMABLE = Exit.NOT_RESUMABLE
cdef object WAITING = RunState.WAITING, RUNNING = RunState.RUNNING
cdef object FINISHING = RunState.FINISHING
cdef object ROUND = act.SaveKind.ROUND, PERIODIC = act.SaveKind.PERIODIC
cdef object FINAL = act.SaveKind.FINAL
cdef object FINAL_STATE = act.SaveKind.FINAL_STATE, BUDGET_CUTOFF = act.SaveKind.BUDGET_CUTOFF


cdef class Scheduler(Waiting):
    """All rules of one run.

    config: a validated `syncer.config.Config`; resumed: the `events.Resumed` state of a checkpoint,
    None for a fresh run. Times are ns of one monotonic clock; a `now_ns` that runs back is taken as
    no time passed.

    Large: about one method for each kind of event.
    """

    def __init__(self, config, resumed=None):
        Waiting.__init__(self, config, resumed)
        self.config = config
        if resumed is not None:
            self.open_session(resumed.fragments, resumed.step)
            self.initialized = [True] * resumed.fragments

    # rule 1.7
    cpdef list step(self, long long now_ns, object event):
        """Handle one event at `now_ns` and return the actions it leads to, in order."""
        cdef list out = []
        self.now_ns = max(self.now_ns, now_ns)
        if self.born_ns < 0:
            self.born_ns = self.now_ns
        self.out = out
        self.handle(event)
        self.succeed()
        if self.phase == Phase.RUNNING:
            self.commit_in_order()
        if self.phase == Phase.RUNNING and self.global_step >= self.policy.total_steps:
            self.finish()
        elif self.phase == Phase.RUNNING:
            self.launch_due()
            self.settle_all()
            self.take_slots()
            self.ask_again()
        else:
            self.run_timers()
        self.look_wait()
        return out

    def deadline_ns(self):
        """When the next `Tick` is due at the latest; None if only an event can change anything."""
        cdef long long due = NEVER
        if self.phase == Phase.RUNNING:
            due = min(self.gathering_deadline_ns(), self.joining_deadline_ns())
        elif self.lingers and (self.phase == Phase.WAITING or self.phase == Phase.FINISHING):
            due = self.linger_due_ns()
        elif self.phase == Phase.WAITING and self.policy.start_timeout_ns:
            due = max(self.start_deadline_ns, 0)
        elif self.phase == Phase.FINISHING:
            due = self.final_cut.deadline_ns
        elif self.phase == Phase.CUTOFF:
            due = self.budget.deadline_ns()
        if self.phase != Phase.STOPPING and self.phase != Phase.ENDED:
            due = min(due, self.members.heir_deadline_ns())
        due = min(due, self.tell_ns)
        return None if due == NEVER else due

    cdef int run_timers(self) except -1:
        """What ends a phase, other than running, when its time is over."""
        if self.lingers and (self.phase == Phase.WAITING or self.phase == Phase.FINISHING):
            return self.linger()
        if self.phase == Phase.WAITING:
            return self.start_overdue()
        if self.phase == Phase.FINISHING:
            return self.final_cut_overdue()
        if self.phase == Phase.CUTOFF:
            return self.budget_overdue()
        return 0

    cdef int handle(self, object event) except -1:
        """Do what the phase's cell for this event says (`phases.TABLE`)."""
        cdef int handler = handler_of(self.phase, event)
        if handler == Handler.PUSH:
            return self.on_push(event)
        if handler == Handler.PROGRESS:
            return self.on_progress(event)
        if handler == Handler.TIME or handler == Handler.IGNORE:
            return 0
        if handler == Handler.MERGED:
            return self.on_merge_done(event)
        if handler == Handler.SYNCED:
            return self.synced(event)
        if handler == Handler.FOLDED:
            return self.folded(event)
        if handler == Handler.HELLO:
            return self.on_hello(event)
        if handler == Handler.GONE:
            return self.on_disconnected(event)
        if handler == Handler.CAUGHT_UP:
            return self.caught_up(event)
        if handler == Handler.STALLED:
            return self.on_stalled(event)
        if handler == Handler.INIT:
            return self.on_init(event)
        if handler == Handler.RELEASE:
            return self.emit(act.Release(event.payload))
        if handler == Handler.OUTLIVED:
            self.emit(act.Release(event.payload))
            return self.on_progress(event)
        if handler == Handler.SAVED:
            return self.after_save(self.saved(event))
        if handler == Handler.ACK:
            return self.acknowledged(event)
        if handler == Handler.EARLY:
            return self.early_ack(event)
        if handler == Handler.BUDGET:
            return self.budget_done(event)
        if handler == Handler.STOP:
            return self.stop(event)
        if handler == Handler.TURN_AWAY:
            return self.turn_away(event)
        if handler == Handler.MISFIT:
            return self.on_misfit(event)
        if handler == Handler.NO_ROOM:
            return self.no_room(event)
        if handler == Handler.BROKEN:
            return self.broken(event)
        raise InvariantViolation(f"{event!r} in the phase {phase_names()[self.phase]}, where "
                                 "nothing can have caused it")

    # ---- who comes and goes --------------------------------------------------------------------

    cdef int on_hello(self, object event) except -1:
        cdef Member member
        if self.members.was_used(event.learner, event.generation):
            return self.emit(act.Refuse(
                event.connection, f"duplicate connection generation {event.generation} of learner "
                f"{event.learner}: draw a new one for every connection"))
        if self.fragments == 0:
            self.open_session(event.fragments)
            self.fingerprint = event.fingerprint
            self.initialized = [False] * self.fragments
        member = self.members.admit(event.learner, event.generation, self.now_ns,
                                    self.kept_of(event), event.wants_fates)
        self.emit(act.Admit(event.connection, event.learner, event.generation, self.run_state(),
                            self.global_step, tuple([(fragment, self.versions[fragment])
                                                     for fragment in sorted(member.kept)])))
        merges, _, tokens = self.ledger.get(event.learner, (0, 0, 0))
        self.log("INFO", "learner connected", {
            "learner": event.learner, "generation": event.generation, "step": self.global_step,
            "merges": merges, "tokens": tokens})
        return self.welcome(member)

    # rule 3.10
    cdef frozenset kept_of(self, object event):
        """The fragments of which a HELLO has the current version, and is not to be sent it."""
        cdef Py_ssize_t fragment
        cdef list found = []
        if len(event.kept) == self.fragments and self.run_state() is not FINISHING:
            for fragment in range(self.fragments):
                if (self.initialized[fragment]
                        and event.kept[fragment] == self.versions[fragment]):
                    found.append(fragment)
        return frozenset(found)

    cdef object run_state(self):
        """Where the run is, in a word for learners."""
        if self.phase == Phase.WAITING:
            return WAITING
        if self.phase == Phase.RUNNING or self.phase == Phase.CUTOFF:
            return RUNNING
        return FINISHING

    cdef int welcome(self, Member member) except -1:
        """What the phase has for a member that has just become current."""
        self.newcomers.append(member.key)
        if self.phase == Phase.WAITING:
            return self.start_if_ready()
        if self.phase == Phase.RUNNING:
            return self.catch_up(member)
        if self.phase == Phase.FINISHING:
            return self.send_final_cut()
        if self.phase == Phase.CUTOFF:
            return self.budget.renew(member.learner, self.now_ns)
        return 0

    # rule 14.6
    cdef int on_misfit(self, object event) except -1:
        if self.policy.max_base_lag != 0:
            return 0
        return self.strict_failure(NOT_RESUMABLE, "layout_hash_mismatch", event.text)

    # rule 13.5
    cdef int turn_away(self, object event) except -1:
        if self.final_cut is None or not self.final_cut.complete():
            return 0
        return self.emit(act.Refuse(event.connection, "the run has ended"))

    cdef int on_disconnected(self, object event) except -1:
        cdef Member member = self.members.leave(
            event.learner, event.generation, self.now_ns)
        if member is None:
            return 0
        self.log("INFO", "learner disconnected",
                 {"learner": event.learner, "generation": event.generation})
        return self.left(member) if self.phase == Phase.RUNNING else 0

    # ---- what learners say ---------------------------------------------------------------------

    # rule 1.3
    cdef int on_init(self, object event) except -1:
        """First value of a fragment wins; only the newest generation of learner 0 may give it."""
        cdef Member member = self.members.find(event.learner, event.generation)
        if member is not None and event.generation != self.members.newest[event.learner]:
            member.init_dropped = True
        if (event.learner != 0 or not 0 <= event.fragment < self.fragments
                or event.generation != self.members.newest[0] or self.initialized[event.fragment]):
            return self.emit(act.Release(event.payload))
        self.initialized[event.fragment] = True
        self.emit(act.AdoptInit(event.fragment, event.payload))
        if all(self.initialized):
            self.log("INFO", "global parameters initialized", {"fragments": self.fragments})
            self.start_if_ready()
        return 0

    cdef int on_push(self, object event) except -1:
        """Admission decides; in a strict run a stale push ends it (rule 5.9)."""
        cdef str error = self.admit_push(event)
        if error is not None:
            return self.strict_failure(FAILED, "rejected_stale_updates", error)
        return self.sign_of_life(event)

    cdef int on_progress(self, object event) except -1:
        """A step count: a heartbeat, or a push that has outlived its round."""
        cdef Member member
        if self.phase == Phase.CUTOFF:
            if event.local_step <= self.policy.learner_budget_steps:
                self.budget.renew(event.learner, self.now_ns)
            return 0
        member = self.members.find(event.learner, event.generation)
        if member is None:
            return 0
        if self.members.is_current(member):
            self.members.observe(member, self.now_ns, event.local_step)
        return self.sign_of_life(event)

    cdef int sign_of_life(self, object event) except -1:
        """A push or heartbeat: if the newer connection is silent, here is where its learner is."""
        cdef Member member = self.members.find(event.learner, event.generation)
        if member is not None and self.members.sign_of_life(member, self.now_ns) and (
                self.phase == Phase.RUNNING or self.phase == Phase.FINISHING):
            return self.current_again(member)
        return 0

    cdef int on_stalled(self, object event) except -1:
        cdef Member member = self.members.find(event.learner, event.generation)
        return 0 if member is None else self.members.stall(member, event.is_still)

    cdef int succeed(self) except -1:
        """Older members take the place of those that went and did not come again."""
        cdef Member member
        if (not self.members.vacant_ns or self.phase == Phase.STOPPING
                or self.phase == Phase.ENDED):
            return 0
        for member in self.members.heirs(self.now_ns):
            self.current_again(member)
        return 0

    # rule 2.5
    cdef int current_again(self, Member member) except -1:
        if member.init_dropped and not all(self.initialized):
            self.members.set_aside(member)
            return self.emit(act.Close(member.learner, member.generation, (
                "its initial values came while a newer connection was current; it is to dial "
                "again and give them anew")))
        self.members.promote(member, self.now_ns)
        self.log("INFO", "older connection is current again",
                 {"learner": member.learner, "generation": member.generation})
        return self.welcome(member)

    # rule 12.9
    cdef int early_ack(self, object event) except -1:
        """A FINAL_ACK while no cut is out: with steps left, of an end that is none any more."""
        cdef dict fields = {"learner": event.learner, "generation": event.generation,
                            "step": event.step}
        if self.global_step >= self.policy.total_steps:
            return self.warn("final acknowledgement ignored: too early", fields)
        self.warn("a learner has a final cut that this run is not at: it is to be started again",
                  {**fields, "global_step": self.global_step})
        return self.emit(act.Close(event.learner, event.generation, (
            f"FINAL_ACK({event.step}) of learner {event.learner}: the run is at step "
            f"{self.global_step} of {self.policy.total_steps}. It has gone back or on behind the "
            "final cut that this learner has; start the learner again to take part"), told=True))

    # ---- what the driver has done --------------------------------------------------------------

    # rule 7.4
    cdef int on_merge_done(self, object event) except -1:
        cdef Round round = self.rounds.get(event.step)
        if round is None or round.state != RoundState.COMPUTING:
            return 0
        return self.computed(round, event)

    cdef int after_save(self, object kind) except -1:
        """What the phase waits for, now that this is written and nothing else is to be."""
        if kind is None:
            return 0
        if self.phase == Phase.WAITING:
            return self.start_if_ready()
        if self.phase == Phase.STOPPING:
            return self.end_stopping()
        if self.phase == Phase.SAVING:
            return self.save(FINAL_STATE) if (
                kind is FINAL and self.policy.final_state) else self.send_final_cut()
        if self.phase == Phase.CUTOFF and kind is BUDGET_CUTOFF:
            return self.budget_saved()
        return 0

    # ---- start ---------------------------------------------------------------------------------

    # rule 1.5, rule 10.2
    cdef int start_if_ready(self) except -1:
        """Every fragment is there and enough learners are: send the initial cut and begin."""
        cdef Py_ssize_t fragment
        cdef tuple members, without
        cdef Py_ssize_t needed = 1 if self.lingers else self.policy.start_learners
        if self.members.current_count < needed or not all(self.initialized):
            return 0
        if self.saves.first_due() and (self.saves.every_commit or self.global_step == 0):
            if self.saves.outstanding is not None:
                return 0
            return self.save(ROUND if self.saves.every_commit else PERIODIC)
        members = self.members.current_keys()
        event, step = ("init", "step") if self.global_step == 0 else ("resume", "at_step")
        self.emit(act.Record({"event": event, step: self.global_step, "fragments": self.fragments,
                              "learners": [key[0] for key in members]}))
        if self.global_step >= self.policy.total_steps:
            return self.finish()
        self.phase = Phase.RUNNING
        self.members.started(self.now_ns)
        for fragment in range(self.fragments):
            without = self.members.without(fragment)
            if without:
                self.emit(act.Broadcast(self.versions[fragment], fragment, without))
        return self.save(PERIODIC) if self.saves.first_due() else 0
