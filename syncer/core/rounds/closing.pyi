from enum import IntEnum

class Verdict(IntEnum):
    WAIT = 0
    CLOSE = 1
    RELAUNCH = 2

def decide_close(
    now_ns: int, answered: int, expected: int, contributed: bool, quorum: bool,
    grace_deadline_ns: int, quorum_deadline_ns: int, soft_deadline_ns: int = ...,
) -> Verdict: ...
def grace_ns(
    gamma: float, tau: float, cap_ns: int, step_time_s: float, since_launch_s: float, sync_s: float
) -> int: ...
def launch_interval_ns(
    floor_ns: int, interval_steps: float, step_time_s: float, fragments: int
) -> int: ...
