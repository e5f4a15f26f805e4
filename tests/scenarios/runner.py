"""Plays a scenario file against the scheduler and writes it anew with what happened.

A file is a conversation: settings, then inputs, each followed by the actions it led to (indented).

    config learners=2 quorum=2           settings of the run (tests.toy_driver.toy_config)
    fragments 2                          how many; each is one number
    resume 5 of 0 2                      start from a checkpoint of this step, to which these
                                         learners have contributed (resume 5: nobody); with
                                         `resume=auto` among the settings as a supervisor does
    resume 12 plus 8 of 0                the same; 8 of these steps were added, and no file has it
    merges by hand                       a merge waits for `merged`; otherwise it ends at once
    folds by hand                        each push waits for `folded` until it is in its fold
    at 0 hello 0.1                       at 0 ms, learner 0 connects as generation 1; also:
                                         kept=[5 2], and `fates` to be told those of its pushes
    at 0 init 0.1 p0 10                  version 0 of fragment 0 is 10
    at 5 push 0.1 t1 -2                  delta -2 for step 1; also: attempt=2 base=3 p=1 local=9
                                         steps=4 tokens=400
    at 5 heartbeat 0.1 local=7
    at 6 gone 0.1                        its connection ends
    at 9 caughtup 0.2 [5 2]              catch-up done; without [..]: the current versions
    at 9 stalled 0.2 [moves]             of its catch-up nothing is taken for 5 s; or it moves again
    at 9 merged t2 [error words]         only with `merges by hand`; also: drop=1:7,0:7 (the
                                         second contribution is left out, for element 7, then the
                                         first) and `again` (nothing finite is left)
    at 9 folded t2 1                     only with `folds by hand`: the next one, of learner 1
    at 9 ack 0.1 t2
    at 9 saved [error words]
    at 9 budget 0.1 100                  BUDGET_DONE with this many steps
    at 9 misfit some words               a HELLO of another session than the resumed one came
    at 9 no_room some words              the files of a run of this layout would not fit
    at 9 broken some words               the program has a defect
    at 9 stop 15
    until 900000                         let time pass

Lines `at N (…)` and indented lines are output: `(timer)` is a due deadline, `(merged)` and
`(synced)` are the driver's own answers. Timers fire before other events of the same instant.
"""

from __future__ import annotations

import re
from pathlib import Path

from syncer.core import actions as act
from syncer.core import events as ev
from tests.toy_driver import MS, ToyDriver, toy_config

FILES = sorted(Path(__file__).parent.glob("*.txt"))
QUIET_FIELDS = {"outer step", "learner connected", "learner disconnected"}
SETTINGS = ("config", "fragments", "merges", "folds", "resume")


def rewrite(text: str) -> str:
    """The scenario with its outputs as the scheduler gives them now."""
    return Scenario(text).play()


