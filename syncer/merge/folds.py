"""Folds: pushes added to sums as they come, so that none has to wait; must not publish anything.

  exact      equal weights, in roster order: an early push is parked. Same bits as a batch merge.
  streaming  in order of arrival, any number of them. Bits depend on that order, never on threads.

With d a gradient after clipping and correction, w its weight and n its norm per tensor:

  avg        S += f32(w)*d, W += w;  at the close S * f32(1/W)
  rda        also V += f32(w/n)*d (n not 0) and R += n*w; at the close, with D the norm of V,
             V * f32((R/W)/D), or S * f32(1/W) if D < 1e-12
             (a factor w/n that is no finite f32 counts as 0: so short a push has no direction)
  exact      w is 1/M for the factors of S and V, so that S itself is the average

A fold keeps S, for rda V, and the push it is adding: never more than two arrays and one gradient. A
relaunch drops the fold and opens another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias, TypedDict, Unpack

from syncer import kernels
from syncer.errors import InvariantViolation, NumericsError
from syncer.merge import engine
from syncer.merge.buffers import Buffer
from syncer.merge.robust import clip_factors
from syncer.merge.stats import LearnerSums

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Member = tuple[int, int]
Gradient: TypeAlias = "NDArray[np.float32] | Callable[[], NDArray[np.float32]]"
"""An f32 array of the fragment's length, or a call that decodes it when it is needed."""

WEIGHT_MAX = 2.0**96
"""Largest weight of a streaming fold, where it is a factor of its own as f32: counters are u64, and
their extremes must not make a sum infinite. No run comes near it."""


class FoldOptions(TypedDict):
    """What a fold is opened with, besides its sums."""

    fragment: int
    base: int
    """Version of the fragment whose momentum corrects the pushes."""
    momentum: Buffer | None
    heloco: Sequence[float] | None
    clip_norm: float | None
    stats: bool


class Fold:
    """The sums of one open round. `add` may be called from any thread, one round's in any order.

    sums: empty `engine.FoldSums`. momentum, heloco, clip_norm: of the corrections, or None.
    """

    def __init__(self, sums: engine.FoldSums, **options: Unpack[FoldOptions]):
        self.sums: engine.FoldSums | None = sums
        self.fragment = options["fragment"]
        self.base = options["base"]
        self.members: list[Member] = []
        """Members folded so far, in the order of folding."""
        self.stats: list[LearnerSums] | None = [] if options["stats"] else None
        """Sums of each member for the statistics, when they are on."""
        self._momentum = options["momentum"]
        self._heloco = options["heloco"]
        self._clip_norm = options["clip_norm"]
        self._lock = threading.Lock()

    def close(self) -> None:
        """Gives the sums and the momentum back; only the members and statistics stay."""
        self.sums = self._momentum = None

    def open_sums(self) -> engine.FoldSums:
        """The sums. Raises InvariantViolation if the fold is closed."""
        if self.sums is None:
            raise InvariantViolation(f"the fold of fragment {self.fragment} is closed")
        return self.sums

    @property
    def pushes(self) -> int:
        """Gradients added to the sums so far; a parked one is not."""
        return len(self.members)

    @property
    def scale(self) -> float:
        """What turns the sum S into the average."""
        raise NotImplementedError

    def add(self, learner: int, generation: int, weight: float,
            gradient: Gradient) -> list[Member]:
        """Takes one push, whole and finite; returns the members that were folded by this.

        What belongs to the returned members is not needed any more. Raises InvariantViolation for a
        member that was given before (or, exact, is not in the roster), ValueError for a gradient of
        another size; then nothing was folded.
        """
        raise NotImplementedError

    def check_complete(self) -> None:
        """Raises NumericsError `fold incomplete` if the round must not close yet."""
        raise NotImplementedError

    def _fold(self, member: Member, factor: float, weight: float, gradient: Gradient) -> None:
        """Adds it to the sums and names its member, or does neither: what takes memory is first."""
        sums = self.open_sums()
        array = gradient() if callable(gradient) else gradient
        pushes, along = len(self.members), 0.0
        clip = norm = 1.0
        if self._clip_norm is not None or self.stats is not None:
            norm = engine.norms(sums.plan, [array])[0]
        if self._clip_norm is not None:
            clip = clip_factors(self._clip_norm, [norm])[0]
        if self.stats is not None:
            if self._momentum is not None:
                along = kernels.dot(array, self._momentum)
            self.stats.append((norm * norm, None, along, (0, 0, 0)))
        try:
            self.members.append(member)
            turned = engine.add(sums, array, factor=factor, weight=weight,
                                momentum=self._momentum, heloco=self._heloco, clip=clip)
        except BaseException:
            del self.members[pushes:]
            if self.stats is not None:
                del self.stats[pushes:]
            raise
        if self.stats is not None:
            with suppress(MemoryError):  # it has been added, and must not be again
                self.stats[pushes] = norm * norm, None, along, turned


