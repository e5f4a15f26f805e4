"""The round logic of the syncer: `Scheduler.step(now_ns, event)` returns the actions to carry out.

Pure: state, now and event in, actions out. Must not read a clock, touch a socket, file, thread or
float array, and never raises for what a peer did: that is a `Refuse`, `Release` or log action. The
one exception it raises is InvariantViolation, for a defect of this program.

Each call handles the event and then runs the main loop once (`advance`):

    1. commit every computed round that is exactly the next step
    2. launch while depth, pace and candidates allow
    3. arm grace where quorum is seen, then close or relaunch what is due

Long work is two events: StartMerge out, MergeDone in; Save out, Saved in. So "persist before
broadcast" is an order of events, not a callback. Every payload handle that comes in leaves exactly
once, in `AdoptInit` or `Release`.
"""

from syncer.core import actions as act
from syncer.core import events as ev
from syncer.core.finishing cimport FinalCut
from syncer.core.membership cimport Member, Membership, slowest_step_time_s
from syncer.core.quorum cimport NEVER, Verdict, decide_close, grace_ns, launch_interval_ns
from syncer.core.record cimport failure_record, merge_record
from syncer.core.round cimport Round, RoundState, Slot
from syncer.errors import InvariantViolation

cdef long long RETRY_NS = 100_000_000            # no candidate to launch to
cdef long long DEFER_NS = 1_000_000_000          # too few learners to relaunch to
cdef double LONGEST_NS = 3.2e18                  # about a century: keeps deadlines in 64 bits
cdef int TRAINED = 0
cdef int FAILED = 1
cdef int SIGNALLED = 128                         # + the signal's number

cdef object Push = ev.Push, Heartbeat = ev.Heartbeat, Tick = ev.Tick, MergeDone = ev.MergeDone
cdef object Synced = ev.Synced, Hello = ev.Hello, Disconnected = ev.Disconnected
cdef object CaughtUp = ev.CaughtUp, Init = ev.Init, Saved = ev.Saved, FinalAck = ev.FinalAck
cdef object Stop = ev.Stop


cdef long long ns_of(double seconds) noexcept:
    return <long long>min(seconds * 1e9, LONGEST_NS)