class Scenario:
    """One file: parsed inputs, and the lines written while they are played."""

    def __init__(self, text: str):
        self.lines = [line.rstrip() for line in text.splitlines()]
        self.settings: dict = {}
        self.fragments = 1
        self.by_hand: set[str] = set()
        self.resumed = None
        for line in self.lines:
            if line.startswith(SETTINGS):
                self.setting(line)
        if self.resumed is not None:
            step, added, ids = self.resumed
            ledger = {learner: [1, 1, 1] for learner in ids}
            is_over = (self.settings.get("resume") == "auto"
                       and step >= self.settings["total_steps"])
            self.resumed = ev.Resumed(step, self.fragments, bytes(32), ledger, is_over,
                                      added, added > 0)
        self.driver = ToyDriver(toy_config(**self.settings), self.fragments, self.resumed)
        self.now_ms = 0.0
        self.written: list[str] = []

    def setting(self, line: str):
        word, rest = line.split(maxsplit=1)
        if word == "config":
            for pair in rest.split():
                key, value = pair.split("=")
                self.settings[key] = setting_value(value)
        elif word == "fragments":
            self.fragments = int(rest)
        elif word == "resume":
            steps, _, ids = rest.partition(" of ")
            step, _, added = steps.partition(" plus ")
            self.resumed = int(step), int(added or 0), [int(learner) for learner in ids.split()]
        else:
            assert rest == "by hand", line
            self.by_hand.add(word)

    def play(self) -> str:
        for line in self.lines:
            if line.startswith("  ") or re.match(r"at \S+ \(", line):
                continue
            if line.startswith("at "):
                _, at_ms, rest = line.split(maxsplit=2)
                self.pass_time(float(at_ms))
                self.written.append(line)
                self.feed(self.event(rest))
            elif line.startswith("until "):
                self.pass_time(float(line.split()[1]))
                self.written.append(line)
            else:
                self.written.append(line)
        return "\n".join(self.written).rstrip("\n") + "\n"

    def pass_time(self, until_ms: float):
        """Fire every timer that is due up to this moment."""
        assert until_ms >= self.now_ms, "a scenario's time runs forward"
        for _ in range(100_000):
            due = self.driver.scheduler.deadline_ns()
            if due is None or due > until_ms * MS:
                break
            self.now_ms = due / MS
            self.feed(ev.Tick(), "(timer)")
        else:
            raise AssertionError("timers fire without end")
        self.now_ms = until_ms

    def feed(self, event, own: str | None = None):
        """Hand over an event; `own` names one that the driver itself caused."""
        actions = self.driver.feed(round(self.now_ms * MS), event)
        shown = [text for action in actions for text in self.describe(action)]
        if own is not None and shown:
            self.written.append(f"at {self.now_ms:g} {own}")
        self.written += ["  " + text for text in shown]
        while self.driver.to_sync:
            step = self.driver.to_sync.pop(0)
            self.feed(ev.Synced(step, 0), f"(synced t{step})")
        while self.driver.to_fold and "folds" not in self.by_hand:
            folded = self.driver.to_fold.pop(0)
            self.feed(folded, f"(folded t{folded.step} {folded.learner})")
        while self.driver.merging and "merges" not in self.by_hand:
            step = min(self.driver.merging)
            self.feed(ev.MergeDone(step, 0, 1.0), f"(merged t{step})")

    # ---- inputs --------------------------------------------------------------------------------

    def event(self, text: str):
        word, *rest = text.split()
        if word in ("stop", "tick"):
            return ev.Stop(int(rest[0])) if word == "stop" else ev.Tick()
        if word in ("misfit", "no_room", "broken"):
            kind = {"misfit": ev.Misfit, "no_room": ev.NoRoom, "broken": ev.Broken}[word]
            return kind(" ".join(rest))
        if word == "saved":
            return ev.Saved(self.driver.saving, self.driver.scheduler.global_step, words(rest))
        if word == "merged":
            return merged(int(rest[0][1:]), rest[1:])
        if word == "folded":
            folded = self.driver.to_fold.pop(0)
            assert rest == [f"t{folded.step}", str(folded.learner)], f"the next one is {folded}"
            return folded
        learner, generation = map(int, rest.pop(0).split("."))
        return getattr(self, word)(learner, generation, rest)

    def hello(self, learner, generation, rest):
        wants_fates = rest[-1:] == ["fates"]
        kept = " ".join(rest[:-1] if wants_fates else rest).removeprefix("kept=").strip("[]")
        return self.driver.hello(learner, generation, tuple(map(int, kept.split())), wants_fates)

    def gone(self, learner, generation, rest):
        assert not rest
        return ev.Disconnected(learner, generation)

    def init(self, learner, generation, rest):
        return self.driver.init(learner, generation, int(rest[0][1:]), float(rest[1]))

    def heartbeat(self, learner, generation, rest):
        return ev.Heartbeat(learner, generation, int(rest[0].removeprefix("local=")))

    def push(self, learner, generation, rest):
        names = {"p": "fragment", "local": "local_step", "steps": "c_steps", "tokens": "c_tokens"}
        given = dict(pair.split("=") for pair in rest[2:])
        options = {names.get(key, key): int(value) for key, value in given.items()}
        return self.driver.push(learner, generation, int(rest[0][1:]), float(rest[1]), **options)

    def caughtup(self, learner, generation, rest):
        event = self.driver.caught_up(learner, generation)
        if rest:
            versions = tuple(map(int, " ".join(rest).strip("[]").split()))
            event = event._replace(delivered=versions)
        return event

    def stalled(self, learner, generation, rest):
        return ev.Stalled(learner, generation, rest != ["moves"])

    def budget(self, learner, generation, rest):
        return ev.BudgetDone(learner, generation, int(rest[0]))

    def ack(self, learner, generation, rest):
        return ev.FinalAck(learner, generation, int(rest[0][1:]))

    # ---- outputs -------------------------------------------------------------------------------

    def describe(self, action) -> list[str]:
        """An action in words; nothing for what only repeats the line before."""
        kind = type(action)
        if kind is act.Record:
            return [describe_record(action.fields)]
        if kind is act.Log:
            level = "" if action.level == "INFO" else f"{action.level} "
            fields = "" if action.text in QUIET_FIELDS else "".join(
                f" {key}={value}" for key, value in action.fields.items())
            return [f"log {level}{action.text}{fields}"]
        return [self.DESCRIBE[kind](self, action)]

    DESCRIBE = {  # noqa: RUF012
        act.Admit: lambda s, a: f"admit {a.learner}.{a.generation}" + (
            f" {a.state.name.lower()} at t{a.step}, kept {[p for p, _ in a.kept]}"
            if a.kept else ""),
        act.Refuse: lambda s, a: f"refuse connection {a.connection}: {a.text}",
        act.Close: lambda s, a: (
            f"{'tell off' if a.told else 'close'} {a.learner}.{a.generation}: {a.reason}"),
        act.Release: lambda s, a: f"release {a.payload}",
        act.AdoptInit: lambda s, a: f"adopt p{a.fragment} = {a.payload.value:g}",
        act.CatchUp: lambda s, a: f"catch-up {a.learner}.{a.generation}",
        act.Pull: lambda s, a: (
            f"pull t{a.step} p{a.fragment} attempt {a.attempt} -> {members(a.members)}"),
        act.TellFate: lambda s, a: (
            f"tell {a.learner}.{a.generation} t{a.step} p{a.fragment} attempt {a.attempt}: "
            f"{a.fate.name.lower()}"),
        act.StartMerge: lambda s, a: (
            f"merge t{a.step} p{a.fragment} on v{a.base}: "
            + ", ".join(map(contribution, a.contributions))),
        act.OpenFold: lambda s, a: (
            f"open fold t{a.step} attempt {a.attempt} for {list(a.learners)}"),
        act.Fold: lambda s, a: f"fold t{a.step}: {contribution(a.contribution)}",
        act.Park: lambda s, a: f"park {a.payload}",
        act.Unpark: lambda s, a: f"unpark {a.payload}",
        act.Publish: lambda s, a: (
            f"publish t{a.step} p{a.fragment} = {s.driver.values[a.fragment]:g}"),
        act.Broadcast: lambda s, a: f"broadcast p{a.fragment} v{a.version} -> {members(a.members)}",
        act.Save: lambda s, a: f"save {a.kind} t{a.step}",
        act.Hasten: lambda s, a: f"hasten the save of t{a.step}",
        act.SendFinal: lambda s, a: f"final cut t{a.step} -> {a.learner}.{a.generation}",
        act.Notice: lambda s, a: f"notice {a.code.value} -> {members(a.members)}",
        act.SendShutdown: lambda s, a: f"shutdown -> {members(a.members)}",
        act.Exit: lambda s, a: f"exit {a.status}: {a.text}",
    }


