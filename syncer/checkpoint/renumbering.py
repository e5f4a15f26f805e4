"""By how much the steps of a resumed run are raised, so that no step is given twice.

rule 1.8. A server that saves every N-th step and dies has broadcast steps that are in no file. Its
    learners know them: one that gets an older number drops it, and one that gets the same number
    with other bytes ends. So a run that goes on from a file which may be behind gives out numbers
    that nobody can have seen: 1,000 N is far more than a process can be ahead of its file, since
    a save that fails is told and tried again at the next N-th step.

Must not raise anything, nor read a file.
"""

from __future__ import annotations

from typing import NamedTuple

from syncer.checkpoint.epoch_file import EpochFile
from syncer.checkpoint.facts import Facts
from syncer.errors import CheckpointMismatch

SAVES_MISSED_MAX = 1000
"""So many saves in a row may have failed."""
LAST_STEP_MAX = 2**63 - 1


class Raise(NamedTuple):
    """By how much, and what it does to the end."""

    by: int
    """Added to the step of the file; a multiple of the number of fragments."""
    renumbered: int
    """The sum of all that was ever added: the run ends so many steps later than it was told."""


# rule 1.8
def may_be_behind(facts: Facts, beside: EpochFile | None, every: int, total_steps: int) -> bool:
    """Whether more may have been broadcast than the file holds.

    every: of the process that wrote it. A file without an epoch and nothing beside it is of a
    program that promised nothing: it is resumed as it is. Of one whose writer has sent changes no
    version was broadcast as it is, however that ended (rule 18.5).
    """
    if facts.lineage.epoch == 0 and beside is None:
        return False
    is_clean = beside is not None and beside.clean == facts.step
    ahead = every >= 2 and not is_clean
    return (ahead or facts.lineage.sends_changes) and not at_end(facts, total_steps)


def at_end(facts: Facts, total_steps: int) -> bool:
    """Whether no step is left: step T is never broadcast, so nobody can have seen more."""
    return facts.step - facts.lineage.renumbered >= total_steps


def scant_raise(facts: Facts, beside: EpochFile | None, every: int, room: int,
                wanted: int | None) -> int:
    """What to add where the end comes before `raise_of`: enough for a process whose saves have all
    gone well but one; 0 where there is no room for that either, or an operator has said how much.
    """
    if wanted is not None:
        return 0
    fragments = len(facts.versions)
    every = every if beside is None else beside.every
    least = -(-(2 * every + fragments) // fragments) * fragments
    return least if least <= room else 0


def raise_of(facts: Facts, beside: EpochFile | None, *, every: int, total_steps: int,
             wanted: int | None = None) -> Raise:
    """What a run that is resumed from the file of these facts has to add.

    every: of this process, for a file that does not say. wanted: J as an operator asks for it, 0
    for none. Raises `CheckpointMismatch` where the sum cannot be.
    """
    fragments, before = len(facts.versions), facts.lineage.renumbered
    # a process that died before its first save has given out numbers above its own sum already
    owed = 0 if beside is None else max(0, beside.renumbered - before)
    if beside is not None:
        every = beside.every
    least = 0
    if wanted is not None:
        least = 0 if at_end(facts, total_steps) else wanted
    elif may_be_behind(facts, beside, every, total_steps):
        least = SAVES_MISSED_MAX * every + fragments
    if owed % fragments:
        raise CheckpointMismatch(f"renumbered: expected {before} and a multiple of the {fragments} "
                                 f"fragments, found {before + owed} in the .epoch file")
    by = owed + -(-least // fragments) * fragments
    if total_steps + before + by > LAST_STEP_MAX:
        raise CheckpointMismatch(
            f"steps: expected at most {LAST_STEP_MAX}, but {by} are to be added to {facts.step}; "
            "resume with --renumber and a smaller number, or 0 if no learner is left from before")
    return Raise(by, before + by)
