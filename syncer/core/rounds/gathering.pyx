"""The life of a round up to its close: launch, grace, close, relaunch, and who enters it later.

Holds the state of the scheduler that rounds are made of, and every rule that launches, closes or
changes an expected set. Pure, like everything here; must not decide about pushes (admission) or
about the run as a whole (scheduler), which are the layers above.
"""

from libc.math cimport pow

from syncer.core import actions as act
from syncer.core.rounds.carry cimport Carried, CarryQueue, version_index
from syncer.core.rounds.membership cimport Member, Membership, slowest_step_time_s
from syncer.core.rounds.policy cimport Policy
from syncer.core.rounds.closing cimport NEVER, Verdict, decide_close, grace_ns, launch_interval_ns
from syncer.core.rounds.round cimport Round, Slot

cdef long long RETRY_NS = 100_000_000            # nobody to launch to
cdef long long DEFER_NS = 1_000_000_000          # too few learners to relaunch to


cdef object contribution_of(Policy policy, object push, Carried late=None):
    """A push as the merge sees it, with the weight that is really used."""
    cdef double weight = policy.weight(push)
    if late is None:
        return act.Contribution(push.learner, push.generation, push.base, push.c_steps,
                                push.c_tokens, weight, push.payload)
    return act.Contribution(push.learner, push.generation, push.base, push.c_steps, push.c_tokens,
                            weight * late.discount, push.payload, True, late.lag, late.discount)


