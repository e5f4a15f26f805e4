class Saves:
    on: bool
    every_commit: bool
    outstanding: str | None
    in_background: bool
    wanted: str | None
    durable_step: int
    failure: str | None
    def __init__(self, config: object, durable_step: int = -1) -> None: ...
