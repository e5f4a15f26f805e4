from enum import IntEnum
from typing import Self

from syncer.core.actions import Contribution
from syncer.core.events import Push
from syncer.core.rounds.carry import Carried
from syncer.core.rounds.membership import Member
from syncer.core.rounds.policy import Policy

class RoundState(IntEnum):
    GATHERING = 0
    COMPUTING = 1
    READY = 2

class Slot:
    member: Member
    push: Push | None
    holds: bool
    def __new__(cls, member: Member) -> Self: ...

class Round:
    step: int
    fragment: int
    base: int
    attempt: int
    state: RoundState
    slots: dict[int, Slot]
    carried: dict[int, Carried]
    answered: int
    pushed: int
    capacity_expected: int
    capacity_answered: int
    launch_ns: int
    quorum_deadline_ns: int
    quorum_ns: int
    grace_deadline_ns: int
    grace_ns: int
    released: list[int]
    joined: list[int]
    stale_refused: int
    contributions: tuple[Contribution, ...] | None
    compute_ns: int
    gnorm: float
    error: str | None
    committed_ns: int
    def __new__(cls, step: int, fragment: int, base: int, policy: Policy) -> Self: ...
