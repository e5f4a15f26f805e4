from enum import IntEnum
from typing import Any

from syncer.core.actions import Action
from syncer.core.events import Event
from syncer.core.finishing import FinalCut
from syncer.core.membership import Membership
from syncer.core.round import Round

class Phase(IntEnum):
    WAITING = 0
    RUNNING = 1
    SAVING = 2
    FINISHING = 3
    STOPPING = 4
    ENDED = 5

class Scheduler:
    config: Any
    phase: Phase
    members: Membership
    rounds: dict[int, Round]
    gathering: list[Round]
    unsynced: dict[int, Round]
    versions: list[int]
    initialized: list[bool]
    ledger: dict[int, list[int]]
    fragments: int
    global_step: int
    next_step: int
    now_ns: int
    next_launch_ns: int
    sync_ns: int
    final_cut: FinalCut | None
    depth: int
    fixed_roster: bool
    def __init__(self, config: Any) -> None: ...
    def step(self, now_ns: int, event: Event) -> list[Action]: ...
    def deadline_ns(self) -> int | None: ...
