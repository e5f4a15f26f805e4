from typing import Any

from syncer.core.rounds.round import Round
from syncer.protocol import PROTOCOL_VERSION as PROTOCOL_VERSION

DELTA_SEMANTICS: str

def merge_record(round: Round, layout_hash: str, quorum: int, sync_ns: int) -> dict[str, Any]: ...
def failure_record(metric: str, error: str) -> dict[str, Any]: ...