cdef class Scheduler:
    """All rules of one run.

    config: a validated `syncer.config.Config` (or anything with its attributes). Times are ns of one
    monotonic clock; a `now_ns` that runs back is taken as no time passed.
    """

    def __init__(self, config):
        self.config = config
        self.learners = config.learners
        self.quorum = config.quorum
        self.total_steps = config.total_steps
        self.max_base_lag = -1 if config.max_base_lag is None else config.max_base_lag
        self.grace_cap_ns = ns_of(config.grace_ms / 1e3)
        self.grace_gamma = config.grace_gamma
        self.grace_tau = config.grace_tau
        self.launch_floor_ns = ns_of(config.min_round_interval_ms / 1e3)
        self.interval_steps = config.sync_interval_steps
        self.quorum_timeout_ns = ns_of(config.quorum_timeout_s)
        self.final_ack_timeout_ns = ns_of(config.final_ack_timeout_resolved_s)
        self.equal_weights = config.learner_weight == "equal"
        self.final_state = bool(config.final_state)
        self.fixed_roster = config.fixed_roster
        self.members = Membership(self.learners)
        self.phase = Phase.WAITING
        self.rounds = {}
        self.gathering = []
        self.unsynced = {}
        self.versions = []
        self.initialized = []
        self.ledger = {}
        self.next_step = 1
        self.fingerprint = b""
        self.out = []

    def step(self, now_ns, event):
        """Handle one event at `now_ns` and return the actions it leads to, in order."""
        cdef list out = []
        self.now_ns = max(self.now_ns, <long long>now_ns)
        self.out = out
        self.handle(event)
        if self.phase == Phase.RUNNING:
            self.advance()
        elif self.phase == Phase.FINISHING and self.now_ns >= self.final_cut.deadline_ns:
            self.end(FAILED, "final cut not acknowledged in time; missing learners "
                     f"{self.final_cut.missing()}")
        return out

    def deadline_ns(self):
        """When the next `Tick` is due at the latest, or None if only an event can change anything."""
        cdef long long due = NEVER
        cdef Round round
        if self.phase == Phase.RUNNING:
            if len(self.rounds) < self.depth and self.next_step <= self.total_steps:
                due = self.next_launch_ns
            for round in self.gathering:
                due = min(due, round.quorum_deadline_ns if round.quorum_ns == NEVER
                          else round.grace_deadline_ns)
        elif self.phase == Phase.FINISHING:
            due = self.final_cut.deadline_ns
        return None if due == NEVER else due

    # ---- actions -------------------------------------------------------------------------------

    cdef int emit(self, object action) except -1:
        self.out.append(action)
        return 0

    cdef int log(self, str level, str text, dict fields) except -1:
        self.out.append(act.Log(level, text, fields))
        return 0

    cdef int warn(self, str text, dict fields) except -1:
        self.out.append(act.Log("WARNING", text, fields))
        return 0

    cdef int pull(self, Round round, tuple members) except -1:
        self.out.append(act.Pull(members, round.fragment, round.step, round.attempt))
        return 0

    # ---- events --------------------------------------------------------------------------------

    cdef int handle(self, object event) except -1:
        cdef object kind = type(event)
        cdef Member member
        if kind is Push:
            self.on_push(event)
        elif kind is Tick:
            pass
        elif kind is Heartbeat:
            member = self.members.find(event.learner, event.generation)
            if member is not None and self.members.is_current(member):
                member.observe(self.now_ns, event.local_step)
        elif kind is MergeDone:
            self.on_merge_done(event)
        elif kind is Synced:
            self.on_synced(event)
        elif kind is Hello:
            self.on_hello(event)
        elif kind is Disconnected:
            self.on_disconnected(event)
        elif kind is CaughtUp:
            self.on_caught_up(event)
        elif kind is Init:
            self.on_init(event)
        elif kind is FinalAck:
            self.on_final_ack(event)
        elif kind is Saved:
            self.on_saved(event)
        elif kind is Stop:
            self.on_stop(event)
        else:
            raise InvariantViolation(f"the scheduler was given {event!r}, which is no event")
        return 0

    cdef int on_hello(self, object event) except -1:
        cdef Member member
        if self.phase >= Phase.STOPPING:
            self.emit(act.Refuse(event.connection, "the run has ended"))
            return 0
        if not 0 <= event.learner < self.learners:
            self.emit(act.Refuse(event.connection, f"learner id {event.learner} is outside configured "
                                 f"range 0..{self.learners - 1}"))
            return 0
        if self.members.find(event.learner, event.generation) is not None:
            self.emit(act.Refuse(
                event.connection, f"duplicate connection generation {event.generation} of learner "
                f"{event.learner}: draw a new one for every connection"))
            return 0
        if self.fragments == 0:
            self.fragments = event.fragments
            self.fingerprint = event.fingerprint
            self.versions = [0] * self.fragments
            self.initialized = [False] * self.fragments
            self.depth = min(max(<Py_ssize_t>self.config.pipeline, 1), self.fragments)
        member = self.members.admit(event.learner, event.generation)
        self.emit(act.Admit(event.connection, event.learner, event.generation))
        self.log("INFO", "learner connected",
                 {"learner": event.learner, "generation": event.generation})
        if self.phase == Phase.WAITING:
            self.start_if_ready()
        elif self.phase == Phase.RUNNING:
            self.catch_up(member)
        elif self.phase == Phase.FINISHING:
            self.send_final_cut()
        return 0

    cdef int on_disconnected(self, object event) except -1:
        cdef Member member = self.members.leave(event.learner, event.generation)
        cdef Member newer
        if member is None or self.phase == Phase.ENDED:
            return 0
        self.log("INFO", "learner disconnected",
                 {"learner": event.learner, "generation": event.generation})
        newer = self.members.current[member.learner]
        if (self.phase == Phase.RUNNING and not self.fixed_roster and newer is not None
                and not newer.held and self.recovers(member)):
            # Its slot could not be rebound while it lived. A held newer member needs nothing here:
            # its own tail is still to come and will find the slot dead.
            self.log("INFO", "recovery replay", {
                "learner": newer.learner, "generation": newer.generation,
                "died": member.generation})
            self.catch_up(newer)
        return 0

    cdef int on_init(self, object event) except -1:
        """First value of a fragment wins; only the newest generation of learner 0 may give it."""
        if (self.phase != Phase.WAITING or event.learner != 0
                or not 0 <= event.fragment < self.fragments
                or event.generation != self.members.newest[0] or self.initialized[event.fragment]):
            self.emit(act.Release(event.payload))
            return 0
        self.initialized[event.fragment] = True
        self.emit(act.AdoptInit(event.fragment, event.payload))
        if all(self.initialized):
            self.log("INFO", "global parameters initialized", {"fragments": self.fragments})
            self.start_if_ready()
        return 0

    cdef int start_if_ready(self) except -1:
        """Every fragment is there and enough learners are: send the initial cut and begin."""
        cdef Py_ssize_t fragment
        cdef tuple members
        if self.members.current_count < self.learners or not all(self.initialized):
            return 0
        self.phase = Phase.RUNNING
        members = self.members.current_keys()
        self.emit(act.Record({"event": "init", "step": self.global_step,
                              "fragments": self.fragments, "learners": [m[0] for m in members]}))
        for fragment in range(self.fragments):
            self.emit(act.Broadcast(self.versions[fragment], fragment, members))
        return 0

    # ---- pushes --------------------------------------------------------------------------------

    cdef int on_push(self, object event) except -1:
        cdef Round round
        cdef Slot slot
        cdef str reason
        if self.phase > Phase.RUNNING:
            self.emit(act.Release(event.payload))
            return 0
        round = self.rounds.get(event.step)
        slot = None if round is None else round.slots.get(event.learner)
        reason = self.refusal(round, slot, event)
        if reason is None:
            return self.accept(round, slot, event)
        self.emit(act.Release(event.payload))
        self.warn("push rejected", {
            "reason": reason, "learner": event.learner, "generation": event.generation,
            "fragment": event.fragment, "step": event.step, "attempt": event.attempt,
            "base": event.base})
        if reason == "StaleBase":
            self.refuse_stale(round, slot, event)
        return 0

    cdef str refusal(self, Round round, Slot slot, object event):
        """Why a push cannot join its round, in the order of the rules, or None."""
        if (round is None or round.state != RoundState.GATHERING
                or round.fragment != event.fragment or round.attempt != event.attempt):
            return "OutOfRound"
        if slot is None:
            return "UnexpectedMember"
        if not self.fixed_roster and slot.member.generation != event.generation:
            return "UnexpectedMember"
        if event.base > round.base:
            return "FutureBase"
        if self.max_base_lag >= 0 and round.base - event.base > self.max_base_lag:
            return "StaleBase"
        if slot.push is not None:
            return "Duplicate"
        return None

    cdef int accept(self, Round round, Slot slot, object event) except -1:
        cdef Member member = self.members.find(event.learner, event.generation)
        if event.base < round.base:
            self.warn("stale base-relative delta admitted", {
                "learner": event.learner, "generation": event.generation, "step": event.step,
                "base": event.base, "staleness": round.base - event.base})
        round.accept(slot, event)
        if member is not None:
            member.observe(self.now_ns, event.local_step)
        return 0

    cdef int refuse_stale(self, Round round, Slot slot, object event) except -1:
        """With lag 0 a stale push is an error of the run; otherwise the round stops waiting for it."""
        cdef str text
        round.stale_refused += 1
        if self.max_base_lag == 0:
            text = (f"learner {event.learner} pushed step {event.step} against version {event.base} of "
                    f"fragment {event.fragment}, expected {round.base}: with --max-base-lag 0 every "
                    "delta must be relative to the current version")
            self.emit(act.Record(failure_record("rejected_stale_updates", text)))
            self.end(FAILED, text)
        elif slot.push is None:
            round.release_slot(event.learner)
        return 0

    # ---- catch-up and its tail -----------------------------------------------------------------

    cdef int catch_up(self, Member member) except -1:
        self.members.hold(member)
        self.emit(act.CatchUp(member.learner, member.generation))
        return 0

    cdef int on_caught_up(self, object event) except -1:
        """The tail: still current? then un-hold, rebind, late join."""
        cdef Member member = self.members.find(event.learner, event.generation)
        if member is None or not member.held or not self.members.is_current(member):
            return 0
        self.members.unhold(member, tuple(event.delivered))
        if self.phase != Phase.RUNNING:
            return 0
        if self.fixed_roster:
            self.replay_open_pulls(member)
        else:
            self.rebind(member)
            self.late_join(member)
        return 0

    cdef int replay_open_pulls(self, Member member) except -1:
        """Fixed roster: the pulls of the open rounds that this id has not answered."""
        cdef Round round
        cdef Slot slot
        for round in self.gathering:
            slot = round.slots[member.learner]
            if slot.push is None:
                self.pull(round, (member.key,))
        return 0

    cdef int rebind(self, Member member) except -1:
        """Slots of a dead generation of this learner without a push become this member's."""
        cdef Round round
        cdef Slot slot
        for round in self.gathering:
            slot = round.slots.get(member.learner)
            if slot is None or slot.push is not None or slot.member.connected:
                continue
            self.log("INFO", "rebound outstanding pull", {
                "learner": member.learner, "step": round.step, "attempt": round.attempt,
                "generation": member.generation, "died": slot.member.generation})
            slot.member = member
            self.pull(round, (member.key,))
        return 0

    cdef int late_join(self, Member member) except -1:
        """Enter the rounds still gathering that were launched without this learner, ascending."""
        cdef Round round
        for round in self.gathering:
            if member.learner in round.slots:
                continue
            if member.delivered[round.fragment] != round.base:
                continue
            round.join(member)
            self.log("INFO", "late joiner pulled into open round", {
                "learner": member.learner, "generation": member.generation, "step": round.step,
                "attempt": round.attempt})
            self.pull(round, (member.key,))
        return 0

    cdef bint recovers(self, Member dead):
        """Does a gathering round wait for this member, which has just gone?"""
        cdef Round round
        cdef Slot slot
        for round in self.gathering:
            slot = round.slots.get(dead.learner)
            if slot is not None and slot.member is dead and slot.push is None:
                return True
        return False

    # ---- main loop -----------------------------------------------------------------------------

    cdef int advance(self) except -1:
        cdef Round round
        self.commit_in_order()
        if self.phase != Phase.RUNNING:
            return 0
        self.launch_due()
        for round in list(self.gathering):
            self.settle(round)
        return 0

    cdef int commit_in_order(self) except -1:
        cdef Round round
        while self.phase == Phase.RUNNING:
            round = self.rounds.get(self.global_step + 1)
            if round is None or round.state != RoundState.READY:
                return 0
            self.commit(round)
        return 0

    cdef int commit(self, Round round) except -1:
        """Make a computed round visible. Whatever must be durable first belongs before `Publish`."""
        if round.error is not None:
            return self.end(FAILED, f"merge of step {round.step} failed: {round.error}")
        if self.versions[round.fragment] != round.base:
            raise InvariantViolation(
                f"step {round.step} merged onto version {round.base} of fragment {round.fragment}, "
                f"but the fragment is at {self.versions[round.fragment]}")
        del self.rounds[round.step]
        self.global_step = round.step
        self.versions[round.fragment] = round.step
        round.committed_ns = self.now_ns
        for contribution in round.contributions:
            entry = self.ledger.setdefault(contribution.learner, [0, 0, 0])
            entry[0] += 1
            entry[1] += contribution.c_steps
            entry[2] += contribution.c_tokens
        self.emit(act.Publish(round.step, round.fragment))
        if round.step == self.total_steps:
            self.report_unsynced()
            self.report(round, round.compute_ns)
            return self.begin_finishing()
        self.unsynced[round.step] = round
        self.emit(act.Broadcast(round.step, round.fragment, self.members.current_keys()))
        return 0

    cdef int on_synced(self, object event) except -1:
        cdef Round round = self.unsynced.pop(event.step, None)
        if round is not None and self.phase < Phase.ENDED:
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
            "responders": len(round.contributions), "expected": len(round.slots),
            "ms": (round.committed_ns - round.launch_ns) / 1e6, "gnorm": round.gnorm})
        self.emit(act.Record(merge_record(round, self.fingerprint.hex(), self.quorum, sync_ns)))
        return 0

    cdef int launch_due(self) except -1:
        cdef Py_ssize_t needed = self.learners if self.fixed_roster else 1
        while (len(self.rounds) < self.depth and self.next_step <= self.total_steps
               and self.now_ns >= self.next_launch_ns):
            if self.members.launchable_count < needed:
                self.next_launch_ns = self.now_ns + RETRY_NS
                return 0
            self.launch()
        return 0

    cdef int launch(self) except -1:
        cdef Py_ssize_t fragment = (self.next_step - 1) % self.fragments
        cdef Round round = Round(self.next_step, fragment, self.versions[fragment])
        cdef list members = self.members.launchable()
        cdef Member member
        round.launch(self.now_ns, members, self.now_ns + self.quorum_timeout_ns)
        self.rounds[round.step] = round
        self.gathering.append(round)
        self.next_step += 1
        self.next_launch_ns = self.now_ns + launch_interval_ns(
            self.launch_floor_ns, self.interval_steps, slowest_step_time_s(members), self.fragments)
        self.pull(round, tuple([member.key for member in members]))
        return 0

    cdef bint quorum_reached(self, Round round):
        return round.answered >= self.quorum

    cdef int settle(self, Round round) except -1:
        """Arm grace when quorum is first seen, then close or relaunch if it is time."""
        cdef bint quorum = self.quorum_reached(round)
        cdef Verdict verdict
        if quorum and round.quorum_ns == NEVER:
            round.arm_grace(self.now_ns, grace_ns(
                self.grace_gamma, self.grace_tau, self.grace_cap_ns,
                slowest_step_time_s(round.expected_members()),
                (self.now_ns - round.launch_ns) * 1e-9, self.sync_ns * 1e-9))
        verdict = decide_close(self.now_ns, round.answered, len(round.slots), round.answered > 0,
                               quorum, round.grace_deadline_ns, round.quorum_deadline_ns)
        if verdict == Verdict.CLOSE:
            self.close(round)
        elif verdict == Verdict.RELAUNCH:
            self.quorum_timeout(round)
        return 0

    cdef int close(self, Round round) except -1:
        cdef list contributions = []
        for push in round.pushes():
            contributions.append(act.Contribution(
                push.learner, push.generation, push.base, push.c_steps, push.c_tokens,
                learner_weight(self.equal_weights, push.c_tokens, push.c_steps), push.payload))
        self.gathering.remove(round)
        round.start_computing(tuple(contributions))
        self.emit(act.StartMerge(round.step, round.fragment, round.base, round.contributions))
        return 0

    cdef int on_merge_done(self, object event) except -1:
        cdef Round round = self.rounds.get(event.step)
        if round is None or round.state != RoundState.COMPUTING:
            return 0
        round.finish_computing(event)
        for contribution in round.contributions:
            self.emit(act.Release(contribution.payload))
        return 0

    cdef int quorum_timeout(self, Round round) except -1:
        """Too few answers in time: ask again, ask others, or wait for learners to come back."""
        cdef Slot slot
        cdef Member member
        cdef list missing, members
        cdef dict fields = {"step": round.step, "attempt": round.attempt,
                            "answered": round.answered, "expected": len(round.slots)}
        if self.fixed_roster:
            missing = []
            for member in self.members.launchable():
                slot = round.slots[member.learner]
                if slot.push is None:
                    missing.append(member.key)
            round.quorum_deadline_ns = self.now_ns + self.quorum_timeout_ns
            fields["pulled"] = [key[0] for key in missing]
            self.warn("quorum timeout: missing learners of the fixed roster pulled again", fields)
            if missing:
                self.pull(round, tuple(missing))
            return 0
        if self.members.launchable_count < self.quorum:
            round.quorum_deadline_ns = self.now_ns + DEFER_NS
            fields["launchable"] = self.members.launchable_count
            fields["quorum"] = self.quorum
            self.warn("quorum timeout: relaunch deferred, too few learners", fields)
            return 0
        members = self.members.launchable()
        for payload in round.relaunch(self.now_ns, members, self.now_ns + self.quorum_timeout_ns):
            self.emit(act.Release(payload))
        fields["attempt"] = round.attempt
        self.warn("quorum timeout: new frozen-membership attempt", fields)
        self.pull(round, tuple([member.key for member in members]))
        return 0

    # ---- finishing -----------------------------------------------------------------------------

    cdef int begin_finishing(self) except -1:
        if self.final_state:
            self.phase = Phase.SAVING
            self.emit(act.Save("final-state", self.global_step))
            return 0
        return self.send_final_cut()

    cdef int on_saved(self, object event) except -1:
        if self.phase == Phase.STOPPING:
            return self.end(SIGNALLED + self.stop_signal, self.stop_text())
        if self.phase != Phase.SAVING:
            return 0
        if event.error is not None:
            return self.end(FAILED, f"{event.kind} could not be written: {event.error}")
        return self.send_final_cut()

    cdef int send_final_cut(self) except -1:
        """Send the cut to every current member that must still acknowledge and has not got it."""
        cdef Member member
        if self.final_cut is None:
            expected = (range(self.learners) if self.fixed_roster
                        else [key[0] for key in self.members.current_keys()])
            if not expected:
                return self.end(FAILED, "no learner is connected to receive the final cut")
            self.phase = Phase.FINISHING
            self.final_cut = FinalCut(self.global_step, self.now_ns + self.final_ack_timeout_ns,
                                      expected)
        for member in self.members.current:
            if (member is not None and self.final_cut.wants(member.learner)
                    and member.key not in self.final_cut.eligible):
                self.emit(act.SendFinal(member.learner, member.generation, self.global_step))
                self.final_cut.eligible.add(member.key)
        return 0

    cdef int on_final_ack(self, object event) except -1:
        cdef dict fields = {"learner": event.learner, "generation": event.generation,
                            "step": event.step}
        if self.final_cut is None or self.phase != Phase.FINISHING:
            if self.phase < Phase.FINISHING:
                self.warn("final acknowledgement ignored: too early", fields)
            return 0
        if self.final_cut.acknowledge(event.learner, event.generation, event.step):
            self.log("INFO", "learner finalized", fields)
            return self.finish_if_acknowledged()
        if event.learner not in self.final_cut.acknowledged:
            self.warn("final acknowledgement ignored: not of this final cut", fields)
        return 0

    cdef int finish_if_acknowledged(self) except -1:
        if not self.final_cut.complete():
            return 0
        self.log("INFO", "all learners acknowledged final cut",
                 {"learners": len(self.final_cut.acknowledged)})
        there = [key for key in sorted(self.final_cut.acknowledged.values())
                 if key in self.members.members]
        if there:
            self.emit(act.SendShutdown(tuple(there)))
        return self.end(TRAINED, f"training complete after {self.global_step} outer steps")

    # ---- ending --------------------------------------------------------------------------------

    cdef int on_stop(self, object event) except -1:
        if self.phase >= Phase.STOPPING:
            return 0
        self.stop_signal = event.signal
        self.emit(act.Record({"event": "shutdown", "step": self.global_step,
                              "signal": event.signal}))
        if self.phase == Phase.SAVING:
            self.phase = Phase.STOPPING
            return 0
        return self.end(SIGNALLED + self.stop_signal, self.stop_text())

    def stop_text(self):
        return f"stopped by signal {self.stop_signal} after {self.global_step} outer steps"

    cdef int end(self, int status, str text) except -1:
        """Free every payload that is still held, then leave."""
        cdef Round round
        for round in self.rounds.values():
            if round.state == RoundState.GATHERING:
                for push in round.pushes():
                    self.emit(act.Release(push.payload))
            elif round.payloads_held:
                for contribution in round.contributions:
                    self.emit(act.Release(contribution.payload))
        self.rounds.clear()
        self.gathering.clear()
        self.report_unsynced()
        self.phase = Phase.ENDED
        self.emit(act.Exit(status, text))
        return 0


cdef double learner_weight(bint equal, object c_tokens, object c_steps) except? -1:
    """Raw weight of a push: 1, or tokens^2 / steps in f64, multiply then divide; 0 without steps."""
    cdef double tokens
    if equal:
        return 1.0
    if c_steps == 0:
        return 0.0
    tokens = c_tokens
    return tokens * tokens / <double>c_steps