cdef class Gathering:
    """State and rules of the rounds of one run."""

    def __init__(self, config, resumed=None):
        self.policy = Policy(config, resumed is not None)
        self.members = Membership(self.policy.learners)
        self.rounds = {}
        self.gathering = []
        self.versions = []
        self.next_step = 1
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

    cdef int open_session(self, Py_ssize_t fragments) except -1:
        """The number of fragments is known: by the first HELLO, or by a checkpoint."""
        self.fragments = fragments
        self.versions = [0] * fragments
        self.depth = min(max(self.policy.pipeline, 1), fragments)
        self.late = CarryQueue(fragments, self.policy.max_carry_lag)
        return 0

    # ---- launch --------------------------------------------------------------------------------

    cdef int launch_due(self) except -1:
        """Launch while depth, pace and candidates allow.

        Steps are launched in order and commit in order, so a fragment is free as long as depth <= P.
        """
        cdef Py_ssize_t needed = self.policy.learners if self.policy.fixed_roster else 1
        while (len(self.rounds) < self.depth and self.next_step <= self.policy.total_steps
               and self.now_ns >= self.next_launch_ns):
            if self.members.launchable_count < needed:
                self.next_launch_ns = self.now_ns + RETRY_NS
                return 0
            self.launch()
        return 0

    cdef int launch(self) except -1:
        cdef Py_ssize_t fragment = (self.next_step - 1) % self.fragments
        cdef Round round = Round(self.next_step, fragment, self.versions[fragment],
                                 self.policy.capacities, self.policy.carry_answers)
        cdef list members = self.members.launchable()
        cdef Member member
        round.launch(self.now_ns, members, self.now_ns + self.policy.quorum_timeout_ns)
        self.rounds[round.step] = round
        self.gathering.append(round)
        self.next_step += 1
        self.next_launch_ns = self.now_ns + launch_interval_ns(
            self.policy.launch_floor_ns, self.policy.interval_steps, slowest_step_time_s(members),
            self.fragments)
        self.open_fold(round)
        self.attach_waiting(round)
        return self.pull(round, tuple([member.key for member in members]))

    cdef int open_fold(self, Round round) except -1:
        """With a fold, an empty one for the expected set; what has been carried in stays in."""
        cdef Carried late
        if not self.policy.folds:
            return 0
        self.emit(act.OpenFold(round.step, round.fragment, round.attempt,
                               tuple(sorted(round.slots))))
        for learner in sorted(round.carried):
            late = round.carried[learner]
            self.fold(round, late.push, late)
        return 0

    cdef int fold(self, Round round, object push, Carried late=None) except -1:
        if self.policy.folds:
            self.emit(act.Fold(round.step, round.fragment, round.attempt,
                               contribution_of(self.policy, push, late)))
        return 0

    cdef int pull(self, Round round, tuple members) except -1:
        return self.emit(act.Pull(members, round.fragment, round.step, round.attempt))

    # ---- grace, close, relaunch ----------------------------------------------------------------

    cdef int settle_all(self) except -1:
        cdef Round round
        for round in list(self.gathering):
            self.settle(round)
        return 0

    cdef int settle(self, Round round) except -1:
        """Arm grace when quorum is first seen, then close or relaunch if it is time."""
        cdef bint quorum = self.policy.quorum_reached(round)
        cdef Verdict verdict
        if quorum and round.quorum_ns == NEVER:
            round.arm_grace(self.now_ns, grace_ns(
                self.policy.grace_gamma, self.policy.grace_tau, self.policy.grace_cap_ns,
                slowest_step_time_s(round.expected_members()),
                (self.now_ns - round.launch_ns) * 1e-9, self.sync_ns * 1e-9))
        verdict = decide_close(
            self.now_ns, round.answered, len(round.slots), round.contributed(), quorum,
            round.grace_deadline_ns, round.quorum_deadline_ns, self.policy.soft_deadline_of(round))
        if verdict == Verdict.CLOSE:
            self.close(round)
        elif verdict == Verdict.RELAUNCH:
            self.quorum_timeout(round)
        return 0

    cdef int close(self, Round round) except -1:
        cdef list merged = self.contributions(round)
        if self.policy.folds:
            merged = [contribution._replace(payload=None) for contribution in merged]
        self.gathering.remove(round)
        round.start_computing(tuple(merged))
        return self.emit(act.StartMerge(round.step, round.fragment, round.base,
                                        round.contributions))

    cdef list contributions(self, Round round):
        """What the round would merge now, ascending (learner, generation), carried before own."""
        cdef Slot slot
        cdef Carried late
        cdef object own
        cdef list found = []
        for learner in sorted(round.slots.keys() | round.carried.keys()):
            slot = round.slots.get(learner)
            late = round.carried.get(learner)
            own = None if slot is None else slot.push
            if late is not None and (own is None or late.push.generation <= own.generation):
                found.append(contribution_of(self.policy, late.push, late))
                late = None
            if own is not None:
                found.append(contribution_of(self.policy, own))
            if late is not None:                 # of a newer connection than the learner's own push
                found.append(contribution_of(self.policy, late.push, late))
        return found

    cdef int quorum_timeout(self, Round round) except -1:
        """Too few answers in time: ask again, ask others, or wait for learners to come back."""
        cdef dict fields = {"step": round.step, "attempt": round.attempt,
                            "answered": round.answered, "expected": len(round.slots)}
        if self.policy.fixed_roster:
            return self.pull_missing(round, fields)
        if self.members.launchable_count < self.policy.relaunch_needs():
            round.quorum_deadline_ns = self.now_ns + DEFER_NS
            fields["launchable"] = self.members.launchable_count
            fields["quorum"] = self.policy.relaunch_needs()
            return self.warn("quorum timeout: relaunch deferred, too few learners", fields)
        return self.relaunch(round, fields)

    cdef int pull_missing(self, Round round, dict fields) except -1:
        """Fixed roster: everything stays, only the missing ids are asked again."""
        cdef Member member
        cdef Slot slot
        cdef list missing = []
        for member in self.members.launchable():
            slot = round.slots[member.learner]
            if slot.push is None:
                missing.append(member.key)
        round.quorum_deadline_ns = self.now_ns + self.policy.quorum_timeout_ns
        fields["pulled"] = [key[0] for key in missing]
        self.warn("quorum timeout: missing learners of the fixed roster pulled again", fields)
        if missing:
            self.pull(round, tuple(missing))
        return 0

    cdef int relaunch(self, Round round, dict fields) except -1:
        """A new attempt to those who are there; pushes are discarded, carried deltas stay."""
        cdef list members = self.members.launchable()
        cdef Member member
        for payload in round.free_pushes():
            self.emit(act.Release(payload))
        round.launch(self.now_ns, members, self.now_ns + self.policy.quorum_timeout_ns)
        fields["attempt"] = round.attempt
        self.warn("quorum timeout: new frozen-membership attempt", fields)
        self.open_fold(round)
        self.pull(round, tuple([member.key for member in members]))
        return self.settle(round)                # carried deltas may answer the new slots at once

    # ---- late pushes that join -----------------------------------------------------------------

    cdef int attach_waiting(self, Round round) except -1:
        for push in self.late.take(round.fragment):
            self.attach(round, push, True)
        return 0

    cdef int attach(self, Round round, object push, bint parked) except -1:
        """A late push joins a gathering round, unless it is too many versions behind."""
        cdef long long lag = (version_index(round.base, round.fragment, self.fragments)
                              - version_index(push.base, round.fragment, self.fragments))
        cdef dict fields = {"learner": push.learner, "generation": push.generation,
                            "fragment": push.fragment, "step": push.step, "base": push.base,
                            "lag": lag}
        cdef Carried late
        if lag > self.policy.max_carry_lag:
            self.emit(act.Release(push.payload))
            return self.warn("push rejected", {"reason": "carry_lag_exceeded", **fields})
        late = Carried(push, lag, pow(self.policy.carry_gamma, <double>lag))
        round.attach(late)
        if parked:
            self.emit(act.Unpark(push.payload))
        self.fold(round, push, late)
        return self.log("INFO", "late push carried into round",
                        {**fields, "into": round.step, "discount": late.discount})

    # ---- catch-up and its tail -----------------------------------------------------------------

    cdef int catch_up(self, Member member) except -1:
        self.members.hold(member)
        return self.emit(act.CatchUp(member.learner, member.generation))

    cdef int tail(self, Member member) except -1:
        """What a member gets into once it is up to date and held no more."""
        if self.policy.fixed_roster:
            return self.replay_open_pulls(member)
        self.rebind(member)
        return self.late_join(member)

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
        """Enter the rounds still gathering that were launched without this learner, ascending.

        Not a capacity round, whose threshold assumes that E only shrinks, and not an exact fold
        that has begun, whose order and weights are those of its roster.
        """
        cdef Round round
        if self.policy.capacity_quorum is not None:
            return 0
        for round in self.gathering:
            if member.learner in round.slots or member.learner in round.carried:
                continue
            if member.delivered[round.fragment] != round.base:
                continue
            if self.policy.exact_fold and round.pushed:
                continue
            round.join(member)
            if self.policy.exact_fold:
                self.open_fold(round)
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

    cdef int shrink(self, Member dead) except -1:
        """Capacity rounds: who has gone unanswered takes its capacity out of the total."""
        cdef Round round
        cdef Slot slot
        for round in self.gathering:
            slot = round.slots.get(dead.learner)
            if slot is not None and slot.member is dead and not round.answers(slot):
                round.drop_slot(dead.learner)
        return 0

    # ---- for the layers above ------------------------------------------------------------------

    cdef long long gathering_deadline_ns(self):
        """When time alone changes something: a launch, a grace or soft deadline, a quorum timeout."""
        cdef long long due = NEVER
        cdef Round round
        if len(self.rounds) < self.depth and self.next_step <= self.policy.total_steps:
            due = self.next_launch_ns
        for round in self.gathering:
            due = min(due, round.quorum_deadline_ns if round.quorum_ns == NEVER
                      else round.grace_deadline_ns, self.policy.soft_deadline_of(round))
        return due

    cdef list free_everything(self):
        """Drop all rounds and waiting pushes; returns the payloads that were still held."""
        cdef Round round
        cdef list found = []
        for step in sorted(self.rounds):
            round = self.rounds[step]
            found += round.free_all()
        if self.late is not None:
            found += [push.payload for push in self.late.clear()]
        self.rounds.clear()
        self.gathering.clear()
        return found
