"""The mistakes: one line each, of the kind that a change of the scheduler could bring in."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """In `file` of syncer/core, `old` (which stands there once) becomes `new`."""

    file: str
    mistake: str
    old: str
    new: str


def dropped(file: str, mistake: str, text: str, without: str = "") -> Mutation:
    return Mutation(file, mistake, text, without)


GATHERING = [
    dropped("rounds/gathering.pyx", "late join whatever version was delivered",
            "member.delivered[round.fragment] != round.base", "False"),
    dropped("rounds/gathering.pyx", "late join of a learner with a carried delta",
            " or member.learner in round.carried:", ":"),
    dropped("rounds/gathering.pyx", "late join into an exact fold that has begun",
            "self.policy.exact_fold and round.pushed", "False"),
    dropped("rounds/gathering.pyx", "an exact fold is not rebuilt for a late joiner",
            "            if self.policy.exact_fold:\n                self.open_fold(round)\n"),
    dropped("rounds/gathering.pyx", "late join into a capacity round",
            "if self.policy.capacity_quorum is not None:\n            return 0\n        for",
            "for"),
    dropped("rounds/gathering.pyx", "rebind of a slot that has its push",
            "slot is None or slot.push is not None or slot.member.connected",
            "slot is None or slot.member.connected"),
    dropped("rounds/gathering.pyx", "rebind of a slot whose member lives",
            "slot.push is not None or slot.member.connected", "slot.push is not None"),
    Mutation("rounds/gathering.pyx", "a fixed roster is launched to whoever is there",
             "needed = self.policy.learners if self.policy.fixed_roster else 1", "needed = 1"),
    dropped("rounds/gathering.pyx", "launches are not paced",
            "\n               and self.now_ns >= self.next_launch_ns):", "):"),
    Mutation("rounds/gathering.pyx", "one round more than the depth",
             "while (len(self.rounds) < self.depth", "while (len(self.rounds) <= self.depth"),
    Mutation("rounds/gathering.pyx", "a round is launched after the last step",
             "< self.depth and self.next_step <= self.policy.total_steps\n               and",
             "< self.depth\n               and"),
    Mutation("rounds/gathering.pyx", "no deferral when too few are there to relaunch to",
             "if self.members.launchable_count < self.policy.relaunch_needs():", "if False:"),
    Mutation("rounds/gathering.pyx", "a relaunch forgets the payloads it discards",
             "        for payload in round.free_pushes():\n            "
             "self.emit(act.Release(payload))\n        round.launch",
             "        round.free_pushes()\n        round.launch"),
    Mutation("rounds/gathering.pyx", "a carried delta one version too old",
             "if lag > self.policy.max_carry_lag:", "if lag > self.policy.max_carry_lag + 1:"),
    Mutation("rounds/gathering.pyx", "no discount for lag",
             "pow(self.policy.carry_gamma, <double>lag)", "1.0"),
    Mutation("rounds/gathering.pyx", "contributions in order of arrival",
             "in sorted(round.slots.keys() | round.carried.keys()):",
             "in [*round.slots, *(i for i in round.carried if i not in round.slots)]:"),
    Mutation("rounds/gathering.pyx",
             "an older connection's carried push behind the newer one's own",
             "late.push.generation <= own.generation", "False"),
    Mutation("rounds/gathering.pyx", "grace is armed again at every event",
             "if quorum and round.quorum_ns == NEVER:", "if quorum:"),
    Mutation("rounds/gathering.pyx", "an answered slot shrinks out of a capacity round",
             "slot.member is dead and not round.answers(slot)", "slot.member is dead"),
    Mutation("rounds/gathering.pyx", "recovery replay for a slot that has its push",
             "slot.member is dead and slot.push is None", "slot.member is dead"),
    Mutation("rounds/gathering.pyx", "a fixed roster pulls those again who have answered",
             "slot = round.slots[member.learner]\n            if slot.push is None:\n"
             "                missing", "slot = round.slots[member.learner]\n            if True:\n"
             "                missing"),
    Mutation("rounds/gathering.pyx", "a relaunched round is not looked at again",
             "return self.settle(round) ", "return 0 "),
]
ADMISSION = [
    Mutation("rounds/admission.pyx", "a push against the current version is of the future",
             "if event.base > round.base:", "if event.base >= round.base:"),
    Mutation("rounds/admission.pyx", "a push exactly at the limit is stale",
             "round.base - event.base > self.policy.max_base_lag",
             "round.base - event.base >= self.policy.max_base_lag"),
    Mutation("rounds/admission.pyx", "any generation may answer in a dynamic roster",
             "not self.policy.fixed_roster and slot.member.generation != event.generation",
             "False"),
    Mutation("rounds/admission.pyx", "only the expected generation may answer in a fixed roster",
             "not self.policy.fixed_roster and slot.member", "slot.member"),
    Mutation("rounds/admission.pyx", "the last push of a learner wins",
             "if slot.push is not None:\n            return \"Duplicate\"", "if False:\n"
             "            return \"Duplicate\""),
    Mutation("rounds/admission.pyx", "a push of another attempt is accepted",
             " or round.attempt != event.attempt):\n            return \"OutOfRound\"",
             "):\n            return \"OutOfRound\""),
    Mutation("rounds/admission.pyx", "a push of another fragment is accepted",
             "round.fragment != event.fragment or round.attempt", "round.attempt"),
    Mutation("rounds/admission.pyx", "a stale second push takes the first one's slot away",
             "if not round.answers(slot) and not", "if not"),
    Mutation("rounds/admission.pyx", "a stale push releases its slot under an exact fold",
             "and not self.policy.exact_fold:", "and True:"),
    Mutation("rounds/admission.pyx", "a refused payload is kept",
             "        self.emit(act.Release(event.payload))\n        self.warn",
             "        self.warn"),
    Mutation("rounds/admission.pyx", "a late push of a sender that has gone is carried",
             "if self.members.find(event.learner, event.generation) is None:", "if False:"),
    Mutation("rounds/admission.pyx", "a learner's delta is merged and carried",
             "return not self.late.was_merged(event.step, event.learner)", "return True"),
    Mutation("rounds/admission.pyx", "an accepted push does not feed the step-time estimate",
             "member.observe(self.now_ns, event.local_step)", "pass"),
]
OTHERS = [
    Mutation("rounds/carry.pyx", "a waiting push gives way to an older one",
             "old is not None and push.base <= old.base", "False"),
    Mutation("rounds/membership.pyx", "a leaving generation takes its successor's place away",
             "if self.current[member.learner] is member:\n            self.current", "if True:\n"
             "            self.current"),
    Mutation("rounds/membership.pyx", "a pause without steps counts as one slow step",
             "        self.sampled = True\n        self.sample_ns = now_ns",
             "        if not self.sampled or local_step > self.sample_step:\n"
             "            self.sample_ns = now_ns\n        self.sampled = True"),
    Mutation("rounds/closing.pyx", "the quorum deadline counts although quorum is there",
             "    if quorum:\n        return",
             "    if now_ns >= quorum_deadline_ns:\n        return Verdict.RELAUNCH\n"
             "    if quorum:\n        return"),
    Mutation("rounds/closing.pyx", "a round closes with nothing to merge",
             "if contributed and (answered", "if (answered"),
    Mutation("rounds/closing.pyx", "the last sync's time is not taken off the grace",
             "since_launch_s - sync_s)\n    if", "since_launch_s)\n    if"),
    Mutation("rounds/round.pyx", "an answered slot is counted twice",
             "if not answered:\n            self.count_answer(slot)",
             "if True:\n            self.count_answer(slot)"),
    Mutation("rounds/policy.pyx", "the capacity quorum ignores --q-min",
             "return (round.answered >= self.q_min and\n", "return (round.answered >= 1 and\n"),
    Mutation("run/scheduler.pyx", "the tail of a superseded member is played",
             "not member.held or not self.members.is_current(member):", "not member.held:"),
    Mutation("run/scheduler.pyx", "a second catch-up of a member that is held",
             "newer is not None and not newer.held and self.recovers",
             "newer is not None and self.recovers"),
    Mutation("run/scheduler.pyx", "a superseded generation initializes",
             "or event.generation != self.members.newest[0] or", "or"),
    Mutation("run/scheduler.pyx", "the last value of a fragment wins",
             " or self.initialized[event.fragment]):", "):"),
    Mutation("run/scheduler.pyx", "version T is broadcast",
             "        if round.step == self.policy.total_steps or self.phase",
             "        if round.step == self.policy.total_steps:\n"
             "            self.emit(act.Broadcast(round.step, fragment, "
             "self.members.current_keys()))\n"
             "        if round.step == self.policy.total_steps or self.phase"),
    Mutation("run/scheduler.pyx", "a merge's payloads are kept",
             "        for payload in round.free_all():\n            "
             "self.emit(act.Release(payload))\n        return 0", "        return 0"),
    Mutation("run/scheduler.pyx", "a member that reconnects is launchable before it is up to date",
             "            return self.catch_up(member)\n        if self.phase == Phase.FINISHING",
             "            return 0\n        if self.phase == Phase.FINISHING"),
    Mutation("run/scheduler.pyx", "the end keeps the payloads of open rounds",
             "        for payload in self.free_everything():\n            "
             "self.emit(act.Release(payload))\n        self.report_unsynced()",
             "        self.free_everything()\n        self.report_unsynced()"),
    Mutation("run/finishing.pyx", "an acknowledgement without the cut counts",
             "step != self.step or (learner, generation) not in self.eligible",
             "step != self.step"),
    Mutation("run/finishing.pyx", "an acknowledgement of another step counts",
             "if step != self.step or", "if"),
    Mutation("run/scheduler.pyx", "the final cut goes out before the final state is written",
             'kind == "final" and self.policy.final_state) else', "False) else"),
    Mutation("run/budget.pyx", "a report does not end a learner's lease",
             "self.leases.pop(learner, None)", "pass"),
]
SAVING = [
    Mutation("run/saving.pyx", "steps are committed while their predecessor's cut is written",
             "return self.wanted is not None or (self.outstanding is not None and not "
             "self.in_background)", "return self.every_commit and self.outstanding is not None"),
    Mutation("run/saving.pyx", "a write in the background holds the commits up",
             " and not self.in_background)", ")"),
    Mutation("run/saving.pyx", "a checkpoint after every step", "step % self.every == 0", "True"),
    Mutation("run/saving.pyx", "a write in the background that failed is forgotten",
             "self.failure = f", "unused = f"),
    Mutation("run/scheduler.pyx", "a step is visible before it is durable",
             "if self.saves.every_commit and round.step !=", "if False and round.step !="),
    Mutation("run/scheduler.pyx", "version 0 is visible before it is durable",
             "if self.saves.every_commit and self.saves.durable_step < 0:", "if False:"),
    Mutation("run/scheduler.pyx", "a second write while one is under way",
             "if kind is None or self.saves.outstanding is not None:", "if kind is None:"),
    Mutation("run/scheduler.pyx", "a signal writes again what is on disk already",
             'kind in ("shutdown", "failure") and self.saves.durable_step == step', "False"),
    Mutation("run/scheduler.pyx", "a signal ends the run without writing the last cut",
             "        if unsaved:\n", "        if False:\n"),
    Mutation("run/scheduler.pyx", "a step that became durable after a signal is lost",
             'if kind == "round" and round is not None:',
             'if kind == "round" and round is not None and self.phase == Phase.RUNNING:'),
    Mutation("run/scheduler.pyx", "the write that waits is forgotten",
             "        if self.saves.wanted is not None:\n            return self.save_next()\n",
             "        self.saves.wanted = None\n"),
    Mutation("run/scheduler.pyx", "the budget's checkpoint is written once for every report",
             'and self.saves.outstanding != "budget-cutoff":', "and True:"),
    Mutation("run/scheduler.pyx", "a learner that dials during a signal's last write is told off",
             "if self.final_cut is None or not self.final_cut.complete():", "if False:"),
    Mutation("run/scheduler.pyx", "nobody takes the place of a connection that had overtaken",
             "        self.members.promote(member)\n", "        return 0\n"),
    Mutation("run/scheduler.pyx", "nobody gives the initial values again that were overtaken",
             "if member.init_dropped and not all(self.initialized):", "if False:"),
    Mutation("run/scheduler.pyx", "an older connection is current again without a catch-up",
             "            return self.catch_up(member)\n        return self.send_final_cut()",
             "            return 0\n        return self.send_final_cut()"),
]
MUTATIONS = GATHERING + ADMISSION + OTHERS + SAVING