class StreamingFold(Fold):
    """Every push at once, in order of arrival."""

    @property
    def scale(self) -> float:
        total = self.open_sums().weight_sum
        return 1.0 / total if total > 0.0 else 0.0

    def add(self, learner: int, generation: int, weight: float,
            gradient: Gradient) -> list[Member]:
        weight = min(weight, WEIGHT_MAX)
        folded = [(learner, generation)]
        with self._lock:
            self._fold(folded[0], weight, weight, gradient)
        return folded

    def check_complete(self) -> None:
        if not self.members:
            raise NumericsError(
                f"fold incomplete: fragment {self.fragment} has no push; at least one is needed")


class ExactFold(Fold):
    """In roster order, with equal weights; what comes early is parked, as it was given.

    roster: learner ids; any generation of a learner may answer for it, once.
    """

    def __init__(self, sums: engine.FoldSums, roster: Sequence[int],
                 **options: Unpack[FoldOptions]):
        super().__init__(sums, **options)
        self.roster = tuple(sorted(roster))
        if not self.roster or len(set(self.roster)) != len(self.roster):
            raise InvariantViolation(f"an exact fold needs distinct learners, not {list(roster)}")
        self._parked: dict[int, tuple[Member, Gradient]] = {}
        self._again: Member | None = None
        """Whose `add` is under way, or has found no memory, and"""
        self._untold: list[Member] = []
        """what it has folded by now."""

    @property
    def parked(self) -> list[Member]:
        """Members whose push waits for an earlier one of the roster."""
        return sorted(member for member, _ in self._parked.values())

    @property
    def scale(self) -> float:
        return 1.0

    def add(self, learner: int, generation: int, weight: float,
            gradient: Gradient) -> list[Member]:
        """As for every fold; `weight` must be 1. One that raises MemoryError is called again."""
        if weight != 1.0:
            raise InvariantViolation(f"an exact fold has equal weights of 1, not {weight}")
        with self._lock:
            giver = learner, generation
            if self._again != giver:
                self._park(giver, gradient)
            self._again = giver  # until all that it leads to is told
            for waiting in self.roster[self.pushes:]:
                if waiting not in self._parked:
                    break
                member, parked = self._parked[waiting]
                self._untold.append(member)
                try:
                    self._fold(member, 1.0 / len(self.roster), 1.0, parked)
                except BaseException as error:
                    self._untold.pop()
                    if not isinstance(error, MemoryError):
                        self._again = None
                        del self._parked[waiting]
                    raise
                del self._parked[waiting]
            folded, self._untold = self._untold, []
            self._again = None
            return folded

    def _park(self, member: Member, gradient: Gradient) -> None:
        learner = member[0]
        if learner not in self.roster[self.pushes:] or learner in self._parked:
            raise InvariantViolation(
                f"push of learner {learner} for the exact fold of fragment {self.fragment}: "
                f"expected one push of each of {list(self.roster)}")
        self._parked[learner] = member, gradient

    def check_complete(self) -> None:
        missing = self.roster[self.pushes:]
        if missing:
            raise NumericsError(
                f"fold incomplete: fragment {self.fragment} closes with {self.pushes} of "
                f"{len(self.roster)} pushes; missing learners {list(missing)}")
