"""What can happen to a run: the inputs of `Scheduler.step`.

Plain immutable data. A `payload` is an opaque handle of the driver; the scheduler gives each one
back exactly once, in `AdoptInit` or `Release`. Times are nanoseconds of the driver's clock.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from syncer.core.actions import SaveKind


class Resumed(NamedTuple):
    """Not an event: the state of a checkpoint that a new `Scheduler` starts from."""

    step: int
    fragments: int
    fingerprint: bytes
    ledger: dict[int, list[int]]
    """learner id -> [merges, steps, tokens]."""
    is_over: bool = False
    """Every step is done, and whoever started it again did not look (`--resume auto`)."""
    renumbered: int = 0
    """So many steps of `step` were never taken: the run ends so much later (rule 1.8)."""
    unsaved: bool = False
    """No file holds this cut under this step."""


class Tick(NamedTuple):
    """Time has passed; nothing else."""


class Hello(NamedTuple):
    """A HELLO passed authentication and equals the session (rule 14.1 to rule 14.5)."""

    connection: int
    """Driver's name for the connection group, until `Admit` makes it (learner, generation)."""
    learner: int
    generation: int
    fragments: int
    fingerprint: bytes = b""
    """Layout fingerprint of the session, for the tape; the first accepted HELLO fixes it."""
    kept: tuple[int, ...] = ()
    """Of each fragment the version of this run that its learner has to the bit, -1 for none; () of
    one that has not said."""
    wants_fates: bool = False
    """It asks to be told what becomes of its pushes (rule 19.1)."""


class Misfit(NamedTuple):
    """A HELLO was refused because it is not of the session that was resumed (rule 14.5)."""

    text: str
    """Of its ERROR: what was expected, and what came."""


class NoRoom(NamedTuple):
    """The first accepted HELLO is of a layout whose files would not fit where they are to be."""

    text: str
    """Which file, how much it needs, and how much there is."""


class Broken(NamedTuple):
    """Something that was to be carried out cannot be: it raised, which is a defect of the program
    around the scheduler, or has waited too long for memory."""

    text: str


class Disconnected(NamedTuple):
    """The connection group of an admitted member is gone."""

    learner: int
    generation: int


class Init(NamedTuple):
    """A decoded, finite INIT_PARAMS fragment."""

    learner: int
    generation: int
    fragment: int
    payload: Any


class Heartbeat(NamedTuple):
    """A HEARTBEAT of an admitted member."""

    learner: int
    generation: int
    local_step: int


class Push(NamedTuple):
    """A decoded, finite PUSH_FRAGMENT that passed the checks at the connection."""

    learner: int
    generation: int
    fragment: int
    step: int
    attempt: int
    base: int
    local_step: int
    c_steps: int
    c_tokens: int
    payload: Any


class Folded(NamedTuple):
    """A worker has added a push to its fold: the payload is free.

    The fields say which `Fold` it was; `carried` is that of its contribution.
    """

    step: int
    attempt: int
    learner: int
    carried: bool = False


class BudgetDone(NamedTuple):
    """A BUDGET_DONE of an admitted member: its optimizer has taken this many steps."""

    learner: int
    generation: int
    steps: int


class CaughtUp(NamedTuple):
    """Every fragment of a catch-up was handed to the kernel once."""

    learner: int
    generation: int
    delivered: tuple[int, ...]
    """Version of each fragment that a pull comes behind: sent, or queued before it."""


class Dropped(NamedTuple):
    """A contribution that the merge went on without, since its result would not be finite."""

    position: int
    """In the contributions of the `StartMerge`."""
    element: int
    """First element of the fragment of which the result was not finite with it."""


class Stalled(NamedTuple):
    """A catch-up whose turn has begun stands still: its peer has acknowledged nothing of it for
    5 s. Or it moves again."""

    learner: int
    generation: int
    is_still: bool = True


class MergeDone(NamedTuple):
    """A worker finished `StartMerge`: the result waits, unpublished, under its step."""

    step: int
    compute_ns: int
    gnorm: float
    error: str | None = None
    """Why there is no result."""
    dropped: tuple[Dropped, ...] = ()
    nothing_left: bool = False
    """There is none because nothing finite is left: the round may be tried again."""
    restarted: bool = False
    """The momentum alone would have made it infinite, and began anew."""


class Synced(NamedTuple):
    """The driver has carried out a `Publish` and the `Broadcast` behind it.

    One for every broadcast step; for the last step, which has no broadcast, it is not needed and
    changes nothing.
    """

    step: int
    elapsed_ns: int
    """Time from the first action of the commit to the last queued broadcast."""


class Saved(NamedTuple):
    """A `Save` ended, durable or with an error."""

    kind: SaveKind
    step: int
    error: str | None = None


class FinalAck(NamedTuple):
    """A FINAL_ACK of an admitted member."""

    learner: int
    generation: int
    step: int


class Stop(NamedTuple):
    """The first SIGTERM or SIGINT."""

    signal: int


Event = (
    Tick | Hello | Misfit | NoRoom | Broken | Disconnected | Init | Heartbeat | Push | CaughtUp
    | Stalled | MergeDone | Synced | Saved | FinalAck | Folded | BudgetDone | Stop
)
