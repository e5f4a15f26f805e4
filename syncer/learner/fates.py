"""What became of the last answer of each fragment, as far as its error may be carried on (wire 21).

What a delta has lost when it was packed is added to the next one of its fragment if the answer was
merged, and to none otherwise: what was refused is in the local values still, or is given up, and
its error would be counted for nothing. Whatever is not known is taken for not merged. Must not know
tensors or connections.
"""

from __future__ import annotations

from collections.abc import Sequence

from syncer.protocol import PushFate
from syncer.wire.extended import Fate
from syncer.wire.messages import Pull


class Fates:
    """Of one learner, over all its connections, if it has asked. Calls are serialised."""

    def __init__(self, fragments: int, asked: bool):
        self.asked = asked
        self._waiting: list[tuple[int, int] | None] = [None] * fragments
        """(step, attempt) of the last answer, until its fate is told."""
        self._unseen: list[tuple[int, int] | None] = [None] * fragments
        """Of one that had not come when the server asked again."""
        self._merged: list[int | None] = [None] * fragments
        """The step that the last answer was merged in."""
        self._carried: list[bool] = [False] * fragments
        self._heard = False
        self.untold = False
        """Whether the server asks on, and tells nothing."""

    def begin(self, is_welcomed: bool) -> None:
        """A new connection: what is not known by now will not be told. is_welcomed: whether a
        WELCOME will say what counts of what is known."""
        count = len(self._waiting)
        self._waiting, self._unseen = [None] * count, [None] * count
        self._heard = False
        if not is_welcomed:
            self._merged = [None] * count

    def welcomed(self, kept: Sequence[bool], versions: Sequence[int]) -> None:
        """The server of a new connection keeps these fragments, which are here at these versions:
        of those, and no others, it has merged what the one before it had."""
        for fragment, step in enumerate(self._merged):
            if step is not None and not (kept[fragment] and versions[fragment] >= step):
                self._merged[fragment] = None

    def answered(self, pull: Pull) -> None:
        """A delta is about to be packed for this pull. If the same was answered before, and that
        may still be on its way, nobody can tell which of both a fate is about."""
        fragment, key = pull.fragment, (pull.step, pull.attempt)
        before = self._waiting[fragment]
        self.untold = self.asked and before not in (None, key) and not self._heard
        self._carried[fragment] = self._merged[fragment] is not None
        self._merged[fragment] = None
        self._waiting[fragment] = key
        if key in (before, self._unseen[fragment]):
            self._waiting[fragment], self._unseen[fragment] = None, key

    def take(self, fate: Fate) -> bool:
        """The server has told one. False: nobody has something to do for it."""
        self._heard = True
        fragment, key = fate.fragment, (fate.step, fate.attempt)
        if self._waiting[fragment] != key:
            return False
        self._waiting[fragment] = None
        if fate.fate == PushFate.MERGED:
            self._merged[fragment] = fate.step
        elif fate.fate == PushFate.NOT_COME:
            self._unseen[fragment] = key
        return False

    def carried(self, fragment: int) -> bool:
        """Whether the delta that `answered` spoke of has the error of the one before it in it."""
        return self._carried[fragment]

    def merged(self, fragment: int) -> int | None:
        """The step in which the last answer was merged, if it was and that is known."""
        return self._merged[fragment]

    def resume(self, fragment: int, step: int) -> None:
        """An earlier process of the learner knew this."""
        self._merged[fragment] = step