def merged(step: int, rest: list[str]) -> ev.MergeDone:
    dropped = []
    if rest and rest[0].startswith("drop="):
        pairs = rest.pop(0).removeprefix("drop=").split(",")
        dropped = [ev.Dropped(*map(int, pair.split(":"))) for pair in pairs]
    restarted, again = (bool(rest) and rest[0] == word and bool(rest.pop(0))
                        for word in ("restarted", "again"))
    return ev.MergeDone(step, 0, 1.0, words(rest), tuple(dropped), again, restarted)


def contribution(c: act.Contribution) -> str:
    who = f"{c.learner}.{c.generation} (folded)" if c.payload is None else str(c.payload)
    return who + (" carried" if c.carried else "") + f" weight {c.weight:g}"


def describe_record(fields: dict) -> str:
    """A tape record, the parts that differ from run to run."""
    if "event" in fields:
        return "tape " + " ".join(f"{key}={value}" for key, value in fields.items())
    ids = {"responded", "missed_grace"} | {"released", "joined", "failed_saves"} & fields.keys()
    if "excluded" in fields:
        fields = {**fields, "excluded": [
            f"{x['id']}.{x['generation']} of attempt {x['attempt']} for element {x['element']}"
            for x in fields["excluded"]]}
        ids.add("excluded")
    if "carried" in fields:
        fields = {**fields, "carried": [f"{c['id']} lag {c['lag']} discount {c['discount']:g}"
                                        for c in fields["carried"]]}
        ids.add("carried")
    shown = [f"step={fields['step']}", f"attempt={fields['attempt']}",
             f"base={fields['launch_base_version']}",
             "expected=" + members((m["id"], m["generation"]) for m in fields["expected_members"])]
    shown += [f"{key}={fields[key]}" for key in fields if key in ids]
    shown += [f"{key}={fields[key]:g}" for key in ("quorum_ms", "grace_ms")
              if fields[key] is not None]
    return "tape " + " ".join(shown)


def members(found) -> str:
    return ",".join(f"{learner}.{generation}" for learner, generation in found) or "nobody"


def words(rest: list[str]) -> str | None:
    return " ".join(rest) or None


def setting_value(text: str):
    """`3`, `0.5`, `on`, `none`, `0:1,2:0.5` (a value per learner), or a word."""
    if ":" in text:
        pairs = (pair.split(":") for pair in text.split(","))
        return tuple((int(key), setting_value(value)) for key, value in pairs)
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"none": None, "on": True}.get(text, text)
