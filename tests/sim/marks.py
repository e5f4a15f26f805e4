"""Which rare paths a simulated run has taken; a run of many seeds must take them all.

Reads events, actions and the scheduler's public state; must not change anything or judge.
"""

from __future__ import annotations

from syncer.core import actions as act
from syncer.core import events as ev
from syncer.core.rounds.round import RoundState
from syncer.protocol import NoticeCode, PushFate
from tests.sim.intruders import KINDS as INTRUDERS

REQUIRED = frozenset({
    # joining and leaving
    "late joiner pulled into open round", "rebound outstanding pull", "recovery replay",
    "older connection is current again", "superseded tail", "a mute connection gave way",
    "a silent connection gave its slot away", "a late frame of the dead", "exact fold rebuilt",
    "final cut again", "a learner was refused",
    "catch-up waits for its turn", "catch-up begins after its wait",
    # readers
    "a reader has a cut", "a reader has the final cut", "a reader was shut down",
    "a reader was refused",
    # waits
    *(f"notice: {code.name}" for code in NoticeCode if code is not NoticeCode.CLAIMED_TWICE),
    # deadlines
    "quorum timeout: new frozen-membership attempt", "soft deadline", "grace ran out",
    "quorum timeout: relaunch deferred, too few learners", "capacity shrink",
    "quorum timeout: missing learners of the fixed roster pulled again",
    # pushes
    "contribution left out: the merge would not be finite", "tape excluded",
    "nothing finite is left to merge: new attempt", "a fold was not finite",
    "momentum begins anew: it alone is more than finite",
    *act.PushRefusal, "asked again after a refused push",
    "weight capped: it is far above those of the other learners",
    "too few pushes for --robust: the round waits for more learners",
    "stale push under an exact fold", "stale base-relative delta admitted", "tape released",
    "an error was carried on", *(f"fate: {fate.name}" for fate in PushFate if fate not in (
        PushFate.UNEXPECTED_MEMBER, PushFate.FUTURE_BASE, PushFate.DUPLICATE)),  # one in thousands
    # late carry
    "late push carried into round", "late push waits for the next round", "carry answers",
    "carried delta survives a relaunch", "tape carried",
    # commits and saves
    "merged before its turn", "background save waited for", "commits held for a save",
    "saved round", "saved periodic", "saved periodic in the background", "saved final",
    "saved shutdown", "saved budget-cutoff", "not saved: round", "not saved: periodic",
    "not saved: final", "signal while a step was written",
    # servers that end and begin
    "renumbered", "started again by a supervisor", "a lost run was begun anew",
    "resumed", "server lost: kill", "server lost: power", "ended with status 5",
    "ended with status 143", "rolled back", "resumed at a step that nobody had seen",
    "resumed at the end", "learner-budget cutoff checkpoint written", "second process of a budget",
    "ended with status 1", "ended with status 6", "saved failure",
    "went back with restore", "went back with a copy", "set aside",
    "went on after the end", "not resumed",
    "started again after the end",
    "not resumed with other settings", "nothing to resume",
    "not begun anew in the place of a run",
    "the run goes on without a checkpoint", "not started without its directory",
    # who comes to the door, and what happens to the process
    *(f"stranger: {kind}" for kind in (
        "silence", "half a HELLO", "rubbish", "a huge frame", "a message out of place",
        "a HELLO of nobody", "a HELLO with another key", "a HELLO of another profile",
        "a short HELLO", "a DATA_HELLO of nobody", "a short DATA_HELLO", "a DATA_HELLO too many",
        "a generation twice", "a recorded HELLO", "a HELLO that cannot be merged",
        "a HELLO of another session", "a HELLO of another layout",
        "a HELLO of another profile and session", "a HELLO with a block that is cut",
        "a HELLO with a block that is longer than it", "a HELLO with records behind each other",
        "a HELLO of a reader", "a report of nobody", "a HELLO of another run",
        "a HELLO of an earlier process")),
    "HELLOs are read on the workers", "a fragment was kept", "a notice has come",
    "a broadcast came as a change",
    "a connection made room for the next one of its learner", "a learner has too many connections",
    *(f"fault: {kind}" for kind in (
        "deaf", "dribble", "lose_stream", "no_descriptors", "freeze", "full_tape", "second_server",
        "no_memory", "overflow", "stale", "false_report", "chown", "system_call", "unread", "away",
        "vanish", "ghost", "mute", "second_fleet")),
    *(f"intruder: {kind}" for kind in INTRUDERS),
    "a broadcast waited for memory", "a computation waited for memory", "told off",
    "log lines lost", "event tape takes nothing", "event tape records lost",
})
SAID = {
    b"log lines lost": "log lines lost", b"event tape takes nothing": "event tape takes nothing",
    b"event tape records lost": "event tape records lost",
    b"catch-up waits for its turn": "catch-up waits for its turn",
    b"catch-up begins after its wait": "catch-up begins after its wait",
    b'"the broadcast of fragment ': "a broadcast waited for memory",
    b'"a computation"': "a computation waited for memory",
    b"no room for both": "a connection made room for the next one of its learner",
    b"newer connections": "a learner has too many connections",
    b"while its older connection is alive": "two connections of a learner are alive",
}
"""Words of the log, and the rare path that they speak of."""


