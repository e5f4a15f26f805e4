"""Sentences about waits: for whom or what, until when, and what can be done.

Only ids, counts and names of settings are in them, nothing that a peer has written; each is a
line of less than 1 KiB whatever the numbers (rule 16.3). Must not decide whether to say them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from syncer.core.run.phases import Phase

LISTED_MAX = 8
"""Ids in one list; of more the rest is counted."""
NO_LIMIT = "without a limit"


class Whereabouts(NamedTuple):
    """The learners that something waits for, ascending, by where they are."""

    gone: Sequence[int] = ()
    """Not connected."""
    held: Sequence[int] = ()
    """Connected, and not yet sent the whole model."""
    there: Sequence[int] = ()
    """Connected and up to date."""

    @property
    def all(self) -> list[int]:
        return sorted([*self.gone, *self.held, *self.there])

    def advice(self, silence: str) -> str:
        """What can be done, or is going on. silence: about those who are there."""
        parts = []
        if self.gone:
            them = "it" if len(self.gone) == 1 else "them"
            parts.append(f"{ids(self.gone)} {are(self.gone)} not connected: start {them} again")
        if self.held:
            parts.append(f"{ids(self.held)} {are(self.held)} being sent the model")
        if self.there:
            parts.append(f"{ids(self.there)} {are(self.there)} connected: {silence}")
        return "; ".join(parts)


def ids(learners: Sequence[int]) -> str:
    """`learner 3`, `learners 3, 7 and 9`, `learners 0, 1, 2, 3, 4, 5, 6, 7 and 12 more`."""
    if len(learners) < 2:
        return f"learner {learners[0]}" if learners else "nobody"
    if len(learners) > LISTED_MAX:
        shown = ", ".join(map(str, learners[:LISTED_MAX]))
        return f"learners {shown} and {len(learners) - LISTED_MAX} more"
    return f"learners {', '.join(map(str, learners[:-1]))} and {learners[-1]}"


def are(learners: Sequence[int]) -> str:
    return "is" if len(learners) == 1 else "are"


def seconds(left_ns: int) -> str:
    """Whole seconds, none of them promised too few."""
    return f"{max(-(-left_ns // 10**9), 0)} s"


def at_most(left_ns: int | None, flag: str) -> str:
    """How long something is waited for; None: no flag sets a limit."""
    return NO_LIMIT + f" ({flag} sets one)" if left_ns is None else (
        f"{seconds(left_ns)} more ({flag})")


THEN = {
    Phase.WAITING: "the run has not begun, and", Phase.RUNNING: "the next merge",
    Phase.SAVING: "every step is merged; the final cut", Phase.CUTOFF: "the end of the run",
    Phase.STOPPING: "the run is stopping (a second signal ends it at once), and",
}
"""What comes after a write, by the phase that waits for it."""


# ---- before the start --------------------------------------------------------------------------

def learners_missing(gone: Sequence[int], here: int, needed: int) -> str:
    """Who is missing for a start."""
    more = needed - here
    who = ids(gone) if more == len(gone) else f"{more} of {ids(gone)}"
    return f"{here} of {needed} learners are here, {who} {are([0] * more)} missing"


def start_waits_for_learners(missing: str, left_ns: int | None, all_needed: bool) -> str:
    """`missing` as `learners_missing` has it."""
    fewer = "; --start-learners begins with fewer" if all_needed else ""
    return (f"the run has not begun: {missing}; it waits "
            f"{at_most(left_ns, '--start-timeout-s')}; start who is missing{fewer}")


def values_missing(fragments: int, here: int, learner_0: bool) -> str:
    """That initial values are missing, and what to do; learner_0: whether it is connected."""
    what = (f"the initial values of learner 0 are missing ({here} of {fragments} fragments are "
            "here), and no checkpoint was resumed that has them")
    if not learner_0:
        return f"{what}; learner 0 is not connected: start it, it brings them"
    return (f"{what}; learner 0 is connected, but who has trained before does not give them again: "
            "start this server with the --checkpoint-path of that run and --resume auto, or start "
            "learner 0 anew to begin with its parameters")


def start_waits_for_values(missing: str, left_ns: int | None) -> str:
    """`missing` as `values_missing` has it."""
    return f"the run has not begun, and waits {at_most(left_ns, '--start-timeout-s')}: {missing}"


# ---- rounds ------------------------------------------------------------------------------------

def answers(step: str, who: Whereabouts, answered: str, needs: str, until: str) -> str:
    """A round that gathers. step: with its attempt; answered: how many, of how many."""
    missing = who.all
    what = f"answers of {ids(missing)}" if missing else "more learners than have answered"
    advice = who.advice("see what keeps its step from ending" if len(who.there) == 1 else
                        "see what keeps their steps from ending")
    return "; ".join(filter(None, (
        f"step {step} waits for {what}: {answered} are in, {needs}", until, advice)))


def launch(step: int, who: Whereabouts, everybody: bool) -> str:
    """Nobody is there to launch a round to, or not everybody."""
    needs = "all learners of a fixed roster must be" if everybody else "a learner must be"
    return (f"step {step} cannot begin: {needs} connected and up to date; waiting for "
            f"{ids(who.all)}, {NO_LIMIT}; {who.advice('')}")


def until_here(needed: int) -> str:
    """Too few are there for a new attempt."""
    return f"it waits until {needed} learners are here, {NO_LIMIT}" if needed > 1 else (
        f"it waits until a learner is here, {NO_LIMIT}")


def merge(step: int) -> str:
    """A round that is computed."""
    return (f"step {step} is being merged, {NO_LIMIT}; if this is usual here, more threads "
            "(--merge-threads) or more fragments shorten it")


def file(kind: str, step: int, then: str) -> str:
    """A write that something waits for; then: what follows it."""
    what, flag = f"checkpoint ({kind})", "--checkpoint-path"
    if kind == "final-state":
        what = flag = "--final-state"
    return (f"{then} waits until the {what} of step {step} is written, {NO_LIMIT}; look at the "
            f"disk of {flag}")


# ---- the end -----------------------------------------------------------------------------------

def acknowledgements(who: Whereabouts, left_ns: int) -> str:
    """The final cut is out."""
    return (f"every step is merged; the final parameters wait to be acknowledged by "
            f"{ids(who.all)}, {at_most(left_ns, '--final-ack-timeout-s')}; "
            f"{who.advice('call finish, which acknowledges them')}")


def reports(who: Whereabouts, left_ns: int) -> str:
    """A learner budget is spent, and not everybody has said so."""
    return (f"a learner budget is spent; the run waits for the reports of {ids(who.all)}, "
            f"{at_most(left_ns, '--quorum-timeout-s')} unless they show progress; "
            f"{who.advice('they make the steps that they have left')}")
