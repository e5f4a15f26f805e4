"""What a simulated learner with error feedback carries on, against what its run has merged.

Looks at the real packing of a learner and at the history of its run; must not change either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from syncer.kernels import decode_bf16, decode_q4, encode_bf16, encode_q4, exact_floats
from syncer.learner.fragment import Fragment
from syncer.wire.messages import Push

if TYPE_CHECKING:
    from tests.sim.fleet import Fleet
    from tests.sim.learner import SimLearner


def has_feedback(fleet: Fleet, learner: int) -> bool:
    """Every other learner, in dtypes that lose something."""
    return fleet.dtype != 1 and (learner + fleet.config.total_steps) % 4 < 2


class Packed(NamedTuple):
    """The last delta of a fragment."""

    generation: int
    step: int
    attempt: int
    is_second: bool
    """The same pull has been answered before: nobody can tell the fates of both apart."""
    error: np.ndarray


class Feedback:
    """Of one process of a learner: packs its deltas, and checks what is in them of those before."""

    def __init__(self, learner: SimLearner):
        self.learner = learner
        self.last: dict[int, Packed] = {}
        for fragment in learner.fragments if learner.session.fates.asked else ():
            fragment.feed_back()

    def pack(self, push: Push, out: np.ndarray) -> None:
        """The delta of an answer; of who has no feedback as ever."""
        fragment, fates = self.learner.fragments[push.fragment], self.learner.session.fates
        if not fates.carried(push.fragment):
            fragment.forget_error()
        if fates.asked:
            self.check(push, fragment, out)
        else:
            fragment.pack_delta(out)

    def check(self, push: Push, fragment: Fragment, out: np.ndarray) -> None:
        last, who = self.last.get(push.fragment), f"learner {self.learner.learner}, {push[1:4]}"
        session, fleet = self.learner.session, self.learner.fleet
        generation, values = session.last_generation, self.learner.values[push.fragment]
        carries = session.fates.carried(push.fragment)
        merged = last is not None and self.was_merged(last)
        if not self.is_heard():
            pass                                  # its run has gone back, and it does not know yet
        elif carries:
            assert merged, f"19.2: {who}: the error of {last} is carried on, which was not merged"
            fleet.marks.add("an error was carried on")
        elif merged and last.generation == generation:
            assert last.is_second, f"19.1: {who}: the error of {last} is lost, which was merged"
        with exact_floats():
            delta = values - fragment.anchor
            if carries:
                delta += last.error
        fragment.pack_delta(out)
        expected, kept = np.zeros_like(out), np.empty_like(values)
        (encode_bf16 if fleet.dtype == 2 else encode_q4)(delta, expected)
        assert bytes(out) == bytes(expected), f"{who}: its delta is another one"
        (decode_bf16 if fleet.dtype == 2 else decode_q4)(expected, kept, False)
        with exact_floats():
            error = delta - kept
        assert error.tobytes() == fragment.error.tobytes(), f"{who}: its error is another one"
        key = generation, push.step, push.attempt
        self.last[push.fragment] = Packed(*key, last is not None and last[:3] == key, error)

    def is_heard(self) -> bool:
        """Whether what it says reaches the server process that there is."""
        link = self.learner.link
        return link is not None and (
            link.wires[0].listener is self.learner.fleet.server.system.listener)

    def was_merged(self, last: Packed) -> bool:
        """By the answer itself, and in the history that the run has now."""
        return any(merge.step == last.step and any(
            (c.learner, c.generation, c.carried) == (self.learner.learner, last.generation, False)
            for c, _ in merge.parts) for merge in self.learner.fleet.history.merges)
