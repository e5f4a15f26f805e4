"""The life of a round up to its close: launch, close, quorum timeout, late pushes that join.

Holds the state that rounds are made of, and every rule that launches or ends a gathering. Must not
decide about pushes (`admission`), about who comes and goes (`joining`) or about the run (`run/`),
which are the layers above; *when* a round closes is asked of `closing`.

Step t is one merge of fragment (t - 1) mod P. Steps are launched in order and commit in order, so
that one number, the global step, says what every fragment's version is, and any saved cut is a
prefix of the run.

rule 1.2. All of this is sized once, when the number of fragments is known. A resumed run begins
    with the versions of its checkpoint's step, and launches the step after it.
rule 4.1. At most *depth* rounds are between launch and commit, one for each fragment at the most.
rule 4.2. A round is launched to every launchable member. With nobody there, or with a fixed roster
    that is not complete, launching is tried again in 100 ms: an event may not come.
rule 4.3. E, the expected set, is frozen at launch, and `base` is the fragment's version then: the
    round's merge is a step from there. Everybody in E is sent the pull.

rule 6.11. At the quorum deadline a round to which too few could answer goes on waiting, with all
    its pushes: a new attempt would throw them away and fail again. It is looked at every second;
    why there is none is said once, for whom the round waits as of every wait (rule 16.2).
rule 6.12. Otherwise a new *attempt* asks those who are there now. It starts empty, because its base
    and its set may be others; the number of the attempt keeps answers to the old one out (rule
    5.1). Carried deltas stay: they were late before and are relative to their own base. They may
    answer the new slots at once, so the round is settled again.
rule 6.15. It has more time where somebody who is waited for is seen to be late (`round`).
rule 6.13. A fixed roster asks only those again who have not answered; nothing that was given is
lost.

rule 7.2. With a fold a push is added to the round's sum as it comes, in the order of the actions. A
    fold is opened at launch and at relaunch; what was carried in is folded first.

rule 7.7. What is folded has a weight at once: the cap is found among those that were merged before.
rule 7.8. Tokens or steps of 0 are a weight of 0. One learner may have reason to; a whole round of
    them changes nothing, and somebody who forgot to count would train for nothing without a word.

rule 8.3. A late push that waits joins its fragment's next round at the launch, in learner order.
rule 8.4. One that lies more than --max-carry-lag merges of the fragment behind is given back.
rule 8.5. Each merge it lies behind costs a factor --carry-gamma of its weight.

rule 19.1. A learner that has asked hears what became of its answer to each pull before it packs the
    next one of that fragment, whatever the ways of a push to its end are: what nobody has told by
    then is told here, with the next pull, as an answer that has not come. It may be on its way, and
    will be refused.
rule 19.2. Only an answer that is in the merge of a step which has committed is merged. The layers
    above say so of each, where they decide it; a late one that is carried is told as that at once,
    since it will be merged, if at all, behind the next answer.
"""

from libc.math cimport pow

from syncer.core import actions as act
from syncer.core.deadlines cimport NEVER
from syncer.core.rounds.carry cimport Carried, CarryQueue
from syncer.core.rounds.closing cimport (
    Verdict, arm_grace, launch_interval_ns, relaunch_needs, time_of_verdict, verdict_of)
from syncer.core.rounds.contributions cimport (
    any_over, contribution_of, contributions_of, most_over, weighed_of)
from syncer.core.rounds.ground cimport Ground
from syncer.core.rounds.membership cimport LONG_AGO, Member
from syncer.core.rounds.round cimport Round, Slot
from syncer.protocol import PushFate
from syncer.steps cimport fragment_of, merges_at, version_at

cdef long long RETRY_NS = 100_000_000            # nobody to launch to
cdef long long DEFER_NS = 1_000_000_000          # too few learners to relaunch to
cdef Py_ssize_t TOLD_MAX = 20                   # ids of learners in one line of the log
cdef object CARRY_LAG_EXCEEDED = act.PushRefusal.CARRY_LAG_EXCEEDED
cdef object NOT_COME = PushFate.NOT_COME, GIVEN_UP = PushFate.GIVEN_UP


