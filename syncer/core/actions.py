"""What the driver has to do: the outputs of `Scheduler.step`, in order.

Plain immutable data; the driver carries them out and decides nothing.
A member is (learner, generation).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple

from syncer.protocol import NoticeCode, PushFate, RunState

Member = tuple[int, int]


class SaveKind(StrEnum):
    """Why something is written; the values are the words of the log and the tape."""

    ROUND = "round"
    """A step that becomes visible only when it is durable, or version 0 before the first one."""
    PERIODIC = "periodic"
    FINAL = "final"
    FINAL_STATE = "final-state"
    """The parameters alone, into the file of --final-state: the only kind that is no checkpoint."""
    BUDGET_CUTOFF = "budget-cutoff"
    SHUTDOWN = "shutdown"
    """The last cut of a run that a signal ends."""
    FAILURE = "failure"
    """The last cut of a run that cannot go on."""


class PushRefusal(StrEnum):
    """Why a push was not merged: the field `reason` of the log line "push rejected"."""

    OUT_OF_ROUND = "OutOfRound"
    UNEXPECTED_MEMBER = "UnexpectedMember"
    FUTURE_BASE = "FutureBase"
    STALE_BASE = "StaleBase"
    DUPLICATE = "Duplicate"
    CARRY_LAG_EXCEEDED = "carry_lag_exceeded"
    """A late push that lies too many versions of its fragment behind."""
    CARRY_SUPERSEDED = "carry_superseded"
    """A late push that gives way to another one of its learner and fragment."""


class Admit(NamedTuple):
    """The connection is member (learner, generation) from now on."""

    connection: int
    learner: int
    generation: int
    state: RunState = RunState.WAITING
    """Where the run is for it."""
    step: int = 0
    kept: tuple[tuple[int, int], ...] = ()
    """(fragment, version): the current ones that it has, and is not sent (rule 3.10)."""


class Refuse(NamedTuple):
    """Answer the HELLO of this connection with ERROR `text`, then close it gracefully."""

    connection: int
    text: str


class Close(NamedTuple):
    """End a member's connection group: without an ERROR its learner dials again."""

    learner: int
    generation: int
    reason: str
    """For the log, and for the ERROR if the learner is `told`."""
    told: bool = False


class Release(NamedTuple):
    """The payload of an INIT or PUSH is not needed any more."""

    payload: Any


class AdoptInit(NamedTuple):
    """The payload becomes version 0 of the fragment."""

    fragment: int
    payload: Any


class CatchUp(NamedTuple):
    """Send every fragment that is not kept at its current version, follow commits, then report
    `CaughtUp`."""

    learner: int
    generation: int


class Pull(NamedTuple):
    """Send PULL_REQ (fragment, step, attempt) to each member."""

    members: tuple[Member, ...]
    fragment: int
    step: int
    attempt: int


class TellFate(NamedTuple):
    """Tell a member what became of its answer to the pull (fragment, step, attempt)."""

    learner: int
    generation: int
    fragment: int
    step: int
    attempt: int
    fate: PushFate


class Contribution(NamedTuple):
    """One push of a round, with the weight that is really used."""

    learner: int
    generation: int
    base: int
    c_steps: int
    c_tokens: int
    weight: float
    payload: Any
    """None in a `StartMerge` of a round whose pushes were folded one by one."""
    carried: bool = False
    """A late push of an earlier round; `weight` has the discount in it."""
    lag: int = 0
    discount: float = 1.0


class OpenFold(NamedTuple):
    """Begin this round's fold, empty; what an earlier `OpenFold` of the step held is dropped."""

    step: int
    fragment: int
    attempt: int
    learners: tuple[int, ...]
    """Ascending: the order in which an exact fold takes them."""


class Fold(NamedTuple):
    """Add a push to its round's fold, in the order of these actions; answer with `Folded`."""

    step: int
    fragment: int
    attempt: int
    contribution: Contribution


class Park(NamedTuple):
    """The payload of a late push waits for another round: keep only its bytes as received."""

    payload: Any


class Unpark(NamedTuple):
    """A parked payload has joined a round: decode it again."""

    payload: Any


class StartMerge(NamedTuple):
    """Compute the next version of a fragment on a worker; answer with `MergeDone`."""

    step: int
    fragment: int
    base: int
    contributions: tuple[Contribution, ...]
    """Ascending (learner, generation); a carried push before the learner's own of this round."""


class Publish(NamedTuple):
    """The computed result of this step becomes the current version of its fragment."""

    step: int
    fragment: int


class Broadcast(NamedTuple):
    """Queue the fragment's current version to each member; after a `Publish`, answer `Synced`."""

    version: int
    fragment: int
    members: tuple[Member, ...]


class Save(NamedTuple):
    """Write to disk, off the loop's thread; answer with `Saved`. One at a time.

    The cut of `step`: all published versions, and for `SaveKind.ROUND` the computed result of that
    step, which is not published yet.
    """

    kind: SaveKind
    step: int
    ledger: dict[int, tuple[int, int, int]] = {}  # noqa: RUF012 (never changed)
    """learner id -> (merges, steps, tokens), each at most 2^64 - 1, in the cut."""
    background: bool = False
    """Rounds go on meanwhile: each version may be let go as soon as it is written."""


class Hasten(NamedTuple):
    """The `Save` in the background that is under way gives way to the rounds no longer."""

    step: int
    """Of its cut."""


class SendFinal(NamedTuple):
    """Send FINAL_FRAGMENT of every fragment, then FINAL_MANIFEST."""

    learner: int
    generation: int
    step: int


class SendShutdown(NamedTuple):
    """Send SHUTDOWN to each member."""

    members: tuple[Member, ...]


class Notice(NamedTuple):
    """Tell each member what it or the run waits for, if its connection can carry that."""

    members: tuple[Member, ...]
    code: NoticeCode
    text: str
    """One line, at most 1 KiB."""


class Log(NamedTuple):
    """One log line: a level of the logging module ("INFO", "WARNING" …), a text, and fields."""

    level: str
    text: str
    fields: dict[str, Any]


class Record(NamedTuple):
    """One record of the event tape, keys in the order in which readers know them."""

    fields: dict[str, Any]


class Exit(NamedTuple):
    """Flush what is queued, then end the process with this status; `text` goes to the log."""

    status: int
    text: str


Action = (
    Admit | Refuse | Close | Release | AdoptInit | CatchUp | Pull | TellFate | OpenFold | Fold
    | Park | Unpark | StartMerge | Publish | Broadcast | Save | Hasten | SendFinal | SendShutdown
    | Notice | Log | Record | Exit
)
