from collections.abc import Callable, Sequence

from syncer.server.conn import Channel, Owner

FAREWELL_S: float
FAREWELLS_MAX: int

class Farewell(Owner):
    def __init__(self, channels: Sequence[Channel], main: Channel,
                 done: Callable[[], object] | None = None) -> None: ...
    def finish(self, frames: list[bytes]) -> None: ...
    def close(self) -> None: ...

class Farewells:
    open: dict[Farewell, None]
    def __init__(self) -> None: ...
    def say(self, channels: Sequence[Channel], main: Channel, frames: list[bytes]) -> None: ...
