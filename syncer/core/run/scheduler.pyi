from enum import IntEnum
from typing import Any

from syncer.core.actions import Action
from syncer.core.events import Event, Resumed
from syncer.core.rounds.admission import Admission
from syncer.core.rounds.round import Round
from syncer.core.run.budget import BudgetGate
from syncer.core.run.finishing import FinalCut
from syncer.core.run.saving import Saves

class Phase(IntEnum):
    WAITING = 0
    RUNNING = 1
    SAVING = 2
    FINISHING = 3
    CUTOFF = 4
    STOPPING = 5
    ENDED = 6

class Scheduler(Admission):
    config: Any
    phase: Phase
    initialized: list[bool]
    unsynced: dict[int, Round]
    ledger: dict[int, list[int]]
    final_cut: FinalCut | None
    budget: BudgetGate | None
    saves: Saves
    def __init__(self, config: Any, resumed: Resumed | None = None) -> None: ...
    def step(self, now_ns: int, event: Event) -> list[Action]: ...
    def deadline_ns(self) -> int | None: ...
    def record_shutdown(self) -> None: ...