cdef class Gathering(Ground):
    """State and rules of the rounds of one run.

    Large: the path of a round from launch to close reads best in one piece, and the layers above
    are files of the same object: `Scheduler` is all of them.
    """

    def __init__(self, config, resumed=None):
        Ground.__init__(self, config, resumed)
        self.rounds = {}
        self.gathering = []
        self.versions = []
        self.unfolded = set()
        self.weighed = []
        self.weightless = False
        self.next_step = 1
        self.launched_ns = LONG_AGO

    # rule 1.2, rule 4.1
    cdef int open_session(self, Py_ssize_t fragments, long long step=0) except -1:
        """The number of fragments is known: by the first HELLO, or by a checkpoint of `step`."""
        self.fragments = fragments
        self.global_step = step
        self.first_step = step + 1
        self.next_step = step + 1
        self.versions = [version_at(step, p, fragments) for p in range(fragments)]
        self.depth = min(max(self.policy.pipeline, 1), fragments)
        self.late = CarryQueue(fragments, self.policy.max_carry_lag)
        return 0

    cdef int committed(self, Round round) except -1:
        """The round's result is the fragment's version from now on."""
        self.rounds.pop(round.step, None)        # not there any more once the run is stopping
        self.global_step = round.step
        self.versions[round.fragment] = round.step
        round.committed_ns = self.now_ns
        if self.policy.folds:
            self.weighed = weighed_of(self.policy, round.contributions) or self.weighed
        if self.policy.late_carry:
            self.late.note_merged(round.step, round.heard())
        return 0

    cdef int sync_took(self, long long sync_ns) except -1:
        """The last commit took this long to compute, publish and send: the next grace counts it."""
        self.sync_ns = sync_ns
        return 0

    # ---- launch --------------------------------------------------------------------------------

    # rule 4.2
    cdef int launch_due(self) except -1:
        """Launch while depth, pace and candidates allow.

        Steps are launched and committed in order, so a fragment is free as long as depth <= P.
        """
        cdef Py_ssize_t needed = self.launch_needs()
        while (len(self.rounds) < self.depth and self.next_step <= self.policy.total_steps
               and self.now_ns >= self.next_launch_ns()):
            if self.members.launchable_count < needed:
                self.retry_ns = self.now_ns + RETRY_NS
                return 0
            self.launch()
        return 0

    cdef Py_ssize_t launch_needs(self) noexcept:
        """How many must be launchable."""
        return self.policy.learners if self.policy.fixed_roster else 1

    cdef long long next_launch_ns(self):
        """When pace allows a launch, by what the learners that are there now are known to need."""
        if self.now_ns < self.launched_ns + self.policy.min_round_interval_ns:
            return self.launched_ns + self.policy.min_round_interval_ns
        return max(self.retry_ns, self.launched_ns + launch_interval_ns(
            self.policy.min_round_interval_ns, self.policy.quorum_timeout_ns,
            self.policy.sync_interval_steps, self.members.slowest_launchable_s(), self.fragments))

    # rule 4.3
    cdef int launch(self) except -1:
        cdef Py_ssize_t fragment = fragment_of(self.next_step, self.fragments)
        cdef Round round = Round(self.next_step, fragment, self.versions[fragment], self.policy)
        cdef list members = self.members.launchable()
        cdef Member member
        round.folds = self.policy.folds and fragment not in self.unfolded
        round.launch(self.now_ns, members)
        self.rounds[round.step] = round
        self.gathering.append(round)
        self.next_step += 1
        self.launched_ns = self.now_ns
        self.open_fold(round)
        self.attach_waiting(round)
        return self.pull(round, tuple([member.key for member in members]))

    # rule 7.2
    cdef int open_fold(self, Round round) except -1:
        """With a fold, an empty one for the expected set; what has been carried in stays in."""
        cdef Carried late
        if not round.folds:
            return 0
        self.emit(act.OpenFold(round.step, round.fragment, round.attempt,
                               tuple(sorted(round.slots))))
        for learner in sorted(round.carried):
            late = round.carried[learner]
            self.fold(round, late.push, late)
        return 0

    # rule 7.7
    cdef int fold(self, Round round, object push, Carried late=None) except -1:
        cdef object contribution
        cdef list before
        if round.folds:
            before = self.weighed or sorted([
                (weight, learner) for (learner, _), weight in round.weights.items() if weight > 0])
            contribution = self.capped(round, contribution_of(self.policy, push, late), before)
            round.weights[push.learner, late is not None] = contribution.weight
            self.emit(act.Fold(round.step, round.fragment, round.attempt, contribution))
        return 0

    cdef object capped(self, Round round, object contribution, list weighed):
        """With a weight that is not too far above those of the others."""
        cdef double weight = self.policy.weight(contribution)
        cdef double most = most_over(weighed, contribution.learner, weight)
        if most == weight:
            return contribution
        self.warn("weight capped: it is far above those of the other learners", {
            "learner": contribution.learner, "generation": contribution.generation,
            "fragment": round.fragment, "step": round.step, "attempt": round.attempt,
            "weight": weight, "cap": most})
        return contribution._replace(weight=most * contribution.discount)

    cdef int pull(self, Round round, tuple members) except -1:
        round.pulled(members, self.now_ns)
        if self.members.told_count:
            self.owe_fates(round, members)
        return self.emit(act.Pull(members, round.fragment, round.step, round.attempt))

    # rule 19.1
    cdef int owe_fates(self, Round round, tuple members) except -1:
        """What these members have not been told of the pull before is told before this one."""
        cdef Member member
        for learner, generation in members:
            member = self.members.find(learner, generation)
            if member is None or member.owed is None:
                continue
            if round.fragment in member.owed:
                step, attempt = member.owed[round.fragment]
                self.tell_fate(member, round.fragment, step, attempt, NOT_COME)
            member.owed[round.fragment] = round.step, round.attempt
        return 0

    # rule 19.2
    cdef int tell_fate(self, object push, Py_ssize_t fragment, long long step, unsigned int attempt,
                       object fate) except -1:
        """The sender of a push hears what became of it, if it has asked and was not told before."""
        cdef Member member
        if not self.members.told_count:
            return 0
        member = self.members.find(push.learner, push.generation)
        if member is None or member.owed is None or (
                member.owed.get(fragment) != (step, attempt)):
            return 0
        del member.owed[fragment]
        return self.emit(act.TellFate(member.learner, member.generation, fragment, step, attempt,
                                      fate))

    # ---- close, quorum timeout -----------------------------------------------------------------

    cdef int settle_all(self) except -1:
        """Those that have changed or whose time has come; the others would wait as before."""
        cdef Round round
        for round in [round for round in self.gathering if self.now_ns >= round.verdict_ns]:
            self.settle(round)
        return 0

    cdef int settle(self, Round round) except -1:
        """Arm grace when quorum is first seen, then close or relaunch if it is time."""
        cdef Verdict verdict
        arm_grace(self.policy, round, self.now_ns, self.sync_ns)
        verdict = verdict_of(self.policy, round, self.now_ns)
        if verdict == Verdict.CLOSE:
            self.close(round)
        elif verdict == Verdict.RELAUNCH:
            self.quorum_timeout(round)
        else:
            self.look_too_few(round)
        round.verdict_ns = time_of_verdict(self.policy, round)
        return 0

    cdef int close(self, Round round) except -1:
        """From here on no push finds the round. What a fold holds is named without its payload."""
        cdef list merged = contributions_of(self.policy, round)
        cdef list weighed
        if not round.folds:
            weighed = weighed_of(self.policy, merged)
            if any_over(weighed):
                merged = [self.capped(round, contribution, weighed) for contribution in merged]
        self.gathering.remove(round)
        round.start_computing(tuple(merged))
        self.look_weightless(round)
        return self.emit(act.StartMerge(round.step, round.fragment, round.base,
                                        round.contributions))

    # rule 7.8
    cdef int look_weightless(self, Round round) except -1:
        """Say so when parameters stop to change because nobody's push has a weight."""
        cdef bint before = self.weightless
        self.weightless = all([contribution.weight == 0 for contribution in round.contributions])
        if self.weightless and not before:
            self.warn("no push has a weight: merges change nothing", {
                "step": round.step, "fragment": round.fragment})
        return 0

    cdef int look_too_few(self, Round round) except -1:
        """Say once in an attempt that everybody has answered and that this is not enough."""
        if (round.told_too_few or round.answered < len(round.slots) or not round.contributed()
                or round.mergeable()):
            return 0
        round.told_too_few = True
        return self.warn("too few pushes for --robust: the round waits for more learners", {
            "step": round.step, "attempt": round.attempt, "pushes": round.pushed,
            "needed": self.policy.least_values})

    # rule 6.11
    cdef int quorum_timeout(self, Round round) except -1:
        """Too few answers in time: ask again, ask others, or wait for learners to come back."""
        cdef dict fields = {"step": round.step, "attempt": round.attempt,
                            "answered": round.answered, "expected": len(round.slots),
                            "missing": round.unanswered()[:TOLD_MAX]}
        if self.policy.fixed_roster:
            return self.pull_missing(round, fields)
        if self.members.launchable_count < relaunch_needs(self.policy):
            round.quorum_deadline_ns = self.now_ns + DEFER_NS
            if round.told_deferred:
                return 0
            round.told_deferred = True
            fields["launchable"] = self.members.launchable_count
            fields["quorum"] = relaunch_needs(self.policy)
            return self.warn("quorum timeout: relaunch deferred, too few learners", fields)
        return self.relaunch(round, fields)

    # rule 6.13
    cdef int pull_missing(self, Round round, dict fields) except -1:
        """Fixed roster: everything stays, only the missing ids are asked again."""
        cdef Member member
        cdef Slot slot
        cdef list missing = []
        for member in self.members.launchable():
            slot = round.slots[member.learner]
            if slot.push is None and (
                    self.now_ns >= slot.pulled_ns + self.policy.quorum_timeout_ns):
                missing.append(member.key)
        round.quorum_deadline_ns = self.now_ns + self.policy.quorum_timeout_ns
        fields["pulled"] = [key[0] for key in missing]
        self.warn("quorum timeout: missing learners of the fixed roster pulled again", fields)
        if missing:
            self.pull(round, tuple(missing))
        return 0

    # rule 6.12
    cdef int relaunch(self, Round round, dict fields) except -1:
        """A new attempt to those who are there; pushes are discarded, carried deltas stay."""
        cdef list members = self.members.launchable()
        cdef long long patience_ns = round.patience_ns
        self.begin_attempt(round, members)
        fields["attempt"] = round.attempt
        self.warn("quorum timeout: new frozen-membership attempt", fields)
        if round.patience_ns > patience_ns:
            self.warn("answers came too late: this attempt has more time", {
                "step": round.step, "attempt": round.attempt,
                "timeout_s": round.patience_ns / 1e9})
        return self.ask(round, members)

    cdef int begin_attempt(self, Round round, list members) except -1:
        cdef Slot slot
        for slot in round.slots.values():
            if slot.push is not None:
                self.tell_fate(slot.push, round.fragment, round.step, round.attempt, GIVEN_UP)
        self.release_all(round.free_pushes())
        return round.launch(self.now_ns, members)

    cdef int ask(self, Round round, list members) except -1:
        """A new attempt has begun: these of the expected ones are pulled."""
        cdef Member member
        self.open_fold(round)
        self.pull(round, tuple([member.key for member in members]))
        return self.settle(round)                # carried deltas may answer the new slots at once

    cdef int reopen(self, Round round, list members) except -1:
        """A computed round without a result gathers again, with these as the expected set."""
        cdef Round other
        cdef Py_ssize_t place = len([other for other in self.gathering if other.step < round.step])
        self.gathering.insert(place, round)
        round.reopen()
        return self.begin_attempt(round, members)

    # ---- late pushes that join -----------------------------------------------------------------

    # rule 8.3
    cdef int attach_waiting(self, Round round) except -1:
        for push in self.late.take(round.fragment):
            self.attach(round, push, True)
        return 0

    # rule 8.4, rule 8.5
    cdef int attach(self, Round round, object push, bint parked) except -1:
        """A late push joins a gathering round, unless it is too many versions behind."""
        cdef long long lag = (<long long>merges_at(round.base, round.fragment, self.fragments)
                              - <long long>merges_at(push.base, round.fragment, self.fragments))
        cdef dict fields = {"learner": push.learner, "generation": push.generation,
                            "fragment": push.fragment, "step": push.step, "base": push.base,
                            "lag": lag}
        cdef Carried late
        if lag > self.policy.max_carry_lag:
            self.emit(act.Release(push.payload))
            return self.warn("push rejected", {"reason": CARRY_LAG_EXCEEDED, **fields})
        late = Carried(push, lag, pow(self.policy.carry_gamma, <double>lag))
        round.attach(late)
        if parked:
            self.emit(act.Unpark(push.payload))
        self.fold(round, push, late)
        return self.log("INFO", "late push carried into round",
                        {**fields, "into": round.step, "discount": late.discount})

    # ---- for the layers above ------------------------------------------------------------------

    cdef long long gathering_deadline_ns(self):
        """When time alone changes something: a launch, grace, a soft or a quorum deadline."""
        cdef long long due = NEVER
        cdef Round round
        if len(self.rounds) < self.depth and self.next_step <= self.policy.total_steps:
            due = self.next_launch_ns()
        for round in self.gathering:
            due = min(due, round.verdict_ns)
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
