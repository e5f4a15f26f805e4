from syncer.config import Config
from syncer.core.actions import Action
from syncer.core.events import Event, Resumed
from syncer.core.rounds.carry import CarryQueue
from syncer.core.rounds.membership import Membership
from syncer.core.rounds.policy import Policy
from syncer.core.rounds.round import Round
from syncer.core.run.budget import BudgetGate
from syncer.core.run.finishing import FinalCut
from syncer.core.run.phases import Phase
from syncer.core.run.saving import Saves

class Scheduler:
    @property
    def config(self) -> Config: ...
    policy: Policy
    members: Membership
    now_ns: int
    rounds: dict[int, Round]
    gathering: list[Round]
    versions: list[int]
    fragments: int
    depth: int
    global_step: int
    next_step: int
    next_launch_ns: int
    sync_ns: int
    late: CarryQueue | None
    phase: Phase
    unsynced: dict[int, Round]
    ledger: dict[int, list[int]]
    saves: Saves
    final_cut: FinalCut | None
    budget: BudgetGate | None
    @property
    def initialized(self) -> list[bool]: ...
    def __init__(self, config: Config, resumed: Resumed | None = ...) -> None: ...
    def step(self, now_ns: int, event: Event) -> list[Action]: ...
    def deadline_ns(self) -> int | None: ...
