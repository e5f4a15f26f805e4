"""Section 16 of the rules a second time, as far as it can be told from outside: every wait that has
lasted is said, and none too often.

Knows what a run waits for by phase, rounds and members, never by asking the scheduler what it has
said. Must not change anything.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from syncer.core import actions as act
from syncer.core.rounds.round import RoundState
from syncer.core.run.phases import Phase

SECOND = 10**9
SAID_AFTER = 5 * SECOND
SAID_AGAIN = 30 * SECOND
LOG = "the run waits"


class WaitsCheck:
    """Follows one process."""

    def __init__(self, scheduler: Any):
        self.scheduler = scheduler
        self.wait: Hashable = None
        self.since_ns = 0
        self.said: dict[Hashable, int] = {}
        """When each wait was last said."""
        self.last: tuple[Hashable, int, set[int]] = None, 0, set()
        """The newest line: its wait, when it was written, whose answers were missing."""
        self.late_ns: int | None = None
        """Since when it should have been said, or is due earlier, by an estimate that shrank."""
        self.latest = 0
        """When it had to be said, as things were after the last event."""
        self.launched: dict[int, int] = {}
        """Of each open round, when its first attempt began."""

    def look(self, actions: list[act.Action]) -> None:
        """After every event: what it led to."""
        scheduler, now_ns = self.scheduler, self.scheduler.now_ns
        self.launched = {step: self.launched.get(step, now_ns) for step in scheduler.rounds}
        wait = self.found()
        if wait != self.wait:
            self.wait, self.since_ns, self.late_ns, self.latest = wait, now_ns, None, 0
        lines = [action for action in actions if type(action) is act.Log and action.text == LOG]
        notices = [action for action in actions if type(action) is act.Notice]
        for notice in notices:
            self.check_notice(notice)
        if lines:
            self.check_line(lines, notices)
        elif wait is not None:
            assert now_ns < self.due_ns(), f"16.2: {wait} since {self.since_ns} is not said"
        assert wait is None or scheduler.deadline_ns() <= self.due_ns(), f"16.2: {wait} sleeps"

    def check_line(self, lines: list[act.Log], notices: list[act.Notice]) -> None:
        """16.2, 16.3: it is time to say it, and everybody hears of it."""
        now_ns, scheduler, who = self.scheduler.now_ns, self.scheduler, self.who()
        assert len(lines) == 1, f"16.1: a run waits for one thing at a time: {lines}"
        assert self.wait is not None, f"{lines} although nothing is waited for"
        key = self.group(self.wait)
        assert now_ns >= self.since() + SAID_AFTER, f"16.2: {self.wait} is said too early"
        before, said_ns, of_whom = self.last
        assert before != key or now_ns >= said_ns + SAID_AGAIN or not of_whom.issuperset(who) or (
            said_ns <= self.since_ns and key != "answers"), f"16.2: {self.wait} is said too often"
        self.last = key, now_ns, set(who)
        self.said[key] = now_ns
        current = tuple(member.key for member in scheduler.members.current if member is not None)
        told = [notice.members for notice in notices]
        assert told == [current][:len(current)], f"16.3: {notices}"
        for learner in who[:8]:
            assert str(learner) in lines[0].fields["what"], f"16.3: {learner} is not in {lines}"

    def check_notice(self, notice: act.Notice) -> None:
        """16.3: short, on one line, and to those who are there."""
        assert len(notice.text.encode()) <= 1024, notice
        assert notice.text.isprintable(), notice
        for key in notice.members:
            assert key in self.scheduler.members.members, f"16.3: {key} is not there"

    def due_ns(self) -> int:
        """When the wait must have been said at the latest. An estimate of a learner's steps may
        have shrunk, or gone with it: that is looked at every 5 s."""
        key, now_ns = self.group(self.wait), self.scheduler.now_ns
        before_ns, self.latest = self.latest, self.latest_ns(key)
        is_late = self.latest <= now_ns >= self.since() + SAID_AFTER
        if key != "answers":
            self.late_ns = None
        elif is_late or self.latest < before_ns:
            self.late_ns = now_ns if self.late_ns is None else self.late_ns
        elif self.latest > before_ns or (self.late_ns and now_ns >= self.late_ns + SAID_AFTER):
            self.late_ns = None
        if self.late_ns is None:
            return self.latest
        return max(self.latest, self.late_ns + SAID_AFTER)

    def latest_ns(self, key: Hashable) -> int:
        if key in self.said and (key == "answers" or self.said[key] > self.since_ns):
            return max(self.said[key] + SAID_AGAIN, self.since() + self.patience_ns())
        return self.since() + self.patience_ns()

    def patience_ns(self) -> int:
        """5 s, or for answers two steps of the slowest, if that is known to be more."""
        round = self.round()
        if round is None or round.state != RoundState.GATHERING:
            return SAID_AFTER
        slowest = max((round.slots[learner].member.step_time_s for learner in self.who()),
                      default=0)
        return max(SAID_AFTER, int(2 * max(slowest, 0) * SECOND))

    def round(self) -> Any:
        """The round that commits next, if the run is under way."""
        scheduler = self.scheduler
        if scheduler.phase is not Phase.RUNNING:
            return None
        return scheduler.rounds.get(scheduler.global_step + 1)

    def since(self) -> int:
        """When the wait began; that for answers with the launch."""
        if self.group(self.wait) == "answers":
            return self.launched[self.scheduler.global_step + 1]
        return self.since_ns

    def who(self) -> tuple[int, ...]:
        """Whose answers are missing, when that is what is waited for."""
        round = self.round()
        if round is None or round.state != RoundState.GATHERING:
            return ()
        carries = self.scheduler.policy.carry_answers_round
        return tuple(sorted(
            learner for learner, slot in round.slots.items()
            if slot.push is None and not (carries and learner in round.carried)))

    @staticmethod
    def group(wait: Hashable) -> Hashable:
        """Answers are one wait over all rounds, as long as they are those of the same learners."""
        return "answers" if isinstance(wait, tuple) and wait[0] == "answers" else wait

    def found(self) -> Hashable:
        """What the run waits for; None for nothing."""
        scheduler, phase = self.scheduler, self.scheduler.phase
        if scheduler.lingers:                     # 12.8: whoever comes is served, nobody has to
            return None
        if phase is Phase.RUNNING:
            return self.found_running()
        if phase is Phase.WAITING and scheduler.saves.outstanding is None:
            if scheduler.members.current_count < scheduler.policy.start_learners:
                return "learners"
            return "values", scheduler.members.current[0] is not None
        reports = phase is Phase.CUTOFF and scheduler.budget.leases
        return {Phase.ENDED: None, Phase.FINISHING: "acknowledgements"}.get(
            phase, "reports" if reports else ("write", scheduler.saves.step))

    def found_running(self) -> Hashable:
        scheduler, policy = self.scheduler, self.scheduler.policy
        round, step = self.round(), scheduler.global_step + 1
        if round is None:
            needed = policy.learners if policy.fixed_roster else 1
            return ("launch", step) if scheduler.members.launchable_count < needed else None
        return {RoundState.GATHERING: ("answers", step), RoundState.COMPUTING: ("merge", step),
                RoundState.READY: ("write", scheduler.saves.step)}[round.state]
