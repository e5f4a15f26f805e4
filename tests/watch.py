"""A witness over the scheduler: what its actions may never say, whatever the events were.

The invariants of one state are in syncer.core.invariants; these are the ones that only the sequence
of events and actions shows (numbers of the round description, section 15). Knows the rules by what
can be seen from outside, never by asking the scheduler why.
"""

from __future__ import annotations

from collections import defaultdict

from syncer.core import actions as act
from syncer.core import events as ev
from syncer.core.invariants import check
from syncer.core.round import RoundState


class Payload:
    """A handle of the driver: given once, must come back once."""

    def __init__(self, label: str, value: float = 0.0):
        self.label = label
        self.value = value

    def __repr__(self):
        return self.label


class Watch:
    """Follows one run; every method raises AssertionError when a rule is broken."""

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.config = scheduler.config
        self.owned: dict[int, Payload] = {}
        self.connected: set = set()
        self.held: set = set()
        self.sent: dict = defaultdict(dict)
        self.attempts: dict = {}
        self.grace: dict = {}
        self.merging: dict = {}
        self.published = 0
        self.acknowledged: set = set()
        self.eligible: set = set()
        self.exit: act.Exit | None = None

    def event(self, event):
        """Before the scheduler sees an event."""
        payload = getattr(event, "payload", None)
        if payload is not None:
            assert id(payload) not in self.owned, "a test gave the same payload twice"
            self.owned[id(payload)] = payload
        if isinstance(event, ev.Disconnected):
            self.connected.discard((event.learner, event.generation))
        elif isinstance(event, ev.CaughtUp):
            member = (event.learner, event.generation)
            if member in self.held:
                self.held.discard(member)
                self.sent[member].update(enumerate(event.delivered))
        elif isinstance(event, ev.FinalAck) and event.step == self.config.total_steps:
            self.acknowledged |= {(event.learner, event.generation)} & self.eligible

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
        self.state()

    def state(self):
        """Between events: the scheduler's own state check, and who owns which payload."""
        check(self.scheduler)
        held = {}
        for round in self.scheduler.rounds.values():
            if round.state == RoundState.GATHERING:
                pushes = [slot.push for slot in round.slots.values() if slot.push is not None]
                held.update((id(push.payload), push.payload) for push in pushes)
                self.deadlines(round)
            elif round.payloads_held:
                held.update((id(c.payload), c.payload) for c in round.contributions)
        assert held == self.owned, f"payloads lost {self.owned} or kept {held}"

    def deadlines(self, round):
        """6: nothing but a new attempt moves the base, the launch time or an armed grace."""
        key = (round.step, round.attempt)
        seen = self.attempts.setdefault(key, (round.base, round.launch_ns))
        assert seen == (round.base, round.launch_ns), f"6: {key} changed {seen}"
        if key in self.grace:
            assert self.grace[key] == (round.quorum_ns, round.grace_deadline_ns), f"6: {key}"
        elif round.grace_deadline_ns != 2**63 - 1:
            self.grace[key] = (round.quorum_ns, round.grace_deadline_ns)

    # ---- one method per action that a rule speaks about ------------------------------------------

    def on_admit(self, action):
        member = (action.learner, action.generation)
        assert member not in self.connected, f"{member} admitted twice"
        self.connected.add(member)
        self.held.discard(member)
        self.sent[member] = {}

    def release(self, payload):
        assert self.owned.pop(id(payload), None) is payload, f"{payload} given back twice"

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

    def on_startmerge(self, action):
        who = [(c.learner, c.generation) for c in action.contributions]
        assert who, f"{action} merges nothing"
        assert sorted(who) == who, f"not in learner order: {who}"
        assert len({c[0] for c in who}) == len(who), f"4: {who}"
        if self.scheduler.fixed_roster:
            assert [c[0] for c in who] == list(range(self.config.learners)), f"10: {who}"
        assert action.step not in self.merging, f"2: step {action.step} merged twice"
        self.merging[action.step] = action

    def on_publish(self, action):
        assert action.step == self.published + 1, f"1: {action} after {self.published}"
        assert self.merging[action.step].fragment == action.fragment
        self.published = action.step

    def on_broadcast(self, action):
        assert action.version != self.config.total_steps, "14: version T was broadcast"
        for member in action.members:
            assert member in self.connected, f"broadcast to {member}, which is not there"
            assert self.sent[member].get(action.fragment, -1) < action.version, "19"
            if member not in self.held:
                self.sent[member][action.fragment] = action.version

    def on_sendfinal(self, action):
        member = (action.learner, action.generation)
        assert self.published == action.step == self.config.total_steps, "a final cut too early"
        assert member not in self.eligible, f"{member} got the final cut twice"
        self.eligible.add(member)

    def on_sendshutdown(self, action):
        assert set(action.members) <= self.acknowledged & self.connected, f"15: {action}"

    def on_exit(self, action):
        assert not self.owned, f"payloads {list(self.owned.values())} die with the run"
        self.exit = action