class Marks:
    """Watches one server process; `found` grows."""

    def __init__(self, scheduler, found: set[str]):
        self.scheduler = scheduler
        self.config = scheduler.config
        self.found = found
        self.folds: dict[int, int] = {}
        self.finals: set[int] = set()
        self.expected: dict[int, int] = {}
        self.current: list = []

    def before(self, event) -> None:
        scheduler = self.scheduler
        self.expected = {round.step: len(round.slots) for round in scheduler.gathering}
        self.current = list(scheduler.members.current)
        if isinstance(event, ev.Heartbeat) and event.learner in scheduler.members.older and (
                self.current[event.learner] is None):
            self.found.add("a late frame of the dead")
        if isinstance(event, ev.Stalled) and event.is_still:
            self.found.add("a catch-up stands still")
        if isinstance(event, ev.CaughtUp):
            current = scheduler.members.current[event.learner]
            if current is None or current.generation != event.generation:
                self.found.add("superseded tail")
        elif isinstance(event, ev.Stop) and scheduler.saves.outstanding is act.SaveKind.ROUND:
            self.found.add("signal while a step was written")
        elif isinstance(event, ev.Saved) and event.error is not None:
            self.found.add(f"not saved: {event.kind}")
        elif isinstance(event, ev.MergeDone) and event.step > scheduler.global_step + 1:
            self.found.add("merged before its turn")

    def after(self, event, actions: list) -> None:
        scheduler, saves = self.scheduler, self.scheduler.saves
        if saves.wanted is not None and saves.in_background:
            self.found.add("background save waited for")
        ready = scheduler.rounds.get(scheduler.global_step + 1)
        if ready is not None and ready.state == RoundState.READY and saves.outstanding:
            self.found.add("commits held for a save")
        if isinstance(event, ev.Disconnected) and self.config.quorum_capacity is not None and any(
                len(round.slots) < self.expected.get(round.step, 0)
                for round in scheduler.gathering):
            self.found.add("capacity shrink")
        for action in actions:
            name = f"on_{type(action).__name__.lower()}"
            if hasattr(self, name):
                getattr(self, name)(action)

    def on_log(self, action) -> None:
        reason = action.fields.get("reason", action.text)
        self.found.add(reason)
        if reason == "older connection is current again" and self.current[action.fields["learner"]]:
            self.found.add("a mute connection gave way")
            if self.current[action.fields["learner"]].stalled:
                self.found.add("a connection that takes nothing gave way")
        if reason == "rebound outstanding pull" and (
                action.fields["learner"], action.fields["died"]) in self.scheduler.members.members:
            self.found.add("a silent connection gave its slot away")
        if reason is act.PushRefusal.STALE_BASE and self.config.fold == "exact":
            self.found.add("stale push under an exact fold")
        if "new attempt" in reason and self.config.fold != "batch":
            self.found.add("a fold was not finite")
        if "new frozen-membership attempt" in reason and (
                self.scheduler.rounds[action.fields["step"]].carried):
            self.found.add("carried delta survives a relaunch")

    def on_record(self, action) -> None:
        fields = action.fields
        self.found.update(f"tape {key}" for key in ("carried", "excluded", "released", "joined")
                          if key in fields)
        if "responded" in fields:
            pushed = {entry["id"] for entry in fields["responders"]}
            if not set(fields["responded"]) <= pushed:
                self.found.add("carry answers")

    def on_openfold(self, action) -> None:
        if self.folds.get(action.step) == action.attempt:
            self.found.add("exact fold rebuilt")
        self.folds[action.step] = action.attempt

    def on_startmerge(self, action) -> None:
        """Why did it close?"""
        round = self.scheduler.rounds[action.step]
        if round.answered >= len(round.slots):
            return
        due = self.scheduler.now_ns >= round.grace_deadline_ns
        self.found.add("grace ran out" if due else "soft deadline")

    def on_sendfinal(self, action) -> None:
        if action.learner in self.finals:
            self.found.add("final cut again")
        self.finals.add(action.learner)

    def on_tellfate(self, action: act.TellFate) -> None:
        self.found.add(f"fate: {action.fate.name}")

    def on_notice(self, action: act.Notice) -> None:
        self.found.add(f"notice: {action.code.name}")

    def on_close(self, action: act.Close) -> None:
        self.found.add("told off" if action.told else "closed to get the initial values again")
