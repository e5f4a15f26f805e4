from syncer.config import Config
from syncer.core.actions import SaveKind

class Saves:
    on: bool
    every_commit: bool
    outstanding: SaveKind | None
    in_background: bool
    wanted: SaveKind | None
    durable_step: int
    failure: str | None
    def __init__(self, config: Config, durable_step: int = ...) -> None: ...
