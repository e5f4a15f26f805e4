"""The mistakes: one line each, of the kind that a change of the rules could bring in.

Every mistake breaks a rule, and every rule has at least one.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """In `file` (from the root of the tree), `old`, which stands there once, becomes `new`."""

    rules: str
    """Numbers of the rules it breaks, such as "3.5 6.1"."""
    file: str
    mistake: str
    old: str
    new: str


def broken(file: str, *mistakes: tuple[str, str, str, str]) -> list[Mutation]:
    """Mistakes in one file: (rules, mistake, old, new)."""
    return [Mutation(rules, f"syncer/{file}", mistake, old, new)
            for rules, mistake, old, new in mistakes]


GATHERING = broken(
    "core/rounds/gathering.pyx",
    ("1.2", "a resumed session begins at version 0", "version_at(step, p, fragments)", "0"),
    ("4.2", "a fixed roster is launched to whoever is there",
     "needed = self.policy.learners if self.policy.fixed_roster else 1", "needed = 1"),
    ("4.2", "with nobody there launching is not tried again",
     "                self.next_launch_ns = self.now_ns + RETRY_NS\n", ""),
    ("4.4", "launches are not paced",
     "\n               and self.now_ns >= self.next_launch_ns):", "):"),
    ("4.1", "one round more than the depth",
     "while (len(self.rounds) < self.depth", "while (len(self.rounds) <= self.depth"),
    ("4.1", "a round is launched after the last step",
     "< self.depth and self.next_step <= self.policy.total_steps\n               and",
     "< self.depth\n               and"),
    ("4.1", "more rounds than fragments", "min(max(self.policy.pipeline, 1), fragments)",
     "max(self.policy.pipeline, 1)"),
    ("4.3", "every round is launched on version 0",
     "Round(self.next_step, fragment, self.versions[fragment], self.policy)",
     "Round(self.next_step, fragment, 0, self.policy)"),
    ("6.11", "no deferral when too few are there to relaunch to",
     "if self.members.launchable_count < relaunch_needs(self.policy):", "if False:"),
    ("6.12", "a relaunch forgets the payloads it discards",
     "self.release_all(round.free_pushes())", "round.free_pushes()"),
    ("6.12", "a relaunched round is not looked at again", "return self.settle(round) ",
     "return 0 "),
    ("6.13", "a fixed roster pulls those again who have answered",
     "            if slot.push is None:\n                missing", "            if True:\n"
     "                missing"),
    ("7.2", "a relaunched round goes on with the fold of the old attempt",
     "new frozen-membership attempt\", fields)\n        self.open_fold(round)\n",
     "new frozen-membership attempt\", fields)\n"),
    ("8.3", "a waiting late push is forgotten at the launch",
     "        self.attach_waiting(round)\n        return", "        return"),
    ("8.4", "a carried delta one version too old",
     "if lag > self.policy.max_carry_lag:", "if lag > self.policy.max_carry_lag + 1:"),
    ("8.5", "no discount for lag", "pow(self.policy.carry_gamma, <double>lag)", "1.0"),
) + broken(
    "core/rounds/contributions.pyx",
    ("7.1", "contributions in order of arrival",
     "in sorted(round.slots.keys() | round.carried.keys()):",
     "in [*round.slots, *(i for i in round.carried if i not in round.slots)]:"),
    ("7.1", "an older connection's carried push behind the newer one's own",
     "late.push.generation <= own.generation", "False"),
)
JOINING = broken(
    "core/rounds/joining.pyx",
    ("3.3", "the tail of a superseded member is played",
     "not member.held or not self.members.is_current(member):", "not member.held:"),
    ("3.4", "rebind of a slot that has its push",
     "slot is None or slot.push is not None or slot.member.connected",
     "slot is None or slot.member.connected"),
    ("3.4", "rebind of a slot whose member lives",
     "slot.push is not None or slot.member.connected", "slot.push is not None"),
    ("3.5", "late join whatever version was delivered",
     "member.delivered[round.fragment] != round.base", "False"),
    ("3.5", "late join of a learner with a carried delta",
     " or member.learner in round.carried:", ":"),
    ("3.5", "late join into an exact fold that has begun",
     "self.policy.exact_fold and round.pushed", "False"),
    ("3.5", "an exact fold is not rebuilt for a late joiner",
     "            if self.policy.exact_fold:\n                self.open_fold(round)\n", ""),
    ("3.5", "late join into a capacity round",
     "if self.policy.quorum_capacity is not None:\n            return 0\n        for", "for"),
    ("3.7", "recovery replay for a slot that has its push",
     "slot.member is dead and slot.push is None", "slot.member is dead"),
    ("3.7", "a second catch-up of a member that is held",
     "newer is not None and not newer.held and self.recovers",
     "newer is not None and self.recovers"),
    ("3.8", "a member that returns is asked again for what its learner has answered",
     "            slot = round.slots[member.learner]\n            if slot.push is None:",
     "            slot = round.slots[member.learner]\n            if True:"),
    ("6.10", "an answered slot shrinks out of a capacity round",
     "slot.member is dead and not round.answers(slot)", "slot.member is dead"),
)
ADMISSION = broken(
    "core/rounds/admission.pyx",
    ("5.3", "a push against the current version is of the future",
     "if event.base > round.base:", "if event.base >= round.base:"),
    ("5.4", "a push exactly at the limit is stale",
     "round.base - event.base > self.policy.max_base_lag",
     "round.base - event.base >= self.policy.max_base_lag"),
    ("5.2", "any generation may answer in a dynamic roster",
     "not self.policy.fixed_roster and slot.member.generation != event.generation", "False"),
    ("5.2", "only the expected generation may answer in a fixed roster",
     "not self.policy.fixed_roster and slot.member", "slot.member"),
    ("5.5", "the last push of a learner wins",
     "if slot.push is not None:\n            return DUPLICATE", "if False:\n"
     "            return DUPLICATE"),
    ("5.1", "a push of another attempt is accepted",
     " or round.attempt != event.attempt):\n            return OUT_OF_ROUND",
     "):\n            return OUT_OF_ROUND"),
    ("5.1", "a push of another fragment is accepted",
     "round.fragment != event.fragment or round.attempt", "round.attempt"),
    ("5.6", "a stale second push takes the first one's slot away",
     "if not round.answers(slot) and not", "if not"),
    ("5.6", "a stale push releases its slot under an exact fold",
     "and not self.policy.exact_fold:", "and True:"),
    ("5.6", "a refused payload is kept",
     "        self.emit(act.Release(event.payload))\n        self.warn", "        self.warn"),
    ("5.7", "an accepted push does not feed the step-time estimate",
     "member.observe(self.now_ns, event.local_step)", "pass"),
    ("5.7", "nobody hears of a stale push that is merged", "if event.base < round.base:",
     "if False:"),
    ("5.9", "a stale push of a strict run is refused like any other",
     "if self.policy.max_base_lag == 0:", "if False:"),
    ("7.3", "a folded payload goes back twice", "            slot.holds = False\n", ""),
    ("8.1", "a late push of a sender that has gone is carried",
     "if self.members.find(event.learner, event.generation) is None:", "if False:"),
    ("8.1", "a learner's delta is merged and carried",
     "return not self.late.was_merged(event.step, event.learner)", "return True"),
)
ROUNDS = broken(
    "core/rounds/carry.pyx",
    ("8.2", "a waiting push gives way to an older one",
     "old is not None and push.base <= old.base", "False"),
) + broken(
    "core/rounds/membership.pyx",
    ("2.1", "the older connection stays current", "        self.current[member.learner] = member\n"
     "        self.newest[member.learner] = generation\n",
     "        if old is None:\n            self.current[member.learner] = member\n"
     "        self.newest[member.learner] = generation\n"),
    ("2.3", "a leaving generation takes its successor's place away",
     "if self.current[member.learner] is member:\n            self.current", "if True:\n"
     "            self.current"),
    ("2.6", "a pause without steps counts as one slow step",
     "        self.sampled = True\n        self.sample_ns = now_ns",
     "        if not self.sampled or local_step > self.sample_step:\n"
     "            self.sample_ns = now_ns\n        self.sampled = True"),
    ("3.2", "a held member is launched to", "if member is not None and not member.held:",
     "if member is not None:"),
) + broken(
    "core/rounds/closing.pyx",
    ("6.1", "a round closes with nothing to merge", "if contributed and (answered", "if (answered"),
    ("6.1", "a full round waits for its quorum", "contributed and (answered >= expected or",
     "contributed and (quorum and answered >= expected or"),
    ("6.2", "the quorum deadline counts although quorum is there",
     "    if quorum:\n        return",
     "    if now_ns >= quorum_deadline_ns:\n        return Verdict.RELAUNCH\n"
     "    if quorum:\n        return"),
    ("6.3", "the quorum deadline passes and nothing happens",
     "    if now_ns >= quorum_deadline_ns:", "    if False:"),
    ("6.4", "the quorum is lowered to who is there", "round.answered >= policy.quorum",
     "round.answered >= min(policy.quorum, len(round.slots))"),
    ("6.5", "the capacity quorum ignores --q-min",
     "return (round.answered >= policy.q_min and\n", "return (round.answered >= 1 and\n"),
    ("6.6", "the soft deadline ignores --q-min", "if round.answered < policy.q_min:", "if False:"),
    ("6.7", "grace is armed again at every event", "if round.quorum_ns != NEVER or not", "if not"),
    ("6.8", "the last sync's time is not taken off the grace",
     "since_launch_s - sync_s)\n    if", "since_launch_s)\n    if"),
    ("6.9", "an exact fold closes with a quorum",
     "    if policy.exact_fold:\n        return False\n", ""),
    ("4.4", "the pace knows no floor", "return max(floor_ns, <long long>(pace_ns + 0.5))",
     "return <long long>(pace_ns + 0.5)"),
) + broken(
    "core/rounds/round.pyx",
    ("8.6", "an answered slot is counted twice",
     "if not answered:\n            self.count_answer(slot)",
     "if True:\n            self.count_answer(slot)"),
    ("8.6", "a carried delta answers although nobody asked for it",
     "slot.push is not None or (self.policy.carry_answers_round",
     "slot.push is not None or (True"),
    ("8.7", "a relaunch forgets the carried deltas", "        self.slots = {}\n",
     "        self.slots = {}\n        self.carried = {}\n"),
    ("3.6", "a late joiner begins the grace anew", "        self.joined.append(member.learner)\n",
     "        self.joined.append(member.learner)\n        self.quorum_ns = NEVER\n"),
) + broken(
    "core/rounds/policy.pyx",
    ("1.4", "a resumed run waits for everybody",
     "return 1 if resumed and not config.fixed_roster else config.learners",
     "return config.learners"),
    ("5.8", "tokens count once", "return tokens * tokens / <double>push.c_steps",
     "return tokens / <double>push.c_steps"),
)
SCHEDULER = broken(
    "core/run/phases.pyx",
    ("1.1", "a push does not renew the lease of a spent budget",
     "outlived   outlived   outlived   outlived   release",
     "outlived   outlived   release    outlived   release"),
) + broken(
    "core/run/scheduler.pyx",
    ("1.3", "a superseded generation initializes",
     "or event.generation != self.members.newest[0] or", "or"),
    ("1.3", "the last value of a fragment wins", " or self.initialized[event.fragment]):", "):"),
    ("1.5", "a run does not wait for its learners",
     "(self.members.current_count < self.policy.start_learners\n                or not",
     "(not"),
    ("1.6", "the start may take for ever", "elif self.now_ns >= self.start_deadline_ns:",
     "elif False:"),
    ("1.7", "a round that a launch has completed waits for the next event",
     "            self.launch_due()\n            self.settle_all()\n",
     "            self.settle_all()\n            self.launch_due()\n"),
    ("2.2", "a generation is admitted twice",
     "if self.members.find(event.learner, event.generation) is not None:", "if False:"),
    ("2.4", "nobody takes the place of a connection that had overtaken",
     "        self.members.promote(member)\n", "        return 0\n"),
    ("2.4", "an older connection is current again without a catch-up",
     "\"generation\": member.generation})\n        return self.welcome(member)",
     "\"generation\": member.generation})\n        return 0"),
    ("2.5", "nobody gives the initial values again that were overtaken",
     "if member.init_dropped and not all(self.initialized):", "if False:"),
    ("3.1", "a member that reconnects is launchable before it is up to date",
     "            return self.catch_up(member)\n        if self.phase == Phase.FINISHING",
     "            return 0\n        if self.phase == Phase.FINISHING"),
    ("7.4", "a merge's payloads are kept", "return self.release_all(round.free_all())", "return 0"),
    ("10.2", "version 0 is visible before it is durable",
     "if self.saves.every_commit and self.saves.durable_step < 0:", "if False:"),
    ("12.1", "the final cut goes out before the final state is written",
     "kind is FINAL and self.policy.final_state) else", "False) else"),
    ("13.5", "a learner that dials during a signal's last write is told off",
     "if self.final_cut is None or not self.final_cut.complete():", "if False:"),
)
COMMITTING = broken(
    "core/run/committing.pyx",
    ("9.1", "a step is committed before its predecessor",
     "            round = self.rounds.get(self.global_step + 1)\n",
     "            round = next((r for r in self.rounds.values()\n"
     "                          if (<Round>r).state == RoundState.READY), None)\n"),
    ("9.2", "a merge that failed is published", "if round.error is not None:", "if False:"),
    ("9.3", "version T is broadcast",
     "        if round.step == self.policy.total_steps or self.phase",
     "        if round.step == self.policy.total_steps:\n"
     "            self.emit(act.Broadcast(round.step, round.fragment, "
     "self.members.current_keys()))\n"
     "        if round.step == self.policy.total_steps or self.phase"),
    ("9.4", "a counter of the ledger overflows", "min(entry[i] + count, U64_MAX)",
     "entry[i] + count"),
    ("9.5", "the tape has the last step before the one before it",
     "            self.report_unsynced()\n            return self.report",
     "            return self.report"),
    ("10.1", "a step is visible before it is durable",
     "if self.saves.every_commit and round.step !=", "if False and round.step !="),
    ("10.3", "a second write while one is under way",
     "if kind is None or self.saves.outstanding is not None:", "if kind is None:"),
    ("10.3", "the write that waits is forgotten",
     "        if self.saves.wanted is None:\n            return kind\n        self.save_next()\n"
     "        return None", "        self.saves.wanted = None\n        return kind"),
    ("10.7", "a run whose checkpoint cannot be written has just failed",
     "return self.end(NOT_WRITTEN, f\"checkpoint", "return self.end(FAILED, f\"checkpoint"),
    ("13.2", "a step that became durable after a signal is lost",
     "if kind is ROUND and round is not None:",
     "if kind is ROUND and round is not None and self.phase == Phase.RUNNING:"),
    ("13.3", "a signal writes again what is on disk already",
     "(kind is SHUTDOWN or kind is FAILURE) and self.saves.durable_step == step", "False"),
    ("13.4", "a run that cannot go on does not save its last cut",
     "if not self.saves.on:\n            return self.end(FAILED, text)",
     "if True:\n            return self.end(FAILED, text)"),
    ("13.6", "the end keeps the payloads of open rounds",
     "        self.release_all(self.free_everything())\n        self.report_unsynced()",
     "        self.free_everything()\n        self.report_unsynced()"),
) + broken(
    "core/run/saving.pyx",
    ("10.4", "a checkpoint after every step", "step % self.every == 0", "True"),
    ("10.5", "steps are committed while their predecessor's cut is written",
     "return self.wanted is not None or (self.outstanding is not None and not self.in_background)",
     "return self.every_commit and self.outstanding is not None"),
    ("10.5", "a write in the background holds the commits up",
     " and not self.in_background)", ")"),
    ("10.6", "a write in the background that failed is forgotten",
     "self.failure = f", "unused = f"),
)
ENDING = broken(
    "core/run/ending.pyx",
    ("11.1", "a spent budget leaves the open rounds open",
     "        self.release_all(self.free_everything())\n        self.phase = Phase.CUTOFF",
     "        self.phase = Phase.CUTOFF"),
    ("11.2", "a budget of another size counts",
     "if event.steps != self.policy.learner_budget_steps:", "if False:"),
    ("11.4", "the budget's checkpoint is written once for every report",
     "and self.saves.outstanding is not BUDGET_CUTOFF:", "and True:"),
    ("12.2", "a fixed roster ends without those who are away",
     "(range(self.policy.learners) if self.policy.fixed_roster", "(range(0) if False"),
    ("12.4", "a learner that comes again gets no second final cut",
     "and member.key not in self.final_cut.eligible):",
     "and member.learner not in [key[0] for key in self.final_cut.eligible]):"),
    ("12.5", "SHUTDOWN to a connection that has gone",
     "                 if key in self.members.members]", "                 ]"),
    ("12.6", "the final cut is waited for without end",
     "if self.now_ns < self.final_cut.deadline_ns:", "if True:"),
    ("13.1", "a signal ends the run without writing the last cut",
     "        if unsaved:\n", "        if False:\n"),
) + broken(
    "core/run/finishing.pyx",
    ("12.3", "an acknowledgement without the cut counts",
     "step != self.step or (learner, generation) not in self.eligible", "step != self.step"),
    ("12.3", "an acknowledgement of another step counts", "if step != self.step or", "if"),
) + broken(
    "core/run/budget.pyx",
    ("11.3", "a report does not end a learner's lease", "self.leases.pop(learner, None)", "pass"),
    ("11.3", "a sign of progress does not renew the lease",
     "            self.leases[learner] = now_ns + self.lease_ns\n", "            pass\n"),
)
MUTATIONS = GATHERING + JOINING + ADMISSION + ROUNDS + SCHEDULER + COMMITTING + ENDING
