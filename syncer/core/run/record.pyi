from typing import Any

from syncer.core.rounds.round import Round

DELTA_SEMANTICS: str

def merge_record(round: Round, layout_hash: str, quorum: int, sync_ns: int) -> dict[str, Any]: ...
def failure_record(metric: str, error: str) -> dict[str, Any]: ...
