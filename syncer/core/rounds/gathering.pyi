from typing import Any

from syncer.core.rounds.carry import CarryQueue
from syncer.core.rounds.membership import Membership
from syncer.core.rounds.policy import Policy
from syncer.core.rounds.round import Round

class Gathering:
    policy: Policy
    members: Membership
    rounds: dict[int, Round]
    gathering: list[Round]
    versions: list[int]
    fragments: int
    depth: int
    global_step: int
    next_step: int
    now_ns: int
    next_launch_ns: int
    sync_ns: int
    late: CarryQueue | None
    def __init__(self, config: Any, resumed: Any = None) -> None: ...
