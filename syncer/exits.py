"""Exit statuses of a server run: one name, one number and one sentence each.

Must not do anything but name them, and import nothing of the package: every room may ask.
"""

from __future__ import annotations

from enum import IntEnum

SIGNALLED = 128


class Exit(IntEnum):
    """How a server process ended. A member is its number; `meaning` is the sentence of the docs."""

    DONE = 0, ("trained, and every awaited learner acknowledged the final cut; or it was trained "
               "before (`--resume auto`); or a learner budget was spent and its checkpoint is "
               "written")
    FAILED = 1, ("the run failed: a learner did not acknowledge the final cut or report its budget "
                 "in time, nobody was left at the end, nothing finite was left to merge, a stale "
                 "push with `--max-base-lag 0`, the final state could not be written, or a defect "
                 "of the program")
    UNUSABLE = 2, "a flag, variable, file or path cannot be used; nothing was bound"
    NOT_BINDABLE = 3, "the address is in use or cannot be listened on"
    NOT_RESUMABLE = 4, ("the checkpoint of `--resume` cannot be used; one is there, and neither "
                        "`--resume` nor `--overwrite` was given; or, with `--max-base-lag 0`, a "
                        "learner of another session came before the start")
    NOT_WRITTEN = 5, ("a checkpoint could not be written that had to be "
                      "(`--on-checkpoint-error`), its directory was not there with "
                      "`--resume auto`, or a mark of an end that is none any more could not be "
                      "removed")
    NEVER_STARTED = 6, "`--start-learners` were not there before `--start-timeout-s`"
    HUNG_UP = SIGNALLED + 1, "ended by SIGHUP: its terminal was closed (not with TLS, docs/tls.md)"
    INTERRUPTED = SIGNALLED + 2, "ended by SIGINT"
    TERMINATED = SIGNALLED + 15, "ended by SIGTERM"

    meaning: str

    def __new__(cls, number: int, meaning: str) -> Exit:
        member = int.__new__(cls, number)
        member._value_ = number
        member.meaning = meaning
        return member


NO_FAILURES = (Exit.DONE, Exit.HUNG_UP, Exit.INTERRUPTED, Exit.TERMINATED)
"""What a run that went as people asked ends with."""


def after_signal(number: int) -> int:
    """Status of a run that this signal ended, as a shell names it: 128 + number."""
    return SIGNALLED + number


def markdown_table() -> str:
    """The table of the docs, one row per status."""
    rows = ["| status | meaning |", "|---|---|"]
    return "\n".join([*rows, *(f"| {status} | {status.meaning} |" for status in Exit)]) + "\n"
