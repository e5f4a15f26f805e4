"""A witness over the scheduler: what its actions may never say, whatever the events were.

The invariants of one state are in syncer.core.invariants; these are the ones that only the sequence
of events and actions shows (numbers of the invariants in docs/rules.md). Knows the rules by what
can be seen from outside, never by asking the scheduler why.
"""

from __future__ import annotations

from collections import defaultdict

from syncer.core import actions as act
from syncer.core import events as ev
from syncer.core.invariants import check
from syncer.core.rounds.round import RoundState
from syncer.core.run.phases import Phase
from syncer.core.run.tape_keys import misfit
from syncer.protocol import PushFate
from tests.closing_rules import decide, launch_gap_ns
from tests.waiting_rules import WaitsCheck


class Payload:
    """A handle of the driver: given once, must come back once."""

    def __init__(self, label: str, value: float = 0.0):
        self.label = label
        self.value = value

    def __repr__(self):
        return self.label


class Watch:
    """Follows one run; every method raises AssertionError when a rule is broken."""

    def __init__(self, scheduler, durable_step: int = -1, renumbered: int = 0):
        """durable_step: of the checkpoint that the scheduler was resumed from, -1 for none.
        renumbered: what was added to its steps."""
        self.scheduler = scheduler
        self.waits = WaitsCheck(scheduler)
        self.config = scheduler.config
        self.last_step = scheduler.config.total_steps + renumbered
        self.owned: dict[int, Payload] = {}
        self.connected: set = set()
        self.admitted: set = set()
        self.held: set = set()
        self.sent: dict = defaultdict(dict)
        self.attempts: dict = {}
        self.grace: dict = {}
        self.waited: dict = {}
        self.launched: tuple | None = None
        self.merging: dict = {}
        self.published = scheduler.global_step
        self.acknowledged: set = set()
        self.eligible: set = set()
        self.folds: dict = {}
        self.origins: dict = {}
        self.merged: set = set()
        self.computing: dict = {}
        self.again: set = set()
        self.first_step = scheduler.global_step + 1
        self.parked: set = set()
        self.exit: act.Exit | None = None
        self.saves: list[act.Save] = []
        self.initial = scheduler.global_step  # or the initial cut is out
        self.durable = durable_step
        self.save_failed = False
        self.owed: dict = {}
        """Of each member that asks for fates: fragment -> (step, attempt) of its last pull, until
        it is told of it."""
        self.shares: dict = {}
        """By step that is computed: senders of its contributions, None of those that do not count
        as answers of it."""
        self.in_step: dict = {}
        """The step that was published last: the senders of the answers in it."""

    def event(self, event):
        """Before the scheduler sees an event."""
        payload = getattr(event, "payload", None)
        if payload is not None:
            assert id(payload) not in self.owned, "a test gave the same payload twice"
            self.owned[id(payload)] = payload
            if isinstance(event, ev.Push):
                self.origins[id(payload)] = (event.learner, event.step, event.attempt)
        if isinstance(event, ev.Hello) and event.wants_fates:
            self.owed.setdefault((event.learner, event.generation), {})
        if isinstance(event, ev.Disconnected):
            self.connected.discard((event.learner, event.generation))
        elif isinstance(event, ev.CaughtUp):
            member = (event.learner, event.generation)
            if member in self.held:
                self.held.discard(member)
                self.sent[member].update(enumerate(event.delivered))
        elif isinstance(event, ev.Saved) and self.saves:
            save = self.saves.pop()
            if save.kind is not act.SaveKind.FINAL_STATE:
                self.save_failed = event.error is not None
                self.durable = self.durable if self.save_failed else save.step
        elif isinstance(event, ev.MergeDone) and event.nothing_left:
            self.nothing_left(event.step)
        elif isinstance(event, ev.MergeDone) and event.step in self.shares:
            for dropped in event.dropped:
                self.shares[event.step][dropped.position] = None
        elif isinstance(event, ev.FinalAck) and event.step == self.last_step:
            self.acknowledged |= {(event.learner, event.generation)} & self.eligible

    def nothing_left(self, step):
        """9.7: a merge without a result has merged nothing, and its round may gather again."""
        del self.merging[step]
        self.merged -= self.computing[step]
        self.again.add(step)

    def actions(self, actions):
        """After the scheduler has answered an event with these actions."""
        pulled = set()
        for action in actions:
            over = self.exit is not None
            assert not over or isinstance(action, act.Release | act.Refuse), (
                f"{action} after the end")
            name = type(action).__name__.lower()
            if isinstance(action, act.Pull):
                self.pull(action, pulled)
            elif hasattr(self, f"on_{name}"):
                getattr(self, f"on_{name}")(action)
        self.waits.look(actions)
        self.state()

    def state(self):
        """Between events: the scheduler's own state check, and who owns which payload."""
        check(self.scheduler)
        held = {}
        for round in self.scheduler.rounds.values():
            keepers = [slot for slot in round.slots.values() if slot.holds]
            keepers += [late for late in round.carried.values() if late.holds]
            held.update((id(k.push.payload), k.push.payload) for k in keepers)
            if round.state == RoundState.GATHERING:
                self.deadlines(round)
                assert decide(round, self.config, self.scheduler.now_ns) == "WAIT", f"20: {round}"
        if self.scheduler.late is not None:
            for waiting in self.scheduler.late.waiting.values():
                held.update((id(push.payload), push.payload) for push in waiting.values())
        self.pace()
        assert held == self.owned, f"payloads lost {self.owned} or kept {held}"

    def pace(self):
        """4.4: launches keep their distance, and nobody's pause stops them for long."""
        scheduler = self.scheduler
        step, now_ns = scheduler.next_step - 1, scheduler.now_ns
        if scheduler.phase is not Phase.RUNNING or step < self.first_step:
            return
        gap_ns = launch_gap_ns(scheduler)
        if self.launched is None or self.launched[0] != step:
            if self.launched is not None:
                assert now_ns >= self.launched[1] + gap_ns, f"4.4: {step} was launched too early"
            self.launched = step, now_ns
        if len(scheduler.rounds) < scheduler.depth and step < self.last_step:
            due = max(self.launched[1] + gap_ns, now_ns + 100_000_000)
            assert scheduler.deadline_ns() <= due, f"4.4: {step + 1} is not tried before {due}"

    def deadlines(self, round):
        """6: nothing but a new attempt moves the base, the launch time or an armed grace."""
        key = (round.step, round.attempt)
        if key not in self.attempts and round.step in self.again:
            self.again.remove(round.step)
        elif round.attempt > 1 and key not in self.attempts:
            due, armed_ns = self.waited[round.step]
            assert armed_ns == 2**63 - 1, f"14: {round} was launched again after quorum"
            assert self.scheduler.now_ns >= due, f"12: {round} was launched again too early"
        self.waited[round.step] = (round.quorum_deadline_ns, round.quorum_ns)
        seen = self.attempts.setdefault(key, (round.base, round.launch_ns))
        assert seen == (round.base, round.launch_ns), f"6: {key} changed {seen}"
        if key in self.grace:
            assert self.grace[key] == (round.quorum_ns, round.grace_deadline_ns), f"6: {key}"
        elif round.grace_deadline_ns != 2**63 - 1:
            self.grace[key] = (round.quorum_ns, round.grace_deadline_ns)

    # ---- one method per action that a rule speaks about ------------------------------------------

    def on_admit(self, action):
        member = (action.learner, action.generation)
        assert member not in self.admitted, f"2.2: {member} admitted twice"
        self.admitted.add(member)
        self.connected.add(member)
        self.held -= {older for older in self.held if older[0] == action.learner}
        self.sent[member] = dict(action.kept)

    def on_close(self, action):
        member = (action.learner, action.generation)
        assert member in self.connected, f"{action} of a connection that is not there"
        assert action.told or not self.initial, f"{action} although the run has begun"

    def on_record(self, action):
        problem = misfit(action.fields)
        assert problem is None, f"a record that its table does not know: {problem}"

    def release(self, payload):
        assert self.owned.pop(id(payload), None) is payload, f"{payload} given back twice"
        self.parked.discard(id(payload))

    def on_release(self, action):
        self.release(action.payload)

    def on_adoptinit(self, action):
        self.release(action.payload)

    def on_catchup(self, action):
        member = (action.learner, action.generation)
        assert member in self.connected, f"catch-up of {member}, which is not there"
        assert member not in self.held, f"two catch-ups of {member} at once"
        self.held.add(member)

    def pull(self, action, pulled):
        for member in action.members:
            seen = (member, action.step, action.attempt)
            assert seen not in pulled, f"7: {seen} pulled twice at once"
            pulled.add(seen)
            assert member in self.connected, f"pull to {member}, which is not there"
            assert member not in self.held, f"9: held {member} was pulled"
            base = self.scheduler.versions[action.fragment]
            sent = self.sent[member].get(action.fragment)
            assert sent == base, f"8: {member} has version {sent}, the round's base is {base}"
            if member in self.owed:
                assert action.fragment not in self.owed[member], f"21: {member} was not told"
                self.owed[member][action.fragment] = action.step, action.attempt

    def on_tellfate(self, action):
        """21: once for each pull, and a merge is one that is published with this push."""
        member = (action.learner, action.generation)
        assert member in self.connected, f"{action} to {member}, which is not there"
        told = self.owed[member].pop(action.fragment, None)
        assert told == (action.step, action.attempt), f"21: {action}, but {told} was asked for"
        merged = member in self.in_step.get(action.step, ())
        assert merged == (action.fate is PushFate.MERGED), f"21: {action}, merged: {merged}"

    def on_startmerge(self, action):
        who = [(c.learner, c.generation) for c in action.contributions]
        assert who, f"{action} merges nothing"
        assert sorted(who) == who, f"not in learner order: {who}"
        own = [c.learner for c in action.contributions if not c.carried]
        assert len(set(own)) == len(own), f"4: {who}"
        if self.config.fixed_roster:
            assert own == list(range(self.config.learners)), f"10: {who}"
        if action.step in self.folds:
            pushes = self.whole_fold(action)
        else:
            pushes = [(self.origins[id(c.payload)], c) for c in action.contributions]
        for push, contribution in pushes:
            self.merged_once(push, contribution)
        self.computing[action.step] = {push for push, _ in pushes}
        round = self.scheduler.rounds[action.step]
        assert decide(round, self.config, self.scheduler.now_ns) == "CLOSE", f"{round} too early"
        assert action.step not in self.merging, f"2: step {action.step} merged twice"
        self.merging[action.step] = action
        self.shares[action.step] = [None if c.carried else (c.learner, c.generation)
                                    for c in action.contributions]

    def merged_once(self, push, contribution):
        """18: one push is merged at most once, however often and on whatever connection it came."""
        assert push not in self.merged, f"18: {push} merged twice, now as {contribution}"
        assert push[1] >= self.first_step, f"18: {push} may have been merged before this process"
        self.merged.add(push)

    def on_openfold(self, action):
        self.folds[action.step] = (action, [])

    def on_fold(self, action):
        opened, folded = self.folds[action.step]
        assert opened.attempt == action.attempt, f"{action} is not of the open fold {opened}"
        push = self.origins[id(action.contribution.payload)]
        folded.append((push, action.contribution))

    def whole_fold(self, action):
        """11: an exact fold closes with all of its roster, any fold with what it was given."""
        opened, folded = self.folds.pop(action.step)
        merged = sorted((c.learner, c.carried, c.weight) for c in action.contributions)
        assert merged == sorted((c.learner, c.carried, c.weight) for _, c in folded)
        if self.scheduler.policy.exact_fold:
            assert opened.learners == tuple(c.learner for c in action.contributions), "11"
        return folded

    def on_park(self, action):
        assert self.owned[id(action.payload)] is action.payload, "parked, but not ours"
        assert id(action.payload) not in self.parked, f"{action.payload} parked twice"
        self.parked.add(id(action.payload))

    def on_unpark(self, action):
        self.parked.remove(id(action.payload))

    def on_publish(self, action):
        assert action.step == self.published + 1, f"1: {action} after {self.published}"
        assert self.merging[action.step].fragment == action.fragment
        self.in_step = {action.step: set(self.shares.pop(action.step))}
        del self.computing[action.step]
        self.published = action.step

    def on_broadcast(self, action):
        self.initial = True
        self.visible(action)
        assert action.version != self.last_step, "14: version T was broadcast"
        for member in action.members:
            assert member in self.connected, f"broadcast to {member}, which is not there"
            assert self.sent[member].get(action.fragment, -1) < action.version, "19"
            if member not in self.held:
                self.sent[member][action.fragment] = action.version

    def on_save(self, action):
        assert not self.saves, f"13: {action} while {self.saves} is under way"
        assert action.kind is act.SaveKind.FINAL_STATE or self.durable <= action.step
        ahead = (action.kind is act.SaveKind.ROUND
                 and self.scheduler.phase is not Phase.WAITING)
        assert action.step == self.published + ahead, f"{action} after step {self.published}"
        if action.kind not in (act.SaveKind.ROUND, act.SaveKind.PERIODIC):
            assert not self.scheduler.rounds, f"{action} with rounds open"
        self.saves.append(action)

    def visible(self, action):
        """12: with a checkpoint of every step nothing goes out that is not on disk, without nothing
        before version 0 is; unless the write has failed and the run goes on without."""
        if not self.config.checkpoint_path or (self.save_failed and self.config.goes_on_unsaved):
            return
        assert self.durable >= 0 or self.first_step > 1, f"10.2: {action}, and there is no file"
        if self.config.checkpoint_every == 1:
            assert self.durable == self.published, f"12: {action}, but {self.durable} is durable"

    def on_sendfinal(self, action):
        self.visible(action)
        member = (action.learner, action.generation)
        assert self.published == action.step == self.last_step, "a final cut too early"
        assert member not in self.eligible, f"{member} got the final cut twice"
        self.eligible.add(member)

    def on_sendshutdown(self, action):
        assert set(action.members) <= self.acknowledged & self.connected, f"15: {action}"

    def on_exit(self, action):
        assert not self.owned, f"payloads {list(self.owned.values())} die with the run"
        committed = self.published >= self.first_step
        if self.config.checkpoint_path and committed and action.status and not self.save_failed:
            assert self.durable == self.published, f"13.4: {action} costs step {self.published}"
        self.exit = action
