from enum import IntEnum

from syncer.core.events import Event

TABLE: str
MEANING: dict[str, str]

class Phase(IntEnum):
    WAITING = 0
    RUNNING = 1
    SAVING = 2
    FINISHING = 3
    CUTOFF = 4
    STOPPING = 5
    ENDED = 6

class Handler(IntEnum):
    IGNORE = 0
    DEFECT = 1
    TIME = 2
    HELLO = 3
    TURN_AWAY = 4
    GONE = 5
    INIT = 6
    PROGRESS = 7
    PUSH = 8
    OUTLIVED = 9
    RELEASE = 10
    FOLDED = 11
    CAUGHT_UP = 12
    MERGED = 13
    SYNCED = 14
    SAVED = 15
    EARLY = 16
    ACK = 17
    BUDGET = 18
    STOP = 19
    MISFIT = 20
    NO_ROOM = 21
    BROKEN = 22
    STALLED = 23

def phases() -> list[str]: ...
def rows() -> dict[str, list[str]]: ...
def handler(phase: Phase, event: Event) -> Handler: ...
