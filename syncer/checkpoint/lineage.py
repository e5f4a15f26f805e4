"""Which server process of which run speaks, and after whom; must not read a file, clock or die.

Every process of a server has an *instance*, a random number, and the *epoch* of its run: 1 for the
process that begins it, and more with every resume. A checkpoint tells the epoch and instance of its
writer and the *entries* before it: the instances of the run's past, each with the step at which the
next one went on. What an instance has broadcast up to that step is part of the run, and what it
broadcast later was lost with it. So a version that a learner holds from an earlier process is the
one that this process has, or it is not, and nobody has to compare a byte. An instance that has sent
changes (rule 18.5) has broadcast what is in no file: its entry has no step.
"""

from __future__ import annotations

from typing import NamedTuple

from syncer.errors import CheckpointMismatch

ENTRIES_MAX = 64
"""In a file, its writer among them."""
EPOCH_MAX = 2**63 - 1
UNKNOWN_EPOCH = 2**32
"""Added to the time, for a run whose file tells no epoch: above all that was counted from 1."""
Entry = tuple[int, int | None]
"""(instance, the step at which the next one went on). Without a step nothing of it is held any
more: its versions have other numbers now, or were never what its files have."""


class Origin(NamedTuple):
    """What a process begins with that no other one has."""

    instance: int
    """Random, not 0."""
    unix_s: int
    """Whole seconds since 1970."""


class Lineage(NamedTuple):
    """Of a process: who it is, and its past. Of a file: its writer, and the past of that."""

    run: str = ""
    """The name of the run, "" if it has none."""
    epoch: int = 0
    instance: int = 0
    entries: tuple[Entry, ...] = ()
    """Of the processes before this one, oldest first."""
    renumbered: int = 0
    """By how much all steps were raised: the run ends so many later than it was told."""
    sends_changes: bool = False
    """What it broadcasts has other bits than its files."""

    def stored(self, step: int) -> tuple[Entry, ...]:
        """What a file of `step` that this process writes tells."""
        held_to = None if self.sends_changes else step  # rule 18.5
        return (*self.entries[1 - ENTRIES_MAX:], (self.instance, held_to))

    def resumed(self, step: int, epoch_beside: int, origin: Origin) -> Lineage:
        """Of a process that goes on from the file of `step` that has this lineage.

        epoch_beside: of the file's `.epoch`, 0 if there is none. Raises `CheckpointMismatch` when
        no epoch is left, which nobody gets to by counting.
        """
        epoch = max(self.epoch, epoch_beside) + 1
        if epoch == 1:
            epoch = UNKNOWN_EPOCH + origin.unix_s
        if epoch > EPOCH_MAX:
            raise CheckpointMismatch(f"epoch: expected less than {EPOCH_MAX}, found {epoch - 1}; "
                                     "no server has counted so far: the file was changed")
        past = self.stored(step) if self.instance else self.entries
        return self._replace(epoch=epoch, instance=origin.instance, entries=past,
                             sends_changes=False)

    def raised(self, by: int) -> Lineage:
        """All steps were raised by so much; of 0 nothing is changed."""
        if by == 0:
            return self
        return self._replace(renumbered=self.renumbered + by,
                             entries=tuple((instance, None) for instance, _ in self.entries))

    def kept(self, instance: int, version: int, current_version: int) -> bool:
        """Whether a fragment that a learner holds, as `instance` has sent `version` of it, is the
        one that this process has at `current_version`, to the bit."""
        return version == current_version and (instance == self.instance or any(
            instance == one and step is not None and version <= step
            for one, step in self.entries))


UNTOLD = Lineage()
"""Of a file that tells nothing."""
